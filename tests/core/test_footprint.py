"""What a rank holds and sends, by the closed forms, beside what the tensors of real trainings hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core.footprint import Footprint, Training, ddp, pipeline, zero1, zero3
from lightning_parstrat.core.grid import Grid
from lightning_parstrat.distributed.comm.collectives import Collectives
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import looks_at_no_gradient, make_trainer
from tests.strategies.parity import zero1 as zero1_strategy
from tests.strategies.parity import zero3 as zero3_strategy

WIDTH, BLOCKS, OUT, POSITIONS = 255, 6, 300, 41
BLOCK = WIDTH * WIDTH + WIDTH
ROOT = WIDTH * (zoo.FEATURES + 1) + OUT * (WIDTH + 1) + POSITIONS * WIDTH
EVERY = ROOT + BLOCKS * BLOCK
TINY, FIRST = 3, 4


class Wide(zoo.Zoo):
    """Blocks, one of them frozen, whose rows no number of ranks divides; activations are small beside them."""

    def build(self) -> None:
        self.first = nn.Linear(zoo.FEATURES, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.blocks[2].requires_grad_(False)
        self.last = nn.Linear(WIDTH, OUT)

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch.to(self.first.weight.dtype)) + self.positions(torch.arange(len(batch)))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden).float().square().mean()


class Sent:
    """What this rank sends: by our engine's count, and of what FSDP2 hands to its collectives as a ring sends it."""

    def __init__(self) -> None:
        self.nbytes = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        gather, reduce = getattr(dist, name), Collectives.reduce_scatter
        with (
            mock.patch.object(dist, name, self._counted(gather, "output_tensor")),
            mock.patch.object(Collectives, "reduce_scatter", self._counted(reduce, "buffer")),
        ):
            yield

    def _counted(self, collective: Callable[..., Any], whole: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[whole] if whole in kwargs else next(one for one in args if isinstance(one, Tensor))
            size = dist.get_world_size()
            self.nbytes += tensor.nbytes * (size - 1) / size
            return collective(*args, **kwargs)

        return counted


class Found(NamedTuple):
    """Of each batch but the first ones: what lives before it, and the most and what was sent within the one before."""

    between: list[float]
    most: list[float]
    sent: list[float]


@looks_at_no_gradient
class Held(Callback):
    def __init__(self, live: LiveBytes, sent: Sent) -> None:
        self.live, self.sent, self.total = live, sent, 0
        self.found = Found([], [], [])

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = getattr(trainer.strategy, "_engine", None)
        if engine is not None:
            # What is on its way is not held between batches, but while it travels.
            engine.reducer.complete()
            engine.gatherer.finish()
            total, self.total = self.total, engine.bytes_sent
            self.sent.nbytes = self.total - total
        # Adam has its state since the first step.
        if batch_idx >= FIRST:
            for values, value in zip(self.found, (self.live.now, self.live.peak, self.sent.nbytes), strict=True):
                values.append(value / EVERY)
        self.live.forget_peak()
        self.sent.nbytes = 0.0


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for parameter in parameters if parameter.requires_grad], lr=1e-3)


def measure(name: str, arguments: dict[str, Any], precision: str, accumulate: int) -> Found:
    torch.manual_seed(0)
    make: dict[str, Callable[..., Any]] = {
        "ddp": lambda: "ddp",
        "ddp_tuned": TunedDDPStrategy,
        "zero1_custom": zero1_strategy,
        "zero2_custom": lambda **given: zero1_strategy(shard_gradients=True, **given),
        "zero3_custom": zero3_strategy,
    }
    sent = Sent()
    with LiveBytes() as live, sent.counting():
        held = Held(live, sent)
        trainer = make_trainer(
            make[name](**arguments),
            callbacks=[held],
            limit_train_batches=8,
            precision=precision,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(Wide(adam), zoo.loader(40 * dist.get_world_size(), TINY))
    return held.found


FORMULAS: dict[str, Callable[[Training], Footprint]] = {
    "ddp": lambda training: ddp(training, tuned=False),
    "ddp_tuned": lambda training: ddp(training, tuned=True),
    "zero1_custom": zero1,
    "zero2_custom": lambda training: zero1(training, shards_gradients=True),
    "zero3_custom": zero3,
}
ONE_AT_A_TIME: dict[str, Any] = {"bucket_cap_mb": 0.3, "max_inflight_buckets": 1}
ROWS: list[tuple[str, dict[str, Any], str, int]] = [
    ("ddp", {}, "32-true", 1),
    ("ddp_tuned", {"bucket_cap_mb": 25.0}, "bf16-mixed", 1),
    ("zero1_custom", ONE_AT_A_TIME, "32-true", 1),
    ("zero1_custom", ONE_AT_A_TIME, "bf16-true", 2),
    ("zero1_custom", ONE_AT_A_TIME, "bf16-mixed", 2),
    ("zero2_custom", ONE_AT_A_TIME, "32-true", 2),
    ("zero2_custom", ONE_AT_A_TIME, "bf16-true", 2),
    ("zero3_custom", {}, "32-true", 1),
    ("zero3_custom", {}, "32-true", 2),
    ("zero3_custom", {}, "bf16-mixed", 1),
    ("zero3_custom", {"min_num_params": 0}, "bf16-true", 1),
]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_formulas_say_what_a_training_holds_and_sends(pool: RankPool, world_size: int) -> None:
    for name, arguments, precision, accumulate in ROWS:
        training = Training(
            parameters=EVERY - BLOCK,
            precision=precision,
            devices=world_size,
            micro_batches=accumulate,
            frozen=BLOCK,
            root=ROOT,
            unit=BLOCK,
            # Between CPUs sums that have come are kept until backward has ended.
            in_flight=4 * EVERY,
        )
        footprint = FORMULAS[name](training)
        peak, held, accumulating, sent = (one / EVERY for one in footprint[1:5])
        for found in pool.run(world_size, measure, name, arguments, precision, accumulate):
            said = (name, precision, accumulate, footprint, found)
            windows = len(found.between) // accumulate
            assert found.between == pytest.approx([held, accumulating][:accumulate] * windows, rel=0.01), said
            if name.startswith("ddp"):
                # Its all-reduce is not seen here.
                assert found.sent == [0.0] * len(found.sent), said
            else:
                # Its first batch ends a window, too.
                ends = range(1, len(found.sent) - accumulate + 1, accumulate)
                steps = [sum(found.sent[start : start + accumulate]) for start in ends]
                assert steps == pytest.approx([sent] * len(steps), rel=0.02), said
            # An optimizer needs copies of its largest parameter for a moment; of a bucket on its way there are two.
            momentary = 3 * 4 * BLOCK / EVERY
            assert max(found.most) <= peak + momentary, said
            # Where gradients travel as they come, not all of them wait.
            bound = name.startswith("zero") and name != "zero3_custom"
            assert max(found.most) >= (held if bound else 0.85 * peak), said


def test_a_pipeline_is_flushed_for_each_batch_and_divides_what_the_engine_does() -> None:
    one = Training(parameters=10**9, nodes=4, pieces=4)
    four = replace(one, micro_batches=4)
    # Three rounds more than pieces for each batch, and not for each step.
    for training in (one, four):
        batches = training.micro_batches
        alone = pipeline(training, Grid(ranks=4, pipeline=4))
        assert alone.step_seconds(float(batches), 1e12, batches) == pytest.approx(batches * 7 / 16)
    # Two nodes with two stages each: what passes between them goes one way.
    two_nodes = Training(parameters=10**9, nodes=2, devices=2, activations=1e6)
    assert pipeline(two_nodes, Grid(ranks=4, pipeline=4)).on_link == 1e6
    # State is in 16 bits, too; FSDP2 reduces in each batch.
    narrow = Training(parameters=10**9, devices=4, precision="bf16-true")
    assert pipeline(narrow, Grid(ranks=4, pipeline=2)).held == 2.5 * 10**9
    shared = Training(parameters=10**9, devices=8, cut=10**9, micro_batches=4)
    grid = Grid(ranks=8, pipeline=2, tensor=2)
    assert pipeline(shared, grid).summed == 4 * pipeline(replace(shared, micro_batches=1), grid).summed
