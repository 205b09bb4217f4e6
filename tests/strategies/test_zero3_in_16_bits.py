"""16 bits under ``zero3_custom``: what is gathered, sent and kept in them, and what is not."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parstrat.distributed.comm.collectives import Collectives, PairwiseCollectives
from lightning_parstrat.distributed.engine import engine
from lightning_parstrat.strategies import zero3 as zero3_module
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.for_shards import Normalised
from tests.strategies.parity import by_flag, ddp, largest_difference, make_trainer, reference, train, whole, zero3
from tests.strategies.test_report import listening
from tests.torch_versions import needs_torch

ROWS = 3
zero2 = partial(by_flag, shard_gradients=True)
MAKERS: dict[str, Callable[..., Any]] = {"zero1_custom": by_flag, "zero3_custom": zero3, "zero2_custom": zero2}
WITHOUT_MASTERS = {"master_weights": False}


class Sums(LightningModule):
    """The gradient of each row is large on one rank, in the first micro-batch: a sum in bf16 would drop the others."""

    def __init__(self, large: float, other: float) -> None:
        super().__init__()
        self.large, self.other = large, other
        self.layer = nn.Linear(4, ROWS, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factors = torch.full((ROWS, 1), self.other)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            factors[dist.get_rank()] = self.large
        return (self.layer.weight * factors.to(self.layer.weight.dtype)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def zero_in_place(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


class ZeroesInPlace(Sums):
    """Zeroes by a function, as gradients are kept whole within a window if the module's code does so."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        zero_in_place(optimizer)


def stepped(
    flag: str,
    arguments: dict[str, Any],
    large: float,
    precision: str,
    other: float = 1.0,
    accumulate: int = 1,
    steps: int = 1,
) -> list[float]:
    """The values of a parameter after some steps."""
    more: dict[str, Any] = {"precision": precision, "max_steps": steps, "accumulate_grad_batches": accumulate}
    module = Sums if steps == 1 else ZeroesInPlace
    run = train(lambda: module(large, other), MAKERS[flag](**arguments), **more)
    return whole(run.module.layer.weight.detach()).unique().tolist()  # type: ignore[operator,union-attr]


# 257 is rounded to 256 in bf16. 256 + 1 + 1 is 258 in fp32, and 256 in bf16 by most orders.
SUMS: list[tuple[Any, ...]] = [
    ("zero3_custom", {}, 257.0, "32-true", 259 / 3),
    ("zero3_custom", {"comm_dtype": "bf16"}, 257.0, "32-true", 258 / 3),
    ("zero1_custom", {"comm_dtype": "bf16"}, 257.0, "32-true", 258 / 3),
    ("zero3_custom", {}, 256.0, "bf16-true", 258 / 3),
    ("zero3_custom", {"comm_dtype": "fp32"}, 256.0, "bf16-true", 258 / 3),
    ("zero3_custom", {"shard_gradients": False}, 256.0, "bf16-true", 258 / 3),
    ("zero1_custom", {}, 256.0, "bf16-true", 258 / 3),
    # Three sums of 40,000 are more than float16 has.
    ("zero1_custom", WITHOUT_MASTERS, 40_000.0, "16-true", 40_000.0, 1, 40_000.0),
    # Quarters of 2050 / 3 and of three ones are 171.58. Each quarter by itself is lost in 16 bits.
    *(("zero2_custom", arguments, 2048.0, "bf16-true", 1.0, 4, 172.0) for arguments in ({}, WITHOUT_MASTERS)),
    # Two steps of 170.92, after the first of which the shards of 16 bits have zeros.
    ("zero2_custom", {**WITHOUT_MASTERS, "expose_gradients": False}, 2040.0, "bf16-true", 1.0, 4, 2, 342.0),
]


def test_gradients_are_summed_in_fp32_whatever_they_travel_in(pool: RankPool) -> None:
    for *case, expected in SUMS:
        for values in pool.run(ROWS, stepped, *case):
            assert values == pytest.approx([-expected], rel=1e-6), case


def narrow(arguments: dict[str, Any], precision: str) -> tuple[set[torch.dtype], set[torch.dtype], float, str]:
    """The dtypes that parameters and gradients travel in, how far they get from ``ddp``, and what is logged."""
    gathered, reduced = set(), set()
    # Its name since torch 2.13, and before.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    all_gather, reduce_scatter = getattr(dist, gather), Collectives.reduce_scatter

    def note_gather(output: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.add(sent.dtype)
        return all_gather(output, sent, *args, **kwargs)

    def note_reduction(self: Collectives, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.add(sent.dtype)
        return reduce_scatter(self, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch, listening() as lines:
        monkeypatch.setattr(dist, gather, note_gather)
        monkeypatch.setattr(Collectives, "reduce_scatter", note_reduction)
        actual = train(zoo.MLP, zero3(**arguments), precision=precision)
    expected = reference(("narrow", precision), lambda: train(zoo.MLP, ddp(), precision=precision))
    return gathered, reduced, largest_difference(actual, expected), " ".join(lines)


WIDE, NARROW = {torch.float32}, {torch.bfloat16}
IN_BF16 = "1.02K parameters in bf16"
TRAVELS: list[tuple[dict[str, Any], str, set[torch.dtype], set[torch.dtype], float, float, str]] = [
    ({}, "32-true", WIDE, WIDE, 0, FP32, "zero3_custom"),
    # Autocast rounds the weights of linear layers, and their gradients, all the same.
    ({}, "bf16-mixed", NARROW, WIDE, 0, FP32, IN_BF16),
    ({"param_dtype": torch.bfloat16}, "bf16-mixed", NARROW, WIDE, 0, FP32, IN_BF16),
    ({"param_dtype": None}, "bf16-mixed", WIDE, WIDE, 0, FP32, "zero3_custom"),
    ({"comm_dtype": "bf16"}, "bf16-mixed", NARROW, NARROW, 0, FP32, IN_BF16),
    ({"comm_dtype": "bf16"}, "32-true", WIDE, NARROW, 1e-6, 0.05, "zero3_custom"),
    ({}, "bf16-true", NARROW, NARROW, 0, FP32, "zero3_custom"),
    ({"comm_dtype": "fp32"}, "bf16-true", NARROW, WIDE, 0, FP32, "zero3_custom"),
]


def test_what_travels_in_16_bits_is_stepped_in_32(pool: RankPool) -> None:
    for *case, gathered, reduced, least, most, words in TRAVELS:
        for rank, (*travelled, difference, logged) in enumerate(pool.run(2, narrow, *case)):
            assert travelled == [gathered, reduced], case
            assert least <= difference <= most, case
            assert rank > 0 or words in logged, case
            assert ("in bf16" in logged) == (IN_BF16 in words and rank == 0)


def train_and_evaluate_in_turns() -> tuple[list[float], list[float]]:
    found: list[list[float]] = []
    for strategy in (ddp, zero3):
        torch.manual_seed(0)
        module, losses = Normalised(), []
        for precision in ("bf16-mixed", "32-true", "bf16-mixed"):
            trainer = make_trainer(strategy(), precision=precision)
            trainer.fit(module, zoo.loader(16, 4))
            losses.append(trainer.validate(module, zoo.loader(16, 4), verbose=False)[0]["val_loss"])
        found.append(losses)
    return found[0], found[1]


def test_another_training_of_a_module_may_have_another_precision(pool: RankPool) -> None:
    for expected, losses in pool.run(2, train_and_evaluate_in_turns):
        assert losses == pytest.approx(expected, rel=1e-3)


class FailsOnce(zoo.MLP):
    fails = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fails and batch_idx == 2:
            self.fails = False
            raise KeyError("once")
        return super().training_step(batch, batch_idx)


def train_after_a_failure(fails: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = FailsOnce()
    module.fails = fails
    for _ in range(2 if fails else 1):
        trainer = make_trainer(zero3(shard_gradients=False), precision="bf16-true", accumulate_grad_batches=4)
        with contextlib.suppress(KeyError):
            trainer.fit(module, zoo.loader(64, 4, torch.bfloat16))
    assert trainer.global_step > 0
    return [whole(parameter.detach()) for parameter in module.parameters()]


@needs_torch("2.13", "FSDP2 cannot continue after an exception")
def test_what_a_failed_window_has_added_up_is_gone(pool: RankPool) -> None:
    assert_same(pool.run(2, train_after_a_failure, True), pool.run(2, train_after_a_failure, False))


class Widening(PairwiseCollectives):
    """Widens, as NCCL's collectives do between nodes where a ring of fp32 is faster."""

    widens = True


WIDENING = ("zero1_custom", "zero3_custom")


def train_between_nodes() -> list[tuple[str, list[float]]]:
    found = []
    for flag in WIDENING:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for module in (engine, zero3_module):
                monkeypatch.setattr(module, "make_collectives", lambda group, *_: Widening(group))
            with pytest.warns() as warned:
                values = stepped(flag, {"comm_dtype": "bf16"}, 257.0, "32-true")
        found.append((" ".join(str(one.message) for one in warned), values))
    return found


def test_bf16_that_would_save_nothing_is_left_out_with_a_warning(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(ROWS, train_between_nodes)):
        for flag, (logged, values) in zip(WIDENING, found, strict=True):
            assert rank > 0 or f"{flag}: comm_dtype='bf16' is left out" in logged
            # Nothing is rounded.
            assert values == pytest.approx([-259 / 3], rel=1e-6)
