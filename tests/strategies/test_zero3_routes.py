"""The ways to a training and from it: evaluations, predictions, checkpoints by name, modules of other strategies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor, nn

from tests.comparing import assert_same
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.parity import ddp, make_trainer, whole, zero1, zero3

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero3": zero3,
    "zero3 sharded": lambda: zero3(checkpoint_format="sharded"),
}


class Sized(zoo.MLP):
    """As large as its hyperparameter says; predicts what it computes."""

    def __init__(self, width: int = 33) -> None:
        self.width = width
        super().__init__()
        self.save_hyperparameters("width")

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(zoo.FEATURES, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch)


def own(length: int) -> Any:
    return zoo.loader(length, 4, rank=dist.get_rank(), world_size=dist.get_world_size())


def evaluate_all_the_way(strategy: str, folder: str, weights_only: bool) -> dict[str, Any]:
    """What one Trainer evaluates before, between and after two trainings."""
    torch.manual_seed(0)
    module = Sized(21)
    saving = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=weights_only, save_top_k=2, save_last=True)
    trainer = make_trainer(STRATEGIES[strategy](), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    found: dict[str, Any] = {"before": trainer.validate(module, own(12), verbose=False)}
    trainer.fit(module, own(36), own(12))
    found["after"] = trainer.validate(module, own(12), verbose=False)
    found["best"] = trainer.test(dataloaders=own(12), ckpt_path="best", verbose=False)
    found["last"] = trainer.validate(dataloaders=own(12), ckpt_path="last", verbose=False)
    found["predicted"] = trainer.predict(module, own(12), ckpt_path="best")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, own(36), own(12))
    found["again"] = trainer.validate(module, own(12), verbose=False)
    found["steps"] = trainer.global_step
    trainer.save_checkpoint(f"{folder}/end.ckpt", weights_only)
    found["parameters"] = [whole(parameter.detach()).clone() for parameter in module.parameters()]
    return found


@pytest.mark.parametrize(
    ("strategy", "weights_only", "ranks"),
    [("zero3", True, 2), pytest.param("zero3 sharded", False, 3, marks=pytest.mark.slow)],
)
def test_one_trainer_evaluates_and_trains_again_as_ddps_does(
    pool: RankPool, tmp_path: Path, strategy: str, weights_only: bool, ranks: int
) -> None:
    expected = pool.run(ranks, evaluate_all_the_way, "ddp", str(tmp_path / "ddp"), weights_only)
    actual = pool.run(ranks, evaluate_all_the_way, strategy, str(tmp_path / "zero3"), weights_only)
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
    if strategy == "zero3":
        # The file is a module in a single process.
        loaded = Sized.load_from_checkpoint(tmp_path / "zero3" / "end.ckpt")
        assert loaded.width == 21 and type(loaded.net[0].weight) is nn.Parameter
        assert_same([parameter.detach() for parameter in loaded.parameters()], actual[0]["parameters"])


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.given: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *place: Any) -> None:
        indices, _, *numbers = place
        assert type(prediction) is Tensor
        self.given.append([prediction.clone(), indices, numbers])

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.given.append([predictions, batch_indices])


def predict(strategy: str) -> list[Any]:
    """What is returned and what is written of one loader and of some; ranks may have a batch less than others."""
    found: list[Any] = []
    several = [13, 11, 10]
    for lengths, returned in (([20], True), (several, True), (several, False)):
        torch.manual_seed(0)
        writer = Writer()
        loaders = [torch.utils.data.DataLoader(zoo.Samples(length), batch_size=2) for length in lengths]
        trainer = make_trainer(STRATEGIES[strategy](), callbacks=[writer])
        found += [trainer.predict(Sized(), loaders, return_predictions=returned), writer.given]
    return found


def test_predictions_are_ddps_on_each_rank(pool: RankPool) -> None:
    assert_same(pool.run(3, predict, "zero3"), pool.run(3, predict, "ddp"), rtol=1e-5, atol=1e-6)


class Intricate(Sized):
    """Units within units, and one that is called twice."""

    def build(self) -> None:
        inner = [nn.Sequential(nn.Linear(zoo.FEATURES, zoo.FEATURES), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.LayerNorm(zoo.FEATURES)) for one in inner)
        self.net = nn.Linear(zoo.FEATURES, 1)

    def forward(self, batch: Tensor) -> Tensor:
        for number in (0, 1, 0):
            batch = self.blocks[number](batch)
        return self.net(batch)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch))


class ByHand(Intricate):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()


def evaluate_unevenly(make: Callable[[], Any], policy: dict[str, Any] | None) -> list[Any]:
    """Of ranks with one, two and three batches: what each has itself, beside, between and after training."""
    torch.manual_seed(0)
    module, rank = make(), dist.get_rank()
    strategy = ddp() if policy is None else zero3(**policy)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False, limit_predict_batches=rank + 1)
    found = [trainer.predict(module, [zoo.loader(4 * rank + 4, 4), zoo.loader(13, 2)])]
    trainer.fit(module, own(24), zoo.loader(4 * rank + 4, 4))
    found += [float(trainer.callback_metrics["val_loss"]), trainer.validate(module, zoo.loader(4 * rank + 4, 4))]
    return [*found, [whole(parameter.detach()).clone() for parameter in module.parameters()]]


POLICIES: dict[str, dict[str, Any]] = {
    "found": {},
    "nested": {"wrap": ["Linear", "Sequential"]},
    "kept": {"wrap": ["Linear", "Sequential"], "reshard_after_forward": False},
    "at once": {"min_num_params": 10**9},
}


@pytest.mark.parametrize(
    ("make", "policy", "world_size"),
    slow_unless(
        lambda *case: case in [(Intricate, "nested", 3), (Intricate, "kept", 2), (ByHand, "found", 2)],
        [
            (make, policy, 2 + (number + by_hand) % 2)
            for by_hand, make in enumerate((Intricate, ByHand))
            for number, policy in enumerate(POLICIES)
        ],
    ),
)
def test_ranks_evaluate_different_numbers_of_batches(
    pool: RankPool, make: Callable[[], Any], policy: str, world_size: int
) -> None:
    expected = pool.run(world_size, evaluate_unevenly, make, None)
    actual = pool.run(world_size, evaluate_unevenly, make, POLICIES[policy])
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)


class Sensitive(Intricate):
    """Evaluates how much its output depends on its input."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            batch = batch.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self(batch).sum(), batch)
        self.log("val_loss", gradient.norm(), sync_dist=True)


def evaluate_gradients(strategy: str, batches: tuple[int, int]) -> list[Any]:
    torch.manual_seed(0)
    chosen = ddp() if strategy == "ddp" else zero3(**POLICIES["nested"])
    trainer = make_trainer(chosen, max_epochs=2, use_distributed_sampler=False, inference_mode=False)
    module = Sensitive()
    trainer.fit(module, own(24), zoo.loader(4 * batches[dist.get_rank()], 4))
    return [float(trainer.callback_metrics["val_loss"]), [whole(p.detach()).clone() for p in module.parameters()]]


def test_an_evaluation_may_compute_gradients(pool: RankPool) -> None:
    expected = pool.run(2, evaluate_gradients, "ddp", (2, 2))
    assert_same(pool.run(2, evaluate_gradients, "zero3", (2, 2)), expected, rtol=1e-4, atol=1e-5)
    # Nobody follows gradients of a batch more.
    with pytest.raises(RankError, match=r"val_dataloader.*gradients are computed"):
        pool.run(2, evaluate_gradients, "zero3", (1, 2))


def train_by_turns(order: list[str]) -> list[Tensor]:
    """Of one module that Trainers train, one after the other."""
    torch.manual_seed(0)
    module = Sized()
    for strategy in order:
        make_trainer(STRATEGIES[strategy]()).fit(module, own(24), own(8))
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


def test_another_strategys_module_is_trained_on(pool: RankPool) -> None:
    expected = pool.run(2, train_by_turns, ["ddp"] * 3)
    assert_same(pool.run(2, train_by_turns, ["zero1", "ddp", "zero3"]), expected, rtol=1e-4, atol=1e-5)
