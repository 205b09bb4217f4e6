"""What FSDP2 holds and sends, by the formulas, beside what the tensors of real trainings hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from lightning_parstrat.core.full_sharding import FullySharded, GatheredUnit, ItemSizes, SentBytes
from lightning_parstrat.core.memory import HeldBytes
from lightning_parstrat.distributed.comm.collectives import Collectives
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.parity import make_trainer, zero3

WIDTH, BLOCKS, OUT, POSITIONS = 255, 6, 300, 41
TINY = 3


class Wide(zoo.Zoo):
    """Blocks, one of them frozen, whose rows no number of ranks divides; activations are small beside them."""

    def build(self) -> None:
        self.first = nn.Linear(zoo.FEATURES, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.blocks[2].requires_grad_(False)
        self.last = nn.Linear(WIDTH, OUT)

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch) + self.positions(torch.arange(len(batch)))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden).square().mean()


def wide(world_size: int) -> FullySharded:
    block = ((WIDTH, WIDTH), (WIDTH,))
    units = [GatheredUnit((), block) if number == 2 else GatheredUnit(block) for number in range(BLOCKS)]
    # Autocast rounds no embedding.
    exact = ((POSITIONS, WIDTH),)
    root = GatheredUnit(((WIDTH, zoo.FEATURES), (WIDTH,), (OUT, WIDTH), (OUT,), *exact), exact=exact)
    return FullySharded(root, units, world_size)


class Sent:
    """What FSDP2 hands to its collectives, in bytes that a ring sends of it."""

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
    """Of each batch but the first two: what lives before it, and the most and what was sent within the one before."""

    between: list[int]
    most: list[int]
    sent: list[float]


class Held(Callback):
    def __init__(self, live: LiveBytes, sent: Sent) -> None:
        self.live, self.sent = live, sent
        self.found = Found([], [], [])

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1:
            for values, value in zip(self.found, (self.live.now, self.live.peak, self.sent.nbytes), strict=True):
                values.append(value)
        self.live.forget_peak()
        self.sent.nbytes = 0.0


# It looks at no gradient.
Held.on_train_batch_start.__module__ = "lightning.pytorch.callbacks"


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for parameter in parameters if parameter.requires_grad], lr=1e-3)


def measure(arguments: dict[str, Any], trainer_arguments: dict[str, Any]) -> Found:
    torch.manual_seed(0)
    sent = Sent()
    with LiveBytes() as live, sent.counting():
        held = Held(live, sent)
        trainer = make_trainer(zero3(**arguments), callbacks=[held], limit_train_batches=8, **trainer_arguments)
        trainer.fit(Wide(adam), zoo.loader(40 * dist.get_world_size(), TINY))
    return held.found


FP32, NARROW = ItemSizes(), ItemSizes(gathered=2)
MIXED = {"precision": "bf16-mixed"}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arguments", "trainer_arguments", "sizes"),
    slow_unless(
        lambda arguments, trainer_arguments, sizes: not arguments and sizes != NARROW,
        [
            ({}, {}, FP32),
            ({}, {"accumulate_grad_batches": 2}, FP32),
            ({}, MIXED, NARROW),
            ({"gather_dtype": None}, MIXED, ItemSizes(cast=2)),
            ({"reduce_dtype": "bf16"}, MIXED, ItemSizes(gathered=2, sent=2)),
            ({"min_num_params": 0}, {"precision": "bf16-true"}, ItemSizes(2, 2, 2, sent=2)),
            ({"min_num_params": 0, "reduce_dtype": "fp32"}, {"precision": "bf16-true"}, ItemSizes(2, 2, 2)),
        ],
    ),
)
def test_formulas_say_what_a_training_holds_and_sends(
    pool: RankPool, world_size: int, arguments: dict[str, Any], trainer_arguments: dict[str, Any], sizes: ItemSizes
) -> None:
    sharded = wide(world_size)
    parameters = list(Wide().parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    micro_batches = trainer_arguments.get("accumulate_grad_batches", 1)
    for rank, (between, most, sent) in enumerate(pool.run(world_size, measure, arguments, trainer_arguments)):
        held = sharded.held_bytes(rank, sizes.sharded, 2 * sizes.sharded)
        assert len(between) == 6
        # The least of them: Gloo's threads may keep a copy of what was reduced for a moment longer.
        assert min(between) == pytest.approx(held.total, rel=0.01)
        # Parameters, gradients and Adam's two averages; 16 / N in fp32.
        assert min(between) == pytest.approx((4 * trained + frozen) * sizes.sharded / world_size, rel=0.05)
        # The last micro-batch of a step finds the gradients of those before it.
        assert min(most[2::micro_batches]) == pytest.approx(
            sharded.peak_bytes(held, sizes, accumulates=micro_batches > 1), rel=0.05
        )
        assert sent == pytest.approx([sum(sharded.sent_bytes(sizes))] * 6, rel=1e-9)


def test_half_as_much_again_is_sent_as_an_all_reduce_sends() -> None:
    units = [GatheredUnit([(8, 100)])] * 3
    sent = FullySharded(GatheredUnit([]), units, 4).sent_bytes(FP32)
    all_reduce = 2 * 3 / 4 * 2400 * 4
    assert sent == SentBytes(forward=all_reduce / 2, backward=all_reduce)
    # The root is gathered once, and what is frozen has no gradients.
    sent = FullySharded(units[0], [GatheredUnit([], [(8, 100)])], 4).sent_bytes(NARROW)
    assert sent == SentBytes(forward=3 / 4 * 1600 * 2, backward=3 / 4 * (800 * 2 + 800 * 4))


@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (1, 2), (2, 1), (3, 0)])
def test_padding_is_held_but_has_no_state(rank: int, rows: int) -> None:
    held = FullySharded(GatheredUnit([(5, 10)]), [], 4).held_bytes(rank, 4, 8.0)
    assert held == HeldBytes(parameters=80, master_weights=0, optimizer_state=80 * rows, gradient_shards=80)


def test_one_large_unit_needs_more_than_many_small_ones() -> None:
    def most(units: int) -> int:
        sharded = FullySharded(GatheredUnit([]), [GatheredUnit([(1024 // units, 8)])] * units, 8)
        return sharded.peak_bytes(sharded.held_bytes(0, 4, 8.0), FP32, accumulates=False)

    assert most(1) > most(2) > most(8) > most(32)
    nbytes = 4 * 1024 * 8
    # Received and copied; then its gradients; nothing of it is sent beside another one.
    assert most(1) == 16 * nbytes // 4 // 8 + 2 * nbytes
