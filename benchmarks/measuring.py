"""Times and counts one run of steps through Lightning's Trainer, and several in turns."""

import argparse
import itertools
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.emulated import EmulatedDecoder
from benchmarks.gpt import Decoder, RandomTokens
from benchmarks.peers import SINGLE_PROCESS, WHOLE_BATCH, make_module, make_strategy, reason_to_leave_out
from benchmarks.quiet import QUIET


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every program that times steps."""
    parser.add_argument("--devices", type=int, default=2, help="ranks per node; started here unless they run already")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3, help="how often the strategies take turns")
    parser.add_argument("--steps", type=int, default=8, help="micro-batches on the clock")
    parser.add_argument("--warm-up", type=int, default=3, help="micro-batches before the clock starts")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of 128 tokens per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument(
        "--emulate",
        type=float,
        metavar="SECONDS",
        help="layers sleep instead of computing: SECONDS for a forward of all of them, twice that for a backward",
    )
    parser.add_argument("--label", default="local processes", help="what the ranks ran on, for the result file")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses combinations whose numbers would mean nothing."""
    if arguments.steps % arguments.accumulate or arguments.warm_up % arguments.accumulate:
        # Otherwise the clock would hold more steps of one strategy's communication than of computation.
        parser.error("--steps and --warm-up must be multiples of --accumulate: the clock holds whole optimizer steps")


class Stopwatch(Callback):
    """Wall time and bytes of steps within a training: not of the first few, which settle, and not of its end.

    It has no hook in which a strategy would have to show gradients, which costs communication.
    """

    def __init__(self, warm_up: int, timed: int) -> None:
        self.warm_up, self.timed = warm_up, timed
        self.steps = 0
        self.started = self.seconds = 0.0
        self.sent_at_start: int | None = None
        self.sent: int | None = None
        self.handed_at_start: int | None = None
        self.payload: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.steps == self.warm_up:
            engine = getattr(trainer.strategy, "_engine", None)
            self.handed_at_start = None if engine is None else engine.bytes_sent
            self.sent_at_start = _bytes_sent()
            self.started = time.perf_counter()
        elif self.steps == self.warm_up + self.timed:
            self._stop(trainer)
        self.steps += 1

    def _stop(self, trainer: Trainer) -> None:
        self.seconds = (time.perf_counter() - self.started) / self.timed
        sent = _bytes_sent()
        if sent is not None and self.sent_at_start is not None:
            self.sent = round((sent - self.sent_at_start) / self.timed * trainer.accumulate_grad_batches)
        if self.handed_at_start is not None:
            # What this rank's collectives were handed per optimizer step.
            trainer.strategy._engine.gatherer.finish()
            handed = trainer.strategy._engine.bytes_sent - self.handed_at_start
            self.payload = {"bytes_sent": handed / (self.timed // trainer.accumulate_grad_batches)}


def _bytes_sent() -> int | None:
    """What has left this node by the interface that Gloo was told to use; by all of the node's ranks."""
    counter = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "none"), "statistics", "tx_bytes")
    return int(counter.read_text()) if counter.is_file() else None


class StepTimes(Callback):
    """Wall time, and what the main thread computes, of each step but the first few."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.starts: list[float] = []
        self.computed: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())
        self.computed.append(time.thread_time())

    def kept(self, clock: list[float]) -> list[float]:
        """The seconds of each step by one of the two clocks."""
        return [after - before for before, after in itertools.pairwise(clock[self.warm_up :])]


class Phases(Callback):
    """Mean time of forward and of backward; where nothing is sent, as its hooks would have gradients be shown."""

    def __init__(self, warm_up: int, timed: int) -> None:
        self.warm_up, self.timed = warm_up, timed
        self.steps = 0
        self.at = self.forward = self.backward = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self._lap()

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.forward += self._lap()

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self.backward += self._lap()

    def _lap(self) -> float:
        before, self.at = self.at, time.perf_counter()
        return self.at - before if 0 < self.steps - self.warm_up <= self.timed else 0.0

    def means(self, seconds: float, accumulate: int) -> dict[str, float]:
        """Forward and backward per micro-batch, and whatever else there is per optimizer step."""
        forward, backward = self.forward / self.timed, self.backward / self.timed
        rest = max(seconds - forward - backward, 0.0) * accumulate
        return {"forward": forward, "backward": backward, "step": rest}


def make_decoder(arguments: argparse.Namespace) -> nn.Module:
    """The same decoder on all ranks."""
    torch.manual_seed(0)
    decoder = Decoder(width=arguments.width, depth=arguments.depth)
    return decoder if arguments.emulate is None else EmulatedDecoder(decoder, arguments.emulate)


def fit(name: str, arguments: argparse.Namespace, callbacks: list[Callback]) -> None:
    """Trains for the steps that ``arguments`` name, and one more, under that strategy."""
    decoder = make_decoder(arguments)
    ranks = arguments.num_nodes * arguments.devices
    alone = name in (SINGLE_PROCESS, WHOLE_BATCH[1])
    # At the start of the last one, clocks stop: what a step sends is on the clock as often as what it computes.
    steps = arguments.warm_up + arguments.steps + arguments.accumulate
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if alone else arguments.devices,
        num_nodes=1 if alone else arguments.num_nodes,
        strategy=make_strategy(name, ranks),
        max_steps=steps // arguments.accumulate,
        gradient_clip_val=arguments.clip,
        accumulate_grad_batches=arguments.accumulate,
        callbacks=callbacks,
        **QUIET,
    )
    data = RandomTokens(steps * arguments.batch_size * ranks)
    # The stages of a pipeline share the batch that other ranks divide.
    batch_size = arguments.batch_size * (ranks if name in WHOLE_BATCH else 1)
    trainer.fit(make_module(name, decoder), DataLoader(data, batch_size=batch_size))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds per micro-batch under that strategy as this rank sees them, and bytes per optimizer step."""
    if dist.is_initialized():
        dist.barrier()
    timed = arguments.warm_up, arguments.steps
    stopwatch, phases = Stopwatch(*timed), Phases(*timed)
    alone = name == SINGLE_PROCESS
    fit(name, arguments, [stopwatch, phases] if alone else [stopwatch])
    result: dict[str, Any] = {"seconds": stopwatch.seconds, "sent": stopwatch.sent, "payload": stopwatch.payload}
    return result | ({"phases": phases.means(stopwatch.seconds, arguments.accumulate)} if alone else {})


def measure_in_turns(
    names: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Measurements of each strategy, one per turn, and why others were left out."""
    reasons = {name: reason_to_leave_out(name) for name in names}
    # Lightning's lines about each of many Trainers would bury the result.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name, reason in reasons.items() if reason is None}
    for _ in range(arguments.pairs):
        for name, measurements in results.items():
            measurements.append(measure(name, arguments))
    return results, {name: reason for name, reason in reasons.items() if reason is not None}


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def quartiles(values: list[float]) -> list[float]:
    """The first and the third."""
    if len(values) == 1:
        return values * 2
    first, _, third = statistics.quantiles(values, method="inclusive")
    return [first, third]
