"""What surrounds a training under ``zero3_custom``: evaluation, several trainings, callbacks, bad input, policies."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat import GradNormMonitor, ZeRO3Strategy
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import (
    by_flag,
    ddp,
    largest_difference,
    make_trainer,
    train,
    whole,
    zero3,
)


def evaluate() -> tuple[list[float], bool, bool]:
    """Metrics of three evaluations, under ``ddp`` and here; and whether parameters are sharded, and whole on demand."""
    torch.manual_seed(0)
    found = []
    for strategy in (ddp(), zero3()):
        torch.manual_seed(0)
        module = zoo.MLP()
        trainer = make_trainer(strategy)
        (validated,) = trainer.validate(module, zoo.loader(16, 4), verbose=False)
        (tested,) = trainer.test(module, zoo.loader(16, 4), verbose=False)
        trainer.predict(module, zoo.loader(16, 4))
        found += [validated["val_loss"], tested["test_loss"]]
    sharded = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    trainer = make_trainer(zero3(), max_epochs=1)
    shown = Shows()
    trainer.callbacks.append(shown)
    trainer.fit(module, zoo.loader(16, 4))
    return found, sharded, shown.are_whole


class Shows(Callback):
    are_whole = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with trainer.strategy.full_parameters() as module:
            self.are_whole = not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def test_evaluates_as_ddp_does_and_shows_whole_parameters(pool: RankPool) -> None:
    for (validated, tested, ours_validated, ours_tested), sharded, are_whole in pool.run(2, evaluate):
        assert abs(ours_validated - validated) <= 1e-6
        assert abs(ours_tested - tested) <= 1e-6
        assert sharded and are_whole


def train_again() -> tuple[list[Tensor], list[Tensor]]:
    """A module trained twice, with an evaluation between."""
    ended = []
    for make in (ddp, zero3):
        torch.manual_seed(0)
        module = zoo.MLP()
        for _ in range(2):
            trainer = make_trainer(make(), max_epochs=1)
            trainer.fit(module, zoo.loader(24, 4), zoo.loader(8, 4))
        ended.append([whole(parameter.detach()).clone() for parameter in module.parameters()])
    return ended[0], ended[1]


def test_a_module_is_trained_again(pool: RankPool) -> None:
    for expected, actual in pool.run(2, train_again):
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


def measure(policy: dict[str, Any]) -> tuple[float, list[float], int]:
    norms: list[float] = []

    class Monitor(GradNormMonitor):
        pass

    runs = []
    for strategy in (by_flag(expose_gradients=False, **policy), zero3(**policy)):
        run = train(zoo.Unused, strategy, gradient_clip_val=0.05, callbacks=[Monitor()])
        norms.append(float(run.trainer.strategy.grad_norm))
        runs.append(run)
    return largest_difference(runs[1], runs[0]), norms, runs[1].trainer.strategy.skipped_steps


@pytest.mark.parametrize("policy", [{"norm_type": 3.0}, {"clip_scope": "global"}, {"nonfinite_grads": "skip"}])
def test_clips_as_zero1_does(pool: RankPool, policy: dict[str, Any]) -> None:
    for difference, (theirs, ours), _ in pool.run(2, measure, policy):
        assert difference <= FP32
        assert abs(ours - theirs) <= 1e-5 * theirs


class SometimesInfinite(zoo.MLP):
    def compute_loss(self, batch: Tensor) -> Tensor:
        loss = super().compute_loss(batch)
        bad = self.global_step == 2 and self.trainer.global_rank == 1
        return loss * float("inf") if bad else loss


def train_with_infinite(policy: str) -> tuple[int, str]:
    trainer = make_trainer(zero3(nonfinite_grads=policy))
    module = SometimesInfinite()
    try:
        trainer.fit(module, zoo.loader(40, 4))
    except RuntimeError as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


def test_names_the_rank_whose_gradients_are_not_finite(pool: RankPool) -> None:
    for steps, message in pool.run(2, train_with_infinite, "raise"):
        assert steps == 2
        assert "rank 1: " in message and "net.4.weight" in message and "rank 0" not in message


class Weighted(zoo.MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        # Of rank 1's batches some are all padding, and their loss is no number.
        weight = float(batch_idx % 3) if self.trainer.global_rank else 1.0
        loss = self.compute_loss(batch)
        return {"loss": loss if weight else loss * float("nan"), "loss_weight": weight}


def weigh() -> float:
    return largest_difference(
        train(Weighted, zero3(), accumulate_grad_batches=2),
        train(Weighted, by_flag(expose_gradients=False), accumulate_grad_batches=2),
    )


def test_weighs_losses_as_zero1_does(pool: RankPool) -> None:
    assert max(pool.run(2, weigh)) <= FP32


class Seeded(nn.Linear):
    """Draws by its own size and the rank's seed, in whatever order layers are made."""

    def reset_parameters(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + self.in_features)
            super().reset_parameters()


def layers() -> nn.Module:
    return nn.Sequential(Seeded(zoo.FEATURES, 8), nn.LayerNorm(8), nn.Tanh(), Seeded(8, 1))


class MadeOnMeta(zoo.Zoo):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = layers()

    def on_fit_start(self) -> None:
        self.first = [whole(parameter.detach()).clone() for parameter in self.parameters()]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()


def train_from_meta(path: str) -> tuple[float, float]:
    """How far the first values are from those that rank 0 would have made at once; and loaded ones from saved ones."""
    run = train(MadeOnMeta, zero3(), seed=10 + dist.get_rank())
    run.trainer.save_checkpoint(path)
    resumed = MadeOnMeta()
    make_trainer(zero3(), max_epochs=1).validate(resumed, zoo.loader(8, 4), ckpt_path=path, verbose=False)
    trained, loaded = ([whole(one.detach()) for one in module.parameters()] for module in (run.module, resumed))
    torch.manual_seed(10)
    return distance(run.module.first, list(layers().parameters())), distance(loaded, trained)


def test_a_module_made_on_the_meta_device_is_rank_0s_and_loads(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, train_from_meta, str(tmp_path / "a.ckpt")) == [(0.0, 0.0)] * 2


class Finetuned(zoo.Zoo):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(zoo.FEATURES, 9), nn.Tanh())
        self.head = nn.Linear(9, 2)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def unfreeze() -> float:
    def run(strategy: Any) -> Any:
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
        return train(Finetuned, strategy, 16, whole_batch=strategy is None, max_epochs=2, callbacks=[callback])

    # `ddp` does not average what is unfrozen.
    return largest_difference(run(zero3()), run(None))


def test_a_backbone_is_unfrozen(pool: RankPool) -> None:
    assert max(pool.run(2, unfreeze)) <= FP32


def find_rate(folder: str) -> tuple[float, float]:
    found = []
    for strategy in (ddp(), zero3()):
        torch.manual_seed(0)
        module = zoo.MLP()
        module.lr = 0.1
        trainer = make_trainer(strategy, default_root_dir=folder)
        finder = Tuner(trainer).lr_find(module, zoo.loader(80, 4), num_training=10, update_attr=False)
        found.append(finder.results["loss"][-1])
    return found[0], found[1]


@pytest.mark.slow
def test_a_learning_rate_is_found(pool: RankPool, tmp_path: Path) -> None:
    for expected, actual in pool.run(2, find_rate, str(tmp_path)):
        assert abs(actual - expected) <= 1e-4 * abs(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrap": "Block"}, "Invalid wrap: 'Block'. Must be a list"),
        ({"min_num_params": -1}, "Invalid min_num_params: -1"),
        ({"gather_dtype": "fp16"}, "Invalid gather_dtype: 'fp16'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeRO3Strategy(**arguments)


class Matrixwise(torch.optim.Adafactor):
    """As another package's might be: not known by its class."""


class Searching(torch.optim.LBFGS):
    """As above."""


def begin(case: str) -> str:
    strategies = {"wrap": zero3(wrap=["Nothing"]), "whole matrices": zero3(), "a closure": zero3()}
    optimizers: dict[str, Any] = {"wrap": zoo.adamw, "whole matrices": Matrixwise, "a closure": Searching}
    module = zoo.MLP(optimizers[case])
    with pytest.raises(Exception) as raised:
        train(lambda: module, strategies[case])
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("wrap", "No module within MLP is of such a class"),
        ("whole matrices", "strategy='zero1_custom'"),
        ("a closure", "strategy='zero1_custom'"),
    ],
)
def test_what_is_not_supported_is_refused_before_training(pool: RankPool, case: str, message: str) -> None:
    assert all(message in said for said in pool.run(2, begin, case))


class ReadsABlock(zoo.MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.compute_loss(batch)
        return loss + self.net[0].weight.sum()


def read_a_block() -> str:
    with pytest.raises(RuntimeError) as raised:
        train(ReadsABlock, zero3())
    return str(raised.value)


def test_a_loss_of_shards_ends_with_an_error_where_it_was_made(pool: RankPool) -> None:
    said = pool.run(2, read_a_block)
    assert all("within the block's own `forward`" in one for one in said)
