"""``zero2_custom`` in trainings: what it holds between micro-batches, and who has it keep whole gradients there."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import largest_difference, make_trainer, train, zero1
from tests.strategies.test_report import listening

ACCUMULATE = 3


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


class Wide(zoo.Zoo):
    """Two megabytes of parameters, beside which nothing else counts."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(zoo.FEATURES, 256), *(nn.Linear(256, 256, bias=False) for _ in range(8)))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.net(batch.to(self.net[0].weight.dtype)).float().square().mean()


def storages() -> dict[int, int]:
    """The bytes of every memory that any tensor of this process lies in, by its address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    # What compiling has left in this process lies nowhere.
    tensors = [one for one in tensors if not isinstance(one, FakeTensor)]
    # Autograd's are no objects of Python before somebody asks.
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    held = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    return {address: storage.nbytes() for storage in held if (address := address_of(storage)) is not None}


def address_of(storage: torch.UntypedStorage) -> int | None:
    """Where the storage lies; None if it lies nowhere, as one that an earlier test has taken away."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return None


class Held(Callback):
    """What the process holds before the second and third micro-batch of a window."""

    def __init__(self) -> None:
        self.before = storages()
        self.found: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        # The first window makes what later ones find there.
        if batch_idx > ACCUMULATE and batch_idx % ACCUMULATE:
            engine = trainer.strategy._engine
            # What is on its way is not held between micro-batches, but while it travels.
            engine.reducer.complete()
            engine.gatherer.finish()
            self.found.append(sum(nbytes for address, nbytes in storages().items() if address not in self.before))


def held_between_micro_batches(precision: str, masters: Any, in_shards: bool) -> list[int]:
    held = Held()
    # Several buckets.
    chosen = zero1(bucket_cap_mb=0.6, master_weights=masters, shard_gradients=in_shards)
    trainer = make_trainer(
        chosen, callbacks=[held], accumulate_grad_batches=ACCUMULATE, precision=precision, limit_train_batches=9
    )
    trainer.fit(Wide(adam), zoo.loader(40 * dist.get_world_size(), 4))
    return held.found


@pytest.mark.slow
def test_the_formula_says_what_is_held_between_micro_batches(pool: RankPool) -> None:
    ranks = 2
    for precision, masters, whole, sharded, in_shards in (
        # Bytes of a parameter; of its master, its two averages and the sum of its gradients, in the shards.
        ("32-true", "auto", 4, 8 + 4, True),
        ("32-true", "auto", 4, 8 + 4, False),
        ("bf16-true", "auto", 2, 4 + 8 + 4, True),
        ("bf16-true", False, 2, 4 + 4, True),
        ("bf16-true", "auto", 2, 4 + 8 + 4, False),
    ):
        # Else gradients are whole, too, and not in the shards.
        sums = max(4, whole)
        each = whole + sharded / ranks if in_shards else 2 * whole + (sharded - sums) / ranks
        formula = each * sum(parameter.numel() for parameter in Wide(adam).parameters())
        for found in pool.run(ranks, held_between_micro_batches, precision, masters, in_shards):
            assert len(found) == 4
            assert found == pytest.approx([formula] * 4, rel=0.03)


class Undoes(zoo.MLP):
    """Takes back what a micro-batch has added to the gradients where it does not like its loss."""

    def on_after_backward(self) -> None:
        index = self.trainer.fit_loop.epoch_loop.batch_idx
        gradients = [parameter.grad for parameter in self.parameters()]
        if index % 4 == 1:
            for gradient, kept in zip(gradients, self.kept, strict=True):
                gradient.copy_(kept)
        self.kept = [gradient.clone() for gradient in gradients]


class Clears(zoo.MLP):
    """Forgets what has been accumulated, of the module's parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 5 == 2:
            self.zero_grad()
        return super().training_step(batch, batch_idx)


class HalvesAsItComes(zoo.MLP):
    """A hook of a parameter changes what has been accumulated so far."""

    def on_train_start(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)


class ValidationForgets(zoo.MLP):
    def on_validation_start(self) -> None:
        self.zero_grad()


class Unwatched(zoo.MLP):
    pass


WHOLE = {
    Undoes: "Undoes.on_after_backward",
    Clears: "Clears.training_step",
    HalvesAsItComes: "hooks of parameters",
    ValidationForgets: "ValidationForgets.on_validation_start",
}


def compare_watched(module: type[zoo.Zoo]) -> tuple[float, list[str]]:
    runs, said = [], []
    for in_shards in (False, True):
        chosen = zero1(expose_gradients="auto", partial_window="exact", shard_gradients=in_shards)
        with listening() as lines:
            runs.append(
                train(module, chosen, validate=True, accumulate_grad_batches=3, val_check_interval=5, max_epochs=2)
            )
        said = [line for line in lines if "between micro-batches" in line]
    return largest_difference(*runs), said


def test_who_looks_at_what_has_accumulated_finds_it_whole_and_is_told_once(pool: RankPool) -> None:
    for module in (*WHOLE, Unwatched):
        first, *others = pool.run(2, compare_watched, module)
        named = WHOLE.get(module)
        assert len(first[1]) == (named is not None) and all(lines == [] for _, lines in others)
        assert named is None or (first[1][0].startswith("zero2_custom: ") and named in first[1][0])
        for apart, _ in (first, *others):
            # To the last bit, where whole gradients accumulate alike.
            assert apart <= (2e-5 if named is None else 0)
    ((apart, said),) = pool.run(1, compare_watched, Unwatched)
    assert apart == 0 and said == []


class LooksOnOneRank(Callback):
    """Reads gradients on rank 1 alone."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.norms = [parameter.grad.norm() for parameter in pl_module.parameters()]


def watched_by_one() -> bool:
    chosen = zero1(expose_gradients="auto", shard_gradients=True)
    callbacks: list[Callback] = [LooksOnOneRank()] if dist.get_rank() == 1 else []
    seen = []

    class Looks(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(trainer.strategy._engine.reducer.shards_accumulation)

    train(zoo.MLP, chosen, callbacks=[*callbacks, Looks()], accumulate_grad_batches=2)
    return seen[0]


def test_ranks_decide_together(pool: RankPool) -> None:
    assert pool.run(2, watched_by_one) == [False, False]


class Reductions(Callback):
    """How many reduce-scatters and all-gathers of parameters there were, per bucket."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = trainer.strategy._engine
        engine.gatherer.finish()
        self.buckets = len(engine.buckets)
        self.sent = engine.reducer.collectives.traffic.reduce_scatters, engine.gatherer.collectives.traffic.all_gathers


def launches(flag: str, accumulate: int) -> tuple[float, float]:
    counted = Reductions()
    entry = StrategyRegistry[flag]
    chosen = entry["strategy"](**entry["init_params"], bucket_cap_mb=0.001)
    trainer = make_trainer(chosen, callbacks=[counted], accumulate_grad_batches=accumulate)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer.fit(zoo.MLP(), zoo.loader(48 * ranks, 4, rank=rank, world_size=ranks))
    return counted.sent[0] / counted.buckets, counted.sent[1] / counted.buckets


def test_a_step_reduces_every_micro_batch_and_gathers_once(pool: RankPool) -> None:
    # Twelve batches. The first micro-batch shows the order of gradients; its own are sent with those of the second.
    for flag, accumulate, expected in (
        ("zero1_custom", 4, (3, 3)),
        ("zero2_custom", 4, (11, 3)),
        ("ddp_zero2", 5, (11, 3)),
        ("zero1_custom", 1, (12, 12)),
        ("zero2_custom", 1, (12, 12)),
    ):
        assert pool.run(2, launches, flag, accumulate) == [expected] * 2
