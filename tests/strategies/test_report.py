"""The lines that a training logs are true, and two at most."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import delayed
from tests.strategies.odd_optimizers import GloballyScaled
from tests.strategies.parity import Looks, train, zero1

LINE = re.compile(
    r"zero1_custom: ([\d.]+) ms per step \(median of (\d+)\), ([\d.]+) ms of it waiting for other ranks;"
    r" ([\d.]+) (bytes|kB|MB) sent per step and rank; peak memory ([\d.]+) (MB|GB) resident, everything included"
)


OURS = ("zero1_custom", "ddp_tuned")


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """The log lines and warnings of Lightning's loggers within it."""
    listener, logger = Listener(), logging.getLogger("lightning.pytorch")
    levels = {one: one.level for one in (logger, logging.getLogger("lightning.pytorch.utilities.rank_zero"))}
    logger.addHandler(listener)
    try:
        for one in levels:
            one.setLevel(logging.INFO)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: listener.lines.append(str(message))
            yield listener.lines
    finally:
        logger.removeHandler(listener)
        for one, level in levels.items():
            one.setLevel(level)


def lines_of_a_training(slow: bool, accumulate: int) -> tuple[list[str], int]:
    # Of two ranks, each sends half of all gradients, and half of all parameters.
    looks = Looks(lambda trainer: sum(bucket.layout.numel * 4 for bucket in trainer.strategy._engine.buckets))
    with listening() as lines:
        train(
            zoo.ScheduledTransformer,
            delayed() if slow else zero1(),
            92 * accumulate,
            accumulate_grad_batches=accumulate,
            callbacks=[looks],
        )
    return [line for line in lines if "per step" in line], looks.seen


@pytest.mark.parametrize(("slow", "accumulate"), [(False, 2), (True, 1)])
def test_the_line_at_the_end_has_the_time_of_a_step(pool: RankPool, slow: bool, accumulate: int) -> None:
    ((lines, sent), (others, _)) = pool.run(2, lines_of_a_training, slow, accumulate)
    assert len(lines) == 1 and others == []
    found = LINE.fullmatch(lines[0])
    assert found is not None, lines[0]
    # Of 23 steps the first three settle.
    assert int(found[2]) == 20
    assert float(found[4]) == pytest.approx(sent / 1000, abs=0.06) and found[5] == "kB"
    assert 0 < float(found[3]) < float(found[1])


class Watched(zoo.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [parameter.grad.norm() for parameter in self.parameters()]


class Two(zoo.StepsByHand, zoo.MLP):
    """One optimizer is sharded, the other is not."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.children()
        others = [parameter for module in rest for parameter in module.parameters()]
        return [torch.optim.Adam(first.parameters()), GloballyScaled(others)]


# Module, what the Trainer gets, and what of the first line of zero1_custom follows the number of parameters.
STATE = r"optimizer state [\d.]+ kB per rank instead of [\d.]+ kB"
NOT_SHARDED = (
    r"GloballyScaled is not sharded, as how it moves one parameter depends on the others: every rank keeps all of its"
    r" state, as under `ddp`\. What moves each parameter by its own gradient alone is sharded, such as"
    r" torch\.optim\.AdamW\."
)


def gathered(who: str) -> str:
    return rf" Gradients are gathered in every step, as {who} may read them \(.*\)\."


ORDINARY: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], str]] = {
    "Adam": (lambda: zoo.MLP(torch.optim.Adam), {"callbacks": [EMAWeightAveraging()]}, STATE + r"\."),
    "gradients are looked at": (Watched, {}, STATE + r"\." + gathered(r"Watched\.on_before_optimizer_step")),
    "replicated": (lambda: zoo.MLP(GloballyScaled), {}, NOT_SHARDED),
    "one of two replicated": (Two, {}, STATE + r"\. " + NOT_SHARDED + gathered("manual optimization")),
}


def lines_of_ours(name: str) -> dict[str, list[str]]:
    make, arguments, _ = ORDINARY[name]
    lines_by_flag = {}
    for strategy in (ZeRO1Strategy(), TunedDDPStrategy()):
        with listening() as lines:
            train(make, strategy, 100, **arguments)
        lines_by_flag[strategy.flag] = [line for line in lines if any(ours in line for ours in OURS)]
    return lines_by_flag


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_training_logs_two_lines_at_most(pool: RankPool, name: str) -> None:
    found, others = pool.run(2, lines_of_ours, name)
    assert others == {"zero1_custom": [], "ddp_tuned": []}
    first, *last = found["zero1_custom"]
    assert re.fullmatch(r"zero1_custom: (?:[\d.]+K? parameters over 2 ranks, )?" + ORDINARY[name][2], first), first
    assert len(last) <= 1 and len(found["ddp_tuned"]) <= 2, found
    everything = " ".join(found["zero1_custom"] + found["ddp_tuned"])
    assert re.search(r"(?<![\d.])(1 [a-z]{3,}s|0 buckets|0 parameters)\b", everything) is None, everything


def test_a_training_of_one_rank_logs_no_more(pool: RankPool) -> None:
    (found,) = pool.run(1, lines_of_ours, "Adam")
    first, *last = found["zero1_custom"]
    assert re.fullmatch(r"zero1_custom: 1\.0K parameters over 1 rank, optimizer state 8\.\d kB per rank\.", first)
    assert len(last) <= 1 and found["ddp_tuned"] == []
    # No advice to gather block by block.
    assert len(pool.run(1, lines_of_zero3, zoo.MLP, {})[0]) == 1


def lines_of_zero3(module: Callable[[], LightningModule], arguments: dict[str, Any]) -> list[str]:
    with listening() as lines:
        train(module, ZeRO3Strategy(**arguments), 8)
    return [line for line in lines if "zero3_custom" in line]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["no block is gathered by itself", "min_num_params=100,000", 'auto_wrap_policy=["Block"]']),
        ({"min_num_params": 0}, None),
        ({"auto_wrap_policy": ["Linear"]}, None),
    ],
)
def test_a_warning_says_that_no_block_was_found(
    pool: RankPool, arguments: dict[str, Any], words: list[str] | None
) -> None:
    (first, *warned), others = pool.run(2, lines_of_zero3, zoo.MLP, arguments)
    assert others == []
    if words is None:
        assert "3 units of 1,025 elements with all else gathered at once" in first and warned == []
    else:
        assert "all 1,025 elements are gathered for the whole step" in first and " units" not in first
        assert len(warned) == 1 and all(word in warned[0] for word in words), warned
