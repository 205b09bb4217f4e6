"""The lines that a training logs are true, and two at most."""

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import delayed
from tests.strategies.odd_optimizers import GloballyScaled
from tests.strategies.parity import Looks, make_trainer, train, zero1

LINE = re.compile(
    r"zero1_custom: (?P<ms>[\d.]+) ms per step, (?P<loading>\d+)% loading, (?P<computing>\d+)% computing,"
    r" (?P<waiting>\d+)% waiting \((?P<times>[\d.]+) times one device\);"
    r" (?P<sent>[\d.]+) (B|kB|MB) sent per rank; peak memory ([\d.]+) (MB|GB)"
)
STRATEGIES = {
    "ddp_tuned": TunedDDPStrategy,
    "zero1_custom": ZeRO1Strategy,
    "zero2_custom": ZeRO2Strategy,
    "zero3_custom": ZeRO3Strategy,
}


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


def lines_of_a_training(slow: bool, accumulate: int, steps: int = 23) -> tuple[list[str], int]:
    # Of two ranks, each sends half of all gradients, and half of all parameters.
    looks = Looks(lambda trainer: sum(bucket.layout.numel * 4 for bucket in trainer.strategy._engine.buckets))
    with listening() as lines:
        train(
            zoo.ScheduledTransformer,
            delayed() if slow else zero1(),
            4 * steps * accumulate,
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
    loading, computing, waiting = (int(found[share]) / 100 for share in ("loading", "computing", "waiting"))
    assert 0 < waiting < 1 and 0 < computing < 1
    assert loading + computing + waiting == pytest.approx(1, abs=0.02)
    assert float(found["times"]) == pytest.approx(2 * (1 - waiting), abs=0.06)
    assert found["sent"] + " kB" in lines[0] and float(found["sent"]) == pytest.approx(sent / 1000, rel=0.01)


class NewOptimizer(zoo.MLP):
    """From the seventh batch on, it trains by another optimizer."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 7:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)]


def sent_per_step(module: type[zoo.Zoo]) -> str:
    with listening() as lines:
        train(module, zero1(), 92)
    found = [LINE.fullmatch(line) for line in lines if "per step" in line]
    return found[0]["sent"] if found and found[0] is not None else str(lines)


def test_bytes_are_counted_over_new_optimizers(pool: RankPool) -> None:
    (sent, _), (expected, _) = (pool.run(2, sent_per_step, module) for module in (NewOptimizer, zoo.MLP))
    assert float(sent) == pytest.approx(float(expected), rel=0.01) and float(sent) > 0


class OneIsSlow(zoo.MLP):
    """Its gradients are few, so that the ranks do not wait for these. Every fifth step takes the rank longer."""

    logs = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep((0.1 if batch_idx % 5 == 4 else 0.01) * dist.get_rank())
        self.log("seen", float(len(batch)), sync_dist=self.logs)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(1.0)


class LogsOfAll(OneIsSlow):
    logs = True


SLOW: dict[str, tuple[type[OneIsSlow], dict[str, Any]]] = {
    "gradients": (OneIsSlow, {}),
    "logs": (LogsOfAll, {}),
    "shares": (OneIsSlow, {"rank_shares": [1, 1]}),
}


def line_beside_a_slow_rank(name: str) -> tuple[str, float]:
    module, arguments = SLOW[name]
    begins, validations = list[float](), list[float]()
    watch = LambdaCallback(
        on_train_batch_start=lambda *_: begins.append(time.perf_counter()),
        on_validation_end=lambda *_: validations.append(time.perf_counter()),
    )
    trainer = make_trainer(ZeRO1Strategy(**arguments), max_epochs=1, callbacks=[watch], val_check_interval=30)
    with listening() as lines:
        trainer.fit(module(), zoo.loader(480, 4), zoo.loader(4, 4))
    line = next((line for line in lines if "per step" in line), "")
    validated = sum(begins[3] < one < begins[-1] for one in validations)
    return line, 1000 * (begins[-1] - begins[3] - validated) / (len(begins) - 4)


@pytest.mark.parametrize("name", SLOW)
def test_waiting_for_a_slow_rank_is_said(pool: RankPool, name: str) -> None:
    (line, mean), _ = pool.run(2, line_beside_a_slow_rank, name)
    found = LINE.fullmatch(line)
    assert found is not None and int(found["waiting"]) >= 50, line
    # The mean of steps of 10 and of 100 ms, without a validation.
    assert float(line.split(": ")[1].split(" ms")[0]) == pytest.approx(mean, rel=0.25), line


def first_line(name: str) -> str:
    strategy, optimizer, arguments, _, _ = FIRST[name]
    with listening() as lines:
        train(lambda: zoo.MLP(optimizer), strategy(), 8, **arguments)
    return next((line for line in lines if " sharded: " in line), "")


BF16: dict[str, Any] = {"precision": "bf16-true"}
ALONE: dict[str, Any] = {"outer_every": 2, "shard_group": 2}
# The strategy, the optimizer, what the Trainer gets, the number of ranks, and the first line.
FIRST: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], int, str]] = {
    "masters": (
        zero1,
        torch.optim.Adam,
        BF16,
        2,
        r"optimizer state, masters sharded: 6\.\d+ kB each instead of 4\.1 kB",
    ),
    "masters alone": (
        zero1,
        torch.optim.SGD,
        BF16,
        2,
        r"1\.02K parameters on 2 ranks; masters sharded: 2\.\d+ kB each",
    ),
    "whole gradients": (
        partial(ZeRO3Strategy, shard_gradients=False),
        torch.optim.Adam,
        {"accumulate_grad_batches": 2},
        2,
        "; weights, optimizer state sharded: ",
    ),
    "groups": (
        partial(ZeRO1Strategy, **ALONE),
        torch.optim.Adam,
        {},
        4,
        r"1\.02K parameters on 4 ranks in 2 shard groups; ",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_line_says_what_a_rank_holds(pool: RankPool, name: str) -> None:
    line, *_ = pool.run(FIRST[name][3], first_line, name)
    assert re.search(FIRST[name][4], line), line


def collate_slowly(samples: list[Tensor]) -> Tensor:
    time.sleep(0.02)
    return torch.stack(samples)


def line_with_a_slow_loader(flag: str) -> str:
    with listening() as lines:
        trainer = make_trainer(STRATEGIES[flag](), max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(zoo.MLP(), DataLoader(torch.randn(400, zoo.FEATURES), 4, collate_fn=collate_slowly))
    return next((line for line in lines if "per step" in line), "")


@pytest.mark.parametrize("flag", ["ddp_tuned", "zero1_custom"])
def test_the_loaders_share_of_a_step_is_said(pool: RankPool, flag: str) -> None:
    line, _ = pool.run(2, line_with_a_slow_loader, flag)
    found = re.match(rf"{flag}: ([\d.]+) ms per step, (\d+)% loading", line)
    assert found is not None, line
    # Two batches make a step. Each takes 20 ms or more, and all else takes the rest.
    loading = float(found[1]) * (int(found[2]) + 1) / 100
    assert 40 <= loading <= float(found[1]) + 1, line


class Watched(zoo.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [parameter.grad.norm() for parameter in self.parameters()]


class Two(zoo.StepsByHand, zoo.MLP):
    """One optimizer is sharded, the other is not."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.children()
        others = [parameter for module in rest for parameter in module.parameters()]
        return [torch.optim.Adam(first.parameters()), GloballyScaled(others)]


class Holds(zoo.MLP):
    """Has what a callback may keep from before the training."""

    def setup(self, stage: str) -> None:
        self.kept = [self.net[0].weight.data, self.state_dict()["net.2.bias"]]


# Module, what the Trainer gets, and what zero1_custom logs at the start.
COUNT = r"[\d.]+K? parameters on 2 ranks; "
STATE = COUNT + r"optimizer state sharded: [\d.]+ kB each instead of [\d.]+ kB"
NOT_SHARDED = (
    r"GloballyScaled is not sharded, as the step of a part of the parameters depends on others: every rank keeps all of"
    r" its state, as under `ddp`\. Optimizers that step each parameter by its own gradient are sharded, such as"
    r" torch\.optim\.AdamW\."
)


HELD = (
    r"a program holds the memory of net\.0\.weight, net\.2\.bias from before the training, .* or hold such memory"
    r" after the first step only\."
)


def gathered(who: str) -> str:
    return rf"gathers gradients each step, as {who} may read them \(see expose_gradients\)"


ORDINARY: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], list[str]]] = {
    "Adam": (lambda: zoo.MLP(torch.optim.Adam), {"callbacks": [EMAWeightAveraging()]}, [STATE]),
    "SGD": (lambda: zoo.MLP(torch.optim.SGD), {}, [COUNT + "no optimizer state: nothing to shard"]),
    "gradients are looked at": (Watched, {}, [STATE, gathered(r"Watched\.on_before_optimizer_step")]),
    "memory is held": (lambda: Holds(torch.optim.Adam), {}, [STATE, HELD]),
    "replicated": (lambda: zoo.MLP(GloballyScaled), {}, [NOT_SHARDED]),
    "one of two replicated": (Two, {}, [STATE, NOT_SHARDED, gathered("manual optimization")]),
}


def lines_of_ours(name: str) -> dict[str, list[str]]:
    make, arguments, _ = ORDINARY[name]
    lines_by_flag = {}
    for flag, strategy in STRATEGIES.items():
        with listening() as lines:
            train(make, strategy(), 100, **arguments)
        lines_by_flag[flag] = [line for line in lines if any(ours in line for ours in STRATEGIES)]
    return lines_by_flag


def test_the_first_three_steps_and_a_short_training_are_not_reported(pool: RankPool) -> None:
    assert pool.run(2, lines_of_a_training, False, 1, 22)[0][0] == []


@pytest.mark.parametrize("name", ORDINARY)
def test_a_training_logs_two_lines_at_its_start_and_one_at_its_end(pool: RankPool, name: str) -> None:
    found, others = pool.run(2, lines_of_ours, name)
    assert not any(others.values())
    first = found["zero1_custom"][:-1]
    assert len(first) == len(ORDINARY[name][2])
    for line, expected in zip(first, ORDINARY[name][2], strict=True):
        assert re.fullmatch("zero1_custom: " + expected, line), line
    for flag, lines in found.items():
        # Warnings are longer: they say why, and what to do.
        long = ("is not sharded, as", "no block is gathered", "holds the memory")
        infos = [line for line in lines if not any(one in line for one in long)]
        assert " per step" in lines[-1] and len(infos) <= 3, lines
        assert all(line.startswith(f"{flag}: ") and len(line) <= 140 for line in infos), infos
        plural = re.search(r"(?<![\d.])(1 (?!times one)[a-z]{3,}s|0 buckets|0 parameters)\b", " ".join(lines))
        assert plural is None, lines
    if name == "Adam":
        # 1,025 parameters: 4.1 kB of each of the four.
        assert "; nothing is sharded: 16.4 kB each" in found["ddp_tuned"][0]
        assert "; gradients, optimizer state sharded: 6.18 kB each instead of 12.3 kB" in found["zero2_custom"][0]
        assert "; weights, gradients, optimizer state sharded: " in found["zero3_custom"][0]
        assert found["zero3_custom"][0].endswith(" instead of 16.4 kB")


def test_a_training_of_one_rank_logs_no_more(pool: RankPool) -> None:
    (found,) = pool.run(1, lines_of_ours, "Adam")
    first, last = found["zero1_custom"]
    assert first == "zero1_custom: 1.02K parameters on 1 rank; optimizer state sharded: 8.2 kB each"
    assert re.fullmatch(r"zero1_custom: [\d.]+ ms per step, \d+% loading; peak memory [\d.]+ [MG]B", last)
    # No advice to gather block by block.
    assert len(found["zero3_custom"]) == 2


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
        assert warned == ["zero3_custom: gathers 3 units in turn, and all else for the whole step"]
    else:
        assert " units" not in first and len(warned) == 1 and all(word in warned[0] for word in words), warned
