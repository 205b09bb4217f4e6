"""Everything around the steps: what a Trainer does before, between and after them."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_parstrat import TunedDDPStrategy
from tests.accounting import traffic_of
from tests.comparing import worst
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, zero1


def fit_twice() -> None:
    torch.manual_seed(0)
    module = zoo.MLP()
    parameters = list(module.parameters())
    data = zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size())
    for epochs in (1, 1):
        before = [parameter.detach().clone() for parameter in parameters]
        trainer = make_trainer(zero1(), max_epochs=epochs)
        trainer.fit(module, data)
        assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
        assert all((now != then).any() for now, then in zip(parameters, before, strict=True))
        for parameter in parameters:
            # Storage of its own again: what is pickled or moved is the parameter, not its bucket.
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert not parameter._post_accumulate_grad_hooks


def test_fit_after_fit_and_ordinary_storage_between(pool: RankPool) -> None:
    pool.run(2, fit_twice)


class SameOptimizer(zoo.MLP):
    """Returns the optimizer of its first training again, whose state is to go on."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = [zoo.adamw(self.parameters())]
        return self.kept[0]


def the_same_optimizer_twice(strategy: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = SameOptimizer()
    data = zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size())
    for _ in range(2):
        make_trainer(ddp() if strategy == "ddp" else zero1()).fit(module, data)
    return [parameter.detach() for parameter in module.parameters()]


def test_an_optimizer_used_in_two_trainings_keeps_its_state(pool: RankPool) -> None:
    expected = pool.run(2, the_same_optimizer_twice, "ddp")[0]
    for parameters in pool.run(2, the_same_optimizer_twice, "zero1"):
        torch.testing.assert_close(parameters, expected, rtol=2e-5, atol=1e-6)


def all_entry_points(strategy: str) -> list[float]:
    torch.manual_seed(0)
    module = zoo.BatchNormalised()
    trainer = make_trainer(ddp() if strategy == "ddp" else zero1(), use_distributed_sampler=True)
    data = DataLoader(zoo.Samples(24), batch_size=4)
    results = [trainer.validate(module, data, verbose=False)[0]["val_loss"]]
    trainer.fit(module, data, data)
    results.append(trainer.callback_metrics["val_loss"].item())
    results.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    results.append(trainer.test(module, data, verbose=False)[0]["test_loss"])
    predictions = trainer.predict(module, data)
    results.append(torch.cat(predictions).sum().item())
    return results


def test_validate_fit_test_and_predict_give_what_ddp_gives(pool: RankPool) -> None:
    expected = pool.run(2, all_entry_points, "ddp")
    for actual, reference in zip(pool.run(2, all_entry_points, "zero1"), expected, strict=True):
        assert actual == pytest.approx(reference, rel=2e-5)


class SeenSamples(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self.seen[-1] += batch[:, 0].tolist()


def samples_seen(strategy: str) -> list[list[float]]:
    seen = SeenSamples()
    trainer = make_trainer(ddp() if strategy == "ddp" else zero1(), max_epochs=3, callbacks=[seen])
    trainer.fit(zoo.MLP(), DataLoader(zoo.Samples(24), batch_size=4, shuffle=True))
    return seen.seen


def test_the_sampler_is_distributed_and_reshuffled_each_epoch_as_under_ddp(pool: RankPool) -> None:
    ours, theirs = pool.run(2, samples_seen, "zero1"), pool.run(2, samples_seen, "ddp")
    assert ours == theirs
    first, second = ours[0][0], ours[1][0]
    assert not set(first) & set(second) and len(first) == len(second) == 12
    assert ours[0][0] != ours[0][1]


class CountTraffic(Callback):
    """Collects what the engine sent between the end of one step and the end of the next."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.before: tuple[int, ...] = ()
        self.formula: tuple[int, ...] = ()
        self.state_elements = 0
        self.parameters = 0

    def totals(self, trainer: Trainer) -> tuple[int, ...]:
        engine = trainer.strategy._engine
        gradients = engine.reducer.collectives.traffic
        parameters = engine.gatherer.collectives.traffic
        control = engine.reducer.control.traffic
        return (
            gradients.reduce_scatters,
            gradients.reduce_scatter_bytes,
            parameters.all_gathers,
            parameters.all_gather_bytes,
            gradients.small_reductions,
            control.small_reductions,
        )

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.before = self.totals(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        now = self.totals(trainer)
        self.steps.append(tuple(new - old for new, old in zip(now, self.before, strict=True)))
        self.formula = traffic_of(trainer.strategy._engine)[:4]
        state = trainer.optimizers[0].state.values()
        self.state_elements = sum(entries["exp_avg"].numel() for entries in state)
        self.parameters = sum(parameter.numel() for parameter in pl_module.parameters())


def traffic_of_a_training(accumulate: int) -> CountTraffic:
    counter = CountTraffic()
    train(
        lambda: zoo.ScheduledTransformer(),
        zero1(),
        callbacks=[counter],
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
    )
    return counter


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_bytes_and_state_equal_the_formulas(pool: RankPool, world_size: int) -> None:
    several = int(world_size > 1)
    for accumulate in (1, 2):
        counters = pool.run(world_size, traffic_of_a_training, accumulate)
        for counter in counters:
            # One scalar for the norm, one control message.
            full_step = (*counter.formula, several, several)
            silent = (0,) * 6
            expected = [full_step if (index + 1) % accumulate == 0 else silent for index in range(10)]
            # The first backward of all asks whether losses have weights.
            expected[0] = (*expected[0][:-1], expected[0][-1] + several)
            assert counter.steps == expected
            assert (counter.formula[0] > 1) == (world_size > 1)
            # 16 elements of alignment per tensor at most; the transformer has 26 tensors in its buckets.
            assert abs(counter.state_elements - counter.parameters / world_size) <= 26 * 16
        assert sum(counter.state_elements for counter in counters) == counters[0].parameters


class Failing(zoo.MLP):
    """Fails once in a step: in the forward or in the backward."""

    where = "forward"

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.compute_loss(batch)
        if batch_idx == 2 and self.where:
            if self.where == "forward":
                raise KeyError("data is broken")
            loss.register_hook(self._fail)
        return loss

    def _fail(self, gradient: Tensor) -> Tensor:
        raise KeyError("data is broken")


def train_after_a_failure(where: str) -> float:
    data = zoo.loader(40, 4, rank=dist.get_rank(), world_size=dist.get_world_size())
    torch.manual_seed(0)
    module = Failing()
    module.where = where
    strategy = zero1()
    trainer = make_trainer(strategy)
    with pytest.raises(KeyError):
        trainer.fit(module, data)
    module.where = ""
    state = {name: value.clone() for name, value in module.state_dict().items()}

    def resumed() -> zoo.Zoo:
        fresh = zoo.MLP()
        fresh.load_state_dict(state)
        return fresh

    def mended() -> zoo.Zoo:
        return module

    return largest_difference(train(mended, zero1()), train(resumed, ddp()))


def test_a_module_can_be_trained_after_a_failure_in_a_step(pool: RankPool) -> None:
    for where in ("forward", "backward"):
        assert worst(pool.run(2, train_after_a_failure, where)) <= 2e-5


class FailingMidway(zoo.MLP):
    """Large enough that transfers are under way when backward fails."""

    broken = True

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(zoo.FEATURES if not i else 256, 256) for i in range(5)), nn.Linear(256, 1))
        self.net[0].weight.register_hook(self._fail)

    def _fail(self, gradient: Tensor) -> Tensor:
        if self.broken and self.trainer.global_step == 2:
            raise KeyError("data is broken")
        return gradient


def train_after_a_failure_with_transfers_under_way() -> float:
    data = zoo.loader(40, 4, rank=dist.get_rank(), world_size=dist.get_world_size())
    torch.manual_seed(0)
    module = FailingMidway()
    with pytest.raises(KeyError):
        make_trainer(zero1(bucket_cap_mb=0.1)).fit(module, data)
    FailingMidway.broken = False

    def fresh() -> zoo.Zoo:
        return FailingMidway()

    return largest_difference(train(fresh, zero1(bucket_cap_mb=0.1)), train(fresh, ddp()))


def test_a_failure_with_transfers_under_way_does_not_reach_the_next_training(own_pool: RankPool) -> None:
    assert worst(own_pool.run(2, train_after_a_failure_with_transfers_under_way)) <= 2e-5


class Finetuned(zoo.MLP):
    """BackboneFinetuning freezes and later unfreezes ``backbone``, whose parameters then join the optimizer."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(zoo.FEATURES, 9), nn.Tanh())
        self.head = nn.Linear(9, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.head(self.backbone(batch)) - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


def finetune(strategy: str, path: str, whole_batch: bool) -> list[Tensor]:
    """Three epochs, of which the backbone trains in the last two, saved after the second and resumed."""
    world_size = dist.get_world_size()
    results = []
    for epochs, checkpoint in ((2, None), (3, path)):
        torch.manual_seed(0)
        module = Finetuned()
        data = (
            zoo.loader(24 * world_size, 4 * world_size)
            if whole_batch
            else zoo.loader(24 * world_size, 4, rank=dist.get_rank(), world_size=world_size)
        )
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
        trainer = make_trainer(zero1() if strategy == "zero1" else None, max_epochs=epochs, callbacks=[callback])
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
        if checkpoint is None:
            trainer.save_checkpoint(path)
        results = [parameter.detach() for parameter in module.parameters()]
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backbone_unfrozen_in_training_goes_on_after_resuming(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    # DDP itself never reduces what was frozen when it was created: the oracle is one process on the whole batch.
    ours = pool.run(world_size, finetune, "zero1", str(tmp_path / "ours.ckpt"), False)
    for rank, parameters in enumerate(ours):
        expected = pool.run(world_size, finetune, "single", str(tmp_path / "single.ckpt"), True)[rank]
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


class CopiesCallbacks(Callback):
    """As programs do that compare callbacks before and after."""

    def __init__(self) -> None:
        self.first: list[Callback] = []
        self.last: list[Callback] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = list(trainer.callbacks)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.last = copy.deepcopy([one for one in trainer.callbacks if one is not self])


def copy_and_pickle(strategy: str) -> tuple[int, int]:
    copies = CopiesCallbacks()
    kind = zero1() if strategy == "zero1_custom" else TunedDDPStrategy()
    trainer = make_trainer(kind, max_epochs=1, callbacks=copies)
    trainer.fit(zoo.MLP(), zoo.loader(16, 4, rank=dist.get_rank(), world_size=dist.get_world_size()))
    assert "SavesWhenPreempted" in [type(one).__name__ for one in copies.last]
    assert copies.first == trainer.callbacks
    copies.last.clear()
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    return torch.load(file, weights_only=False).global_step, trainer.global_step


def test_callbacks_are_copied_in_a_training_and_a_trainer_pickled_after_it(pool: RankPool) -> None:
    for strategy in ("zero1_custom", "ddp_tuned"):
        for restored, steps in pool.run(2, copy_and_pickle, strategy):
            assert restored == steps > 0


class Nothing(zoo.MLP):
    def configure_optimizers(self) -> None:
        return None


def fit_without_optimizer() -> None:
    train(lambda: Nothing(), zero1())


def test_a_module_without_optimizer_runs(pool: RankPool) -> None:
    pool.run(2, fit_without_optimizer)


class PartialCheckpoint(zoo.MLP):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"net.0.bias": checkpoint["state_dict"]["net.0.bias"]}
        checkpoint["optimizer_states"] = []


def save_partially(path: str) -> None:
    run = train(lambda: PartialCheckpoint(), zero1(bucket_cap_mb=8), callbacks=[SaveInTraining(path)])
    assert run.trainer.global_step == 10


class SaveInTraining(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


def test_a_partial_checkpoint_does_not_bring_whole_buckets_along(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "part.ckpt"
    pool.run(2, save_partially, str(path))
    saved = torch.load(path, weights_only=True)["state_dict"]["net.0.bias"]
    assert saved.untyped_storage().nbytes() == saved.nbytes
