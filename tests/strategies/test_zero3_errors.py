"""What ``zero3_custom`` cannot do, or a user's code cannot do to shards, ends with an error. An error is a line.

All ranks raise it, it says what has happened and where, and the next training is that of ``ddp``.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat import ZeRO3Strategy
from lightning_parstrat.distributed.fsdp.sharded_module import DifferentModulesError
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.checkpoint.trainings import tuned
from tests.strategies.odd import Blocks
from tests.strategies.parity import by_flag, ddp, largest_difference, make_trainer, train, whole, zero3
from tests.strategies.test_zero3 import (
    FEATURES,
    MIXED,
    ROOT,
    UNITS,
    WINDOW,
    WRITES,
    Penalised,
    Scores,
    Skips,
    Teaches,
    by_way,
    slope,
)
from tests.strategies.test_zero3_meta import OnMeta, SharesMemory, Within

# Code that takes shards for whole tensors.


class PenalisedByHand(zoo.StepsByHand, Blocks):
    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + sum(p.pow(2).sum() for p in self.parameters())


class ReadsABlock(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.compute_loss(batch) + self.blocks[0].linear.weight.sum()}


class LogsNorms(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class LogsMeans(Blocks):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.head.weight.detach().norm(), sync_dist=True)


class SecondDerivatives(Scores):
    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        first = slope(self.score(inputs), inputs)
        return slope(first.pow(2), inputs).pow(2).mean() + first.pow(2).mean()


# Ranks that use different modules.


class Drops(Skips):
    """One rank makes nothing of what the second block returns: each rank would send another unit's gradients."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            returned = block(batch)
            if number != 1 or dist.get_rank() != 1:
                batch = batch + returned
        return (batch - 1).square().mean()


class CallsWithoutGradients(Skips):
    """A rank calls another block than the others without gradients, such as a teacher's, in a training step."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[1 + dist.get_rank()](batch)
        return (self.blocks[0](batch) - target).square().mean()


class Routes(Skips):
    """Each rank evaluates by another block, of the same shape."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.blocks[0](batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.route(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.route(batch)

    def route(self, batch: Tensor) -> Tensor:
        return self.blocks[dist.get_rank()](batch)


# Held parameters, and writes within a step.


class Shares(nn.Module):
    """A second module that has another one's parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        return self.weight.pow(2).sum()


HELD: dict[str, Callable[[nn.Parameter], Callable[[], Any]]] = {
    "list": lambda weight: partial(lambda held: sum(p.pow(2).sum() for p in held), [weight]),
    "second module": Shares,
    "foreach": lambda weight: lambda: torch.stack(torch._foreach_norm([weight], 2)).square().sum(),
    "keyword": lambda weight: lambda: torch.mul(other=weight, input=weight).sum(),
    "C++": lambda weight: lambda: Square.apply(weight),
}


class Holds(Blocks):
    """Penalises a weight of a block through what it has held since it was made, one way or another."""

    way = "list"

    def build(self) -> None:
        super().build()
        # In a list: a module among the attributes would be one of this one's own.
        self.penalty = [HELD[self.way](self.blocks[0].linear.weight)]

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + 0.1 * self.penalty[0]()


class ReadsBetween(Blocks):
    """Reads a held weight when a step has ended; what needs no values works."""

    def build(self) -> None:
        super().build()
        self.held = [self.head.weight]

    def on_train_batch_end(self, *_: Any) -> None:
        held, own = self.held[0], self.head.weight
        assert held.shape == own.shape and held.dtype == own.dtype and "head.weight" in repr(held)
        # Its memory is that of one element.
        with torch._C.DisableTorchFunctionSubclass():
            assert held.untyped_storage().nbytes() == 4
        float(held.norm())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.pow(2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:
        return gradient * torch.ones(FEATURES, FEATURES)


class WritesData(Blocks):
    """Sets `data` of a frozen weight where it is gathered: to a new tensor, to one of another shape, to another's."""

    value: Callable[[Any], Tensor]

    def build(self) -> None:
        super().build()
        self.frozen = nn.ModuleList(nn.Linear(FEATURES, 1).requires_grad_(False) for _ in range(2))

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.frozen[0].weight.data = type(self).value(self.frozen)
        return super().compute_loss(batch)


class Averages(WritesData):
    value = staticmethod(lambda frozen: frozen[0].weight.data * 0.9)


class Reshapes(WritesData):
    value = staticmethod(lambda frozen: frozen[0].weight.data.flatten())


class Trades(WritesData):
    value = staticmethod(lambda frozen: frozen[1].weight.data)


class WritesInEvaluation(Blocks):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.compute_loss(batch)
        with torch.no_grad():
            self.blocks[0].linear.weight.mul_(2)


class Assigns(Blocks):
    """Sets `data` of a weight in a hook of its subclass, which torch forgets."""

    def assign(self) -> None:
        self.blocks[1].linear.weight.data = torch.zeros(FEATURES, FEATURES)


class AssignsInABlock(Blocks):
    def build(self) -> None:
        super().build()

        def assign(block: Any, _: Any) -> None:
            block.linear.weight.data = block.linear.weight.data * 0.9

        self.blocks[1].register_forward_pre_hook(assign)


class AssignsOnOneRank(Assigns):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 3 and self.global_rank == 1:
            self.assign()


class AssignsForEvaluation(Assigns):
    def on_validation_epoch_start(self) -> None:
        self.assign()


class AssignsAtTheEnd(Assigns):
    def on_train_end(self) -> None:
        self.assign()


class AssignsBeforeASave(Assigns):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 3:
            self.assign()
            self.trainer.save_checkpoint("never written")


# What is refused before training.


class Matrixwise(torch.optim.Adafactor):
    """As another package's might be: not known by its class."""


class MadeEarly(Blocks):
    """Its optimizer is of parameters before they were sharded."""

    def build(self) -> None:
        super().build()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def captured() -> Blocks:
    """Does to a module what ``torch.cuda.make_graphed_callables`` does, but for the graph."""
    module = Blocks()
    forward = module.blocks[1].forward

    def graphed(*inputs: Tensor) -> Tensor:
        return forward(*inputs)

    graphed.__module__ = torch.cuda.graphs.make_graphed_callables.__module__
    module.blocks[1].forward = graphed
    return module


class Failure(NamedTuple):
    """A training, and words of its error."""

    module: Callable[[], Any]
    words: tuple[str, ...]
    strategy: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    trainer: dict[str, Any] = {}  # noqa: RUF012


MIXTURE = ("mixed torch.Tensor and DTensor",)
DIFFERENT = ("called different modules in a training step", "result multiplied by 0")
FORGETS = ("`data` of parameter 'blocks.1.linear.weight' was set", "full_parameters()")
WRITTEN = ("`data` of parameter 'frozen.0.weight' was set", "Write in place")
OBJECT = ("'blocks.0.linear.weight'", "self.blocks.0.linear.weight")
FAILURES: dict[str, dict[str, Failure]] = {
    "shards": {
        "penalty": Failure(Penalised, ("computed from a weight of a block", "weight_decay", "min_num_params")),
        "penalty, in a dict": Failure(ReadsABlock, ("within the block's own `forward`",)),
        "penalty, by hand": Failure(PenalisedByHand, MIXTURE),
        "norms logged": Failure(LogsNorms, ("its data is not allocated yet",)),
        "means logged": Failure(LogsMeans, ("c10d.allreduce_.default",)),
        "gradients of gradients": Failure(SecondDerivatives, ("setStorage",)),
    },
    "different modules": {
        "backward": Failure(Drops, DIFFERENT),
        "backward, accumulated": Failure(Drops, DIFFERENT, trainer=WINDOW),
        "without gradients": Failure(CallsWithoutGradients, DIFFERENT),
    },
    "held and written": {
        **{f"held, {way}": Failure(by_way(Holds, way), OBJECT, ROOT) for way in HELD},
        "held, between steps": Failure(ReadsBetween, ("'head.weight'", "full_parameters()"), ROOT),
        **{
            f"rounded, {way}": Failure(
                by_way(Teaches, way), ("'teacher.0.linear.weight'", "torch.bfloat16", "gather_dtype=None"), ROOT, MIXED
            )
            for way in WRITES
        },
        "rounded, in evaluation": Failure(
            WritesInEvaluation,
            ("'blocks.0.linear.weight'", "torch.bfloat16"),
            {**UNITS, "reshard_after_forward": False},
            {**MIXED, "validate": True},
        ),
        **{f"assigned, {kind.__name__}": Failure(kind, WRITTEN, ROOT) for kind in (Averages, Reshapes, Trades)},
        "assigned, in a unit": Failure(AssignsInABlock, FORGETS, UNITS),
        "assigned, one rank": Failure(AssignsOnOneRank, ("`data` of", "was set", "full_parameters()")),
        "assigned, evaluation": Failure(AssignsForEvaluation, FORGETS, trainer={"validate": True}),
        "assigned, at the end": Failure(AssignsAtTheEnd, FORGETS),
        "assigned, saved": Failure(AssignsBeforeASave, FORGETS),
    },
    "before training": {
        "captured graph": Failure(captured, ("make_graphed_callables", "`ddp`")),
        "no such class": Failure(Blocks, ("No module within Blocks is of such a class",), {"wrap": ["Nothing"]}),
        "whole matrices": Failure(partial(Blocks, Matrixwise), ("Matrixwise", "strategy='zero1_custom'")),
        "a closure": Failure(
            partial(Blocks, torch.optim.LBFGS), ("LBFGS cannot step", "needs a closure", "strategy='zero1_custom'")
        ),
        "an early optimizer": Failure(MadeEarly, ("SGD was made of", "Make it in `configure_optimizers`")),
        "meta, the root": Failure(OnMeta, ("scale of OnMeta", "reset_parameters", "meta device")),
        "meta, below it": Failure(Within, ("scales.1.factor of Scale", "reset_parameters", "meta device")),
        "meta, rank 0 alone": Failure(
            SharesMemory, ("net.0.weight, net.1.weight: these cannot be sharded on some ranks",)
        ),
    },
}


def message_of(make: Callable[[], Any], strategy: Any, **trainer: Any) -> str:
    with pytest.raises(Exception) as raised:
        train(make, strategy, **trainer)
    return str(raised.value)


def errors_of(subject: str) -> tuple[dict[str, str], float]:
    """The message of each, and how far a training after them is from ``ddp``'s."""
    cases = FAILURES[subject].items()
    messages = {name: message_of(one.module, zero3(**one.strategy), **one.trainer) for name, one in cases}
    return messages, largest_difference(train(zoo.MLP, zero3()), train(zoo.MLP, ddp()))


@pytest.mark.parametrize(
    "subject", slow_unless(lambda name: name in ("different modules", "held and written"), FAILURES)
)
def test_all_ranks_raise_and_train_on(pool: RankPool, subject: str) -> None:
    for messages, difference in pool.run(2, errors_of, subject):
        cases = FAILURES[subject].items()
        wrong = {name: messages[name] for name, one in cases if not all(words in messages[name] for words in one.words)}
        assert not wrong
        assert difference <= FP32


def test_bad_arguments_are_refused() -> None:
    for name, value in {"wrap": "Block", "min_num_params": -1, "gather_dtype": "fp16"}.items():
        with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
            ZeRO3Strategy(**{name: value})


def evaluate_mixed(folder: str) -> list[tuple[str, list[str], dict[str, Any]]]:
    """The error of ranks that evaluate by different blocks; what was saved, and what was logged by then."""
    found = []
    for stage in ("fit", "validate", "predict"):
        saves = ModelCheckpoint(folder, monitor="val_loss")
        trainer = make_trainer(zero3(), enable_checkpointing=True, callbacks=[saves], num_sanity_val_steps=0)
        data = [zoo.loader(16, 4)] * (2 if stage == "fit" else 1)
        with pytest.raises(DifferentModulesError) as raised:
            getattr(trainer, stage)(Routes(), *data)
        saved = [file.name for file in Path(folder).glob("*")]
        found.append((str(raised.value), saved, dict(trainer.callback_metrics)))
    return found


def test_ranks_that_evaluate_by_different_modules_end_before_anything_is_logged(pool: RankPool, tmp_path: Path) -> None:
    for of_rank in pool.run(2, evaluate_mixed, str(tmp_path)):
        for message, saved, logged in of_rank:
            assert "evaluation" in message and "all ranks" in message
            assert not saved and not logged


class Ties(Blocks):
    def build(self) -> None:
        super().build()
        self.blocks[2].linear.weight = self.blocks[1].linear.weight


def narrow(module: Any) -> None:
    module.half()


def remove(module: Any) -> None:
    del module.blocks[0].linear.bias


def untie(module: Any) -> None:
    module.blocks[2].linear.weight = nn.Parameter(module.blocks[2].linear.weight.detach() + 1)


LOST = {narrow: "blocks.1.linear.bias", remove: "blocks.0.linear.bias got", untie: "blocks.2.linear.weight got"}


class OnOneRank(Blocks):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["mine"] = next(self.parameters())


def fail_after_training(folder: str) -> None:
    """What cannot be done to a module that has trained says so, and leaves the shards as they are."""
    run = train(Ties, zero3())
    module, trainer = run.module, run.trainer
    before = [whole(parameter.detach()).clone() for parameter in module.parameters()]
    for change, words in LOST.items():
        with pytest.raises(ValueError, match=rf"Within `full_parameters\(\)`.*{words}"):
            with trainer.strategy.full_parameters():
                change(module)
    with trainer.strategy.full_parameters():
        loss = module.compute_loss(torch.ones(1, FEATURES))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"'(blocks|head)\..*no optimizer would see"):
        loss.backward()
    weights = {name: torch.ones(parameter.shape) for name, parameter in module.named_parameters()}
    with pytest.raises(ValueError, match=r"'blocks.0.linear.weight'. Leave `assign=True` out"):
        module.load_state_dict(weights, assign=True, strict=False)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert_same([whole(parameter.detach()) for parameter in module.parameters()], before)
    with pytest.raises(ValueError, match="on some ranks only"):
        train(OnOneRank, zero3()).trainer.save_checkpoint(f"{folder}/a.ckpt")
    for name, strategy in {"zero1_custom": by_flag, "ddp_tuned": tuned}.items():
        with pytest.raises(ValueError, match=name) as validated:
            make_trainer(strategy()).validate(module, zoo.loader(8, 4), verbose=False)
        for message in (message_of(lambda: module, strategy()), str(validated.value)):
            assert all(part in message for part in (name, "blocks.0.linear.weight", "checkpoint", "zero3"))


def test_what_cannot_be_done_after_a_training_says_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, fail_after_training, str(tmp_path))
    # Shards that one rank alone saves: there is no file.
    assert not list(tmp_path.iterdir())
