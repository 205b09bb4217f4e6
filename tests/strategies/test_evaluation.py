"""Ranks may have different numbers of batches to evaluate; with ``exact_evaluation`` no sample counts twice."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torchmetrics import MeanMetric

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies.parity import make_trainer

STRATEGIES = {"zero1_custom": ZeRO1Strategy, "ddp_tuned": TunedDDPStrategy}
TIMEOUT = 60.0
EVALUATIONS = ("fit", "validate", "test", "predict")


class Evaluated(LightningModule):
    """Notes the samples that it sees, each of which is its own number; what ``within`` says happens in each step."""

    def __init__(self, within: str = "") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        # Has buffers that are broadcast in the first step.
        self.norm = torch.nn.BatchNorm1d(1)
        self.metric = MeanMetric()
        self.within = within
        self.seen: dict[int, list[float]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.norm(self.layer(batch[0])).square().mean()

    def evaluate(self, batch: list[Tensor], dataloader_idx: int) -> Tensor:
        (samples,) = batch
        self.seen.setdefault(dataloader_idx, []).extend(samples.flatten().tolist())
        self.norm(self.layer(samples))
        return samples

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.trainer.sanity_checking:
            return
        samples = self.evaluate(batch, dataloader_idx)
        if dataloader_idx == 0:
            self.metric.update(samples)
            self.log("metric", self.metric, on_epoch=True, add_dataloader_idx=False)
        name = f"mean {dataloader_idx}"
        self.log(name, samples.mean(), sync_dist=True, batch_size=len(samples), add_dataloader_idx=False)
        if self.within in ("log", f"log in {dataloader_idx}"):
            name = f"step {dataloader_idx}"
            self.log(name, samples.mean(), on_step=True, sync_dist=True, add_dataloader_idx=False)
        elif self.within == "all_gather":
            self.all_gather(samples.mean())

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.within == "hook" and not self.trainer.sanity_checking:
            self.log("hook", 1.0, on_step=True, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        samples = self.evaluate(batch, dataloader_idx)
        if self.within == "all_gather":
            self.all_gather(samples.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(NamedTuple):
    """Of one rank."""

    samples: dict[int, list[float]]
    metrics: dict[str, float]


Make = Callable[[int, int], DataLoader[Any]]


def own_samples(rank: int, batches: int) -> Tensor:
    """Two samples a batch, with numbers that no other rank has."""
    return torch.arange(2.0 * batches).view(-1, 1) + 100 * rank


class Stream(IterableDataset[list[Tensor]]):
    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([row] for row in self.samples)


def streamed(rank: int, batches: int) -> DataLoader[Any]:
    return DataLoader(Stream(own_samples(rank, batches)), batch_size=2)


def sampled(rank: int, batches: int) -> DataLoader[Any]:
    """By a sampler of the user's, which Lightning must not replace."""
    samples = own_samples(rank, batches)
    return DataLoader(TensorDataset(samples), batch_sampler=BatchSampler(range(len(samples)), 2, drop_last=False))


def evaluate(
    strategy: str, kind: str, loaders: Any, within: str = "", strategy_arguments: Any = None, **arguments: Any
) -> Seen:
    torch.manual_seed(0)
    module = Evaluated(within)
    made = STRATEGIES[strategy](**(strategy_arguments or {}))
    trainer = make_trainer(made, max_epochs=1, **arguments)
    if kind == "fit":
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=2), loaders)
    else:
        getattr(trainer, kind)(module, loaders)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Seen(module.seen, metrics)


def evaluate_own(
    strategy: str, kind: str, make: Make, batches: list[tuple[int, ...]], within: str = "", **arguments: Any
) -> Seen:
    rank = dist.get_rank()
    loaders = [make(rank, of_ranks[rank]) for of_ranks in batches]
    arguments |= {"use_distributed_sampler": False}
    return evaluate(strategy, kind, loaders if len(loaders) > 1 else loaders[0], within, **arguments)


@pytest.mark.parametrize(
    ("strategy", "kind", "make"),
    slow_unless(
        lambda strategy, kind, make: (strategy == "zero1_custom") == (make is streamed) and kind in ("fit", "predict"),
        itertools.product(STRATEGIES, EVALUATIONS, (streamed, sampled)),
    ),
)
def test_each_rank_goes_through_all_that_it_has(pool: RankPool, strategy: str, kind: str, make: Make) -> None:
    batches = [(1, 4), (3, 1)]
    ranks = pool.run(2, evaluate_own, strategy, kind, make, batches, timeout=TIMEOUT)
    everything: list[list[float]] = [[], []]
    for rank, seen in enumerate(ranks):
        own = {index: own_samples(rank, of_ranks[rank]).flatten().tolist() for index, of_ranks in enumerate(batches)}
        assert seen.samples == own
        for index, samples in own.items():
            everything[index].extend(samples)
    if kind == "predict":
        return
    for seen in ranks:
        for index, samples in enumerate(everything):
            assert seen.metrics[f"mean {index}"] == pytest.approx(sum(samples) / len(samples))


@pytest.mark.parametrize("strategy", slow_unless(lambda strategy: strategy == "zero1_custom", STRATEGIES))
@pytest.mark.parametrize(
    ("kind", "within", "make", "batches", "named"),
    [
        ("fit", "log", streamed, [(1, 3)], "val_dataloader 0"),
        ("fit", "all_gather", sampled, [(1, 3)], "val_dataloader 0"),
        ("validate", "all_gather", streamed, [(2, 2), (4, 3)], "val_dataloader 1"),
        ("test", "log", sampled, [(2, 2), (4, 3)], "test_dataloader 1"),
        ("predict", "all_gather", streamed, [(3, 2)], "predict_dataloader 0"),
        ("validate", "hook", sampled, [(1, 3)], "val_dataloader 0"),
    ],
)
def test_a_collective_in_a_step_of_uneven_loaders_is_refused(
    pool: RankPool, strategy: str, kind: str, within: str, make: Make, batches: list[tuple[int, ...]], named: str
) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate_own, strategy, kind, make, batches, within, timeout=TIMEOUT)
    message = str(raised.value)
    # On each rank, and no timeout.
    assert message.count(MisconfigurationException.__name__ + ": ") == 2
    collective = {"all_gather": "self.all_gather"}.get(within, "sync_dist=True")
    assert named in message and collective in message


def test_a_collective_is_refused_where_a_rank_has_no_batch(pool: RankPool) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate_own, "zero1_custom", "validate", streamed, [(0, 2)], "log", timeout=TIMEOUT)
    message = str(raised.value)
    # Also on the one that has nothing to do.
    assert message.count(MisconfigurationException.__name__ + ": ") == 2
    assert "sync_dist=True, on_step=True" in message


@pytest.mark.parametrize(
    ("within", "make", "batches", "arguments"),
    [
        ("log", streamed, [(3, 3)], {}),
        ("all_gather", sampled, [(3, 3), (2, 2)], {}),
        # Collectives in even loaders, none in the uneven one.
        ("log in 0", streamed, [(2, 2), (1, 3)], {}),
        ("log in 1", sampled, [(1, 3), (2, 2)], {}),
        # All have the two that are asked for.
        ("log", streamed, [(3, 4)], {"limit_val_batches": 2}),
        ("log", sampled, [(3, 4)], {"limit_val_batches": 2}),
    ],
)
def test_ranks_with_equally_many_batches_may_meet_in_steps(
    pool: RankPool, within: str, make: Make, batches: list[tuple[int, ...]], arguments: dict[str, Any]
) -> None:
    ranks = pool.run(2, meet, make, batches, within, arguments, timeout=TIMEOUT)
    limit = arguments.get("limit_val_batches", 100)
    for rank, seen in enumerate(ranks):
        assert [len(seen.samples[index]) // 2 for index in range(len(batches))] == [
            min(limit, of_ranks[rank]) for of_ranks in batches
        ]


def meet(make: Make, batches: list[tuple[int, ...]], within: str, arguments: dict[str, Any]) -> Seen:
    return evaluate_own("zero1_custom", "validate", make, batches, within, **arguments)


class Cycled(Evaluated):
    """Takes a batch of two loaders, of which the shorter one begins again."""

    def validation_step(self, batch: list[Any], batch_idx: int) -> None:  # type: ignore[override]
        for index, part in enumerate(batch):
            self.evaluate(part, index)


def evaluate_cycled() -> list[int]:
    rank = dist.get_rank()
    loaders = [streamed(rank, batches[rank]) for batches in ((2, 5), (7, 7))]
    module = Cycled()
    trainer = make_trainer(ZeRO1Strategy(), use_distributed_sampler=False)
    trainer.validate(module, CombinedLoader(loaders, "max_size_cycle"))
    # A message too many of one rank would be taken for this one.
    trainer.strategy.barrier()
    return [len(samples) // 2 for samples in module.seen.values()]


def test_a_loader_that_begins_again_sends_nothing_more(pool: RankPool) -> None:
    assert pool.run(2, evaluate_cycled, timeout=TIMEOUT) == [[7, 7]] * 2


class Pairs(BatchSampler):
    """One of the user's, in which Lightning puts its sampler."""


OwnSampler = Literal["none", "distributed", "in batches"]


def evaluate_exactly(strategy: str, kind: str, size: int, exact: bool, own: OwnSampler = "none") -> Seen:
    samples = TensorDataset(torch.arange(float(size)).view(-1, 1))
    if own == "in batches":
        loader = DataLoader(samples, batch_sampler=Pairs(SequentialSampler(samples), 2, drop_last=False))
    else:
        sampler = DistributedSampler(samples, shuffle=False) if own == "distributed" else None
        loader = DataLoader(samples, batch_size=2, sampler=sampler)
    return evaluate(strategy, kind, loader, strategy_arguments={"exact_evaluation": exact})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "size", "kind", "own"),
    slow_unless(
        lambda ranks, size, *_: (ranks, size) == (3, 7),
        [
            (2, 7, "fit", "none"),
            (3, 7, "validate", "none"),
            (3, 7, "validate", "in batches"),
            (3, 8, "test", "distributed"),
            (2, 9, "test", "none"),
        ],
    ),
)
def test_exact_evaluation_sees_each_sample_once(
    pool: RankPool, strategy: str, ranks: int, size: int, kind: str, own: OwnSampler
) -> None:
    exact, padded = (
        pool.run(ranks, evaluate_exactly, strategy, kind, size, choice, own, timeout=TIMEOUT)
        for choice in (True, False)
    )
    assert sorted(sample for seen in exact for sample in seen.samples[0]) == list(range(size))
    one_process = (size - 1) / 2
    for seen in exact:
        assert seen.metrics["metric"] == pytest.approx(one_process)
        assert seen.metrics["mean 0"] == pytest.approx(one_process)
    # The default is that of `ddp`: what is repeated counts.
    assert len([sample for seen in padded for sample in seen.samples[0]]) == -(-size // ranks) * ranks


def test_exact_evaluation_needs_a_sample_for_every_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="2 samples for 3 ranks"):
        pool.run(3, evaluate_exactly, "zero1_custom", "validate", 2, True, timeout=TIMEOUT)


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_exact_evaluation_is_true_or_false(strategy: Any) -> None:
    with pytest.raises(ValueError, match="Invalid exact_evaluation: 'yes'"):
        strategy(exact_evaluation="yes")
