"""What steps log is combined over all samples of all ranks, also where a rank had no batch of a loader, or none at all.

The oracle is one process that goes through the samples of all ranks.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies.parity import make_trainer

STRATEGIES: dict[str, Any] = {"zero1_custom": ZeRO1Strategy, "ddp_tuned": TunedDDPStrategy}
TIMEOUT = 60.0

Batches = tuple[tuple[int, ...], ...]
"""Of each loader, how many batches each rank has."""


class Logging(LightningModule):
    """Logs in every way that ends in a reduction over ranks."""

    def __init__(self, loaders: int = 2, within: str = "") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        # Has buffers, which DDP broadcasts in the first step of an evaluation.
        self.norm = torch.nn.BatchNorm1d(1)
        self.means = torch.nn.ModuleList(MeanMetric() for _ in range(loaders))
        # Keeps whole batches, of two dtypes.
        self.curves = torch.nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.collection = MetricCollection({"largest": MaxMetric(), "average": MeanMetric()})
        # Of a metric that keeps batches, within another one.
        self.composed = BinaryAUROC() + 1.0
        self.at_end, self.curve_at_end = MeanMetric(), BinaryAUROC()
        self.within = within
        self.samples: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.norm(self.layer(batch[0])).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        (samples,) = batch
        self.samples.extend(samples.flatten().tolist())
        self.norm(self.layer(samples))
        mean, size = samples.mean(), len(samples)
        self.log("mean", mean, sync_dist=True, batch_size=size)
        self.log("own name " + "ab"[dataloader_idx], mean, sync_dist=True, add_dataloader_idx=False)
        for name, value in (("sum", samples.sum()), ("min", samples.min()), ("max", samples.max())):
            self.log(name, value, reduce_fx=name, sync_dist=True, prog_bar=True)
        self.log_dict({"double": mean.double(), "builtin": mean}, reduce_fx=max, sync_dist=True)
        self.log("metric", update(self.means[dataloader_idx], samples))
        self.log("curve", update(self.curves[dataloader_idx], (samples % 7 / 7).flatten(), samples.flatten().int() % 2))
        if dataloader_idx == 0:
            self.collection.update(samples)
            self.log_dict(self.collection)
            target = samples.flatten().int() % 2
            self.log("composed", update(self.composed, (samples % 5 / 5).flatten(), target))
        self.at_end.update(samples)
        self.curve_at_end.update((samples % 5 / 5).flatten(), samples.flatten().int() % 2)
        # Each rank's own.
        self.log("local", mean)
        if self.within == f"log {dataloader_idx}":
            self.log("step", mean, on_step=True, sync_dist=True)
        elif self.within == f"all_gather {dataloader_idx}":
            self.all_gather(mean)

    def on_validation_batch_end(self, outputs: Any, batch: list[Tensor], *_: Any) -> None:
        self.log("in hook", batch[0].max(), reduce_fx="max", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("at end", self.at_end)
        self.log("curve at end", self.curve_at_end)

    test_step = validation_step
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.samples.extend(batch[0].flatten().tolist())
        if self.within == f"all_gather {dataloader_idx}":
            self.all_gather(batch[0].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def update(metric: Any, *values: Tensor) -> Any:
    metric.update(*values)
    return metric


class Fetching(Logging):
    """Fetches its batches within steps."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(self, *_: Any) -> None: ...


class Together(Logging):
    """Takes a batch of every loader that has one, and logs other values on each rank, in another order."""

    def validation_step(self, batch: list[Any], batch_idx: int) -> None:  # type: ignore[override]
        for index, part in reversed(list(enumerate(batch))):
            if part is not None:
                self.log(f"mean {index}", part[0].mean(), sync_dist=True, batch_size=len(part[0]))
                self.samples.extend(part[0].flatten().tolist())
        self.log("local on rank 0", float(batch_idx), rank_zero_only=True)

    def on_validation_batch_end(self, *_: Any) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.log("at end", self.at_end)


class InGroup(Logging):
    """Combines a value over a group."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.log("grouped", batch[0].mean(), sync_dist=True, sync_dist_group=dist.group.WORLD)


class Stream(IterableDataset[list[Tensor]]):
    """Samples whose number says whose they are; each pass has as many batches of two as it is told."""

    def __init__(self, ranks: range, passes: list[Batches], loader: int) -> None:
        self.ranks, self.passes, self.loader, self.begun = ranks, passes, loader, 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        batches = self.passes[min(self.begun, len(self.passes) - 1)][self.loader]
        self.begun += 1
        for rank in self.ranks:
            for sample in range(2 * batches[rank]):
                yield [torch.tensor([1.0 + sample + 50 * rank + 200 * self.loader])]


class Noted(Callback):
    """What callbacks see after every validation."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.metrics.append(shared(trainer.callback_metrics))


def shared(metrics: Any) -> dict[str, float]:
    """Those that are combined over ranks."""
    return {name: float(value) for name, value in metrics.items() if not name.startswith(("local", "step"))}


class Result(NamedTuple):
    samples: list[float]
    returned: list[dict[str, float]]
    after_each: list[dict[str, float]]


def evaluate(
    strategy: str | None,
    kind: str,
    passes: list[Batches],
    within: str = "",
    module_class: type[Logging] = Logging,
    mode: str = "sequential",
    **arguments: Any,
) -> Result:
    """On one of the ranks, or on one process that has the samples of all."""
    torch.manual_seed(0)
    count = len(passes[0][0])
    ranks = range(count) if strategy is None else range(dist.get_rank(), dist.get_rank() + 1)
    loaders = [DataLoader(Stream(ranks, passes, index), batch_size=2) for index in range(len(passes[0]))]
    module = module_class(len(loaders), within)
    noted = Noted()
    made = None if strategy is None else {**STRATEGIES, "zero3_custom": ZeRO3Strategy}[strategy]()
    arguments = {"callbacks": [noted], "use_distributed_sampler": False, "max_epochs": len(passes), **arguments}
    trainer = make_trainer(made, **arguments)
    given: Any = loaders[0] if len(loaders) == 1 else CombinedLoader(loaders, mode)
    returned = []
    if kind == "fit":
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=2), given)
    else:
        returned = getattr(trainer, kind)(module, given)
    if strategy is not None:
        # A message too many of one rank would be taken for this one.
        trainer.strategy.barrier()
    return Result(module.samples, [shared(of_loader) for of_loader in returned or []], noted.metrics)


def agree(found: dict[str, float], expected: dict[str, float]) -> bool:
    # A value that all ranks lack, as one of no samples at all, is NaN.
    return found.keys() == expected.keys() and found == pytest.approx(expected, nan_ok=True)


# Which rank has none of which loader.
LACKING: list[Batches] = [
    ((0, 3),),
    ((2, 0),),
    ((2, 0), (1, 3)),
    ((0, 2), (3, 1)),
    ((1, 2), (3, 0)),
    ((0, 2), (0, 1)),
    ((2, 0), (0, 1)),
    ((0, 0, 3),),
    ((2, 0, 1), (0, 3, 0)),
    ((0, 2, 1), (1, 0, 0)),
]


@pytest.mark.parametrize(
    ("strategy", "kind", "batches"),
    slow_unless(
        lambda strategy, kind, batches: (
            (strategy == "zero1_custom") == (kind == "validate") and batches in LACKING[1::3]
        ),
        itertools.product(STRATEGIES, ("validate", "test"), LACKING),
    ),
)
def test_values_are_those_of_all_samples(pool: RankPool, strategy: str, kind: str, batches: Batches) -> None:
    (expected,) = pool.run(1, evaluate, None, kind, [batches], timeout=TIMEOUT)
    found = pool.run(len(batches[0]), evaluate, strategy, kind, [batches], timeout=TIMEOUT)
    assert sorted(sample for rank in found for sample in rank.samples) == sorted(expected.samples)
    assert len(expected.returned) == len(batches) and all("at end" in one for one in expected.returned)
    for rank in found:
        assert len(rank.returned) == len(batches)
        assert all(map(agree, rank.returned, expected.returned)), (rank.returned, expected.returned)
        # Callbacks see names in the same order, too, which is that of reductions.
        assert list(rank.returned[0]) == list(found[0].returned[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sanity", slow_unless(lambda steps: steps == 2, (0, 2)))
@pytest.mark.parametrize(
    "passes",
    [
        [((0, 2),), ((1, 0),), ((2, 1),)],
        [((2, 0), (1, 1)), ((0, 2), (0, 1)), ((1, 0), (2, 0))],
    ],
)
def test_each_epoch_may_leave_out_another_rank(
    pool: RankPool, strategy: str, sanity: int, passes: list[Batches]
) -> None:
    # The sanity check is a pass of its own, of whose loaders two batches are taken.
    passes = [passes[0]] * (sanity > 0) + passes
    arguments = {"num_sanity_val_steps": sanity, "max_epochs": 3}
    (expected,) = pool.run(1, evaluate_with, None, "fit", passes, arguments, timeout=TIMEOUT)
    found = pool.run(2, evaluate_with, strategy, "fit", passes, arguments, timeout=TIMEOUT)
    assert len(expected.after_each) == 3
    for rank in found:
        assert len(rank.after_each) == 3
        assert all(map(agree, rank.after_each, expected.after_each)), (rank.after_each, expected.after_each)


def evaluate_with(strategy: str | None, kind: str, passes: list[Batches], arguments: dict[str, Any]) -> Result:
    return evaluate(strategy, kind, passes, **arguments)


def test_no_rank_has_a_batch(pool: RankPool) -> None:
    arguments = {"module_class": Together}
    (expected,) = pool.run(1, evaluate_with, None, "validate", [((0, 0),)], arguments, timeout=TIMEOUT)
    for found in pool.run(2, evaluate_with, "zero1_custom", "validate", [((0, 0),)], arguments, timeout=TIMEOUT):
        assert found.samples == [] and all(map(agree, found.returned, expected.returned)), found.returned


def test_steps_may_fetch_their_batches(pool: RankPool) -> None:
    arguments = {"module_class": Fetching}
    batches = ((0, 2),)
    (expected,) = pool.run(1, evaluate_with, None, "validate", [batches], arguments, timeout=TIMEOUT)
    for found in pool.run(2, evaluate_with, "zero1_custom", "validate", [batches], arguments, timeout=TIMEOUT):
        assert len(found.returned) == 1 and agree(found.returned[0], expected.returned[0])
    with pytest.raises(RankError) as raised:
        pool.run(
            2,
            evaluate_with,
            "zero1_custom",
            "validate",
            [((1, 3),)],
            arguments | {"within": "all_gather 0"},
            timeout=TIMEOUT,
        )
    assert str(raised.value).count(MisconfigurationException.__name__ + ": ") == 2


@pytest.mark.parametrize("batches", [((0, 1), (2, 3)), ((2, 1), (0, 0)), ((0, 3), (0, 0))])
def test_loaders_that_are_evaluated_together(pool: RankPool, batches: Batches) -> None:
    arguments = {"module_class": Together, "mode": "max_size"}
    (expected,) = pool.run(1, evaluate_with, None, "validate", [batches], arguments, timeout=TIMEOUT)
    found = pool.run(2, evaluate_with, "zero1_custom", "validate", [batches], arguments, timeout=TIMEOUT)
    assert sorted(sample for rank in found for sample in rank.samples) == sorted(expected.samples)
    assert "mean 1" in expected.returned[0] or "mean 0" in expected.returned[0]
    for rank in found:
        assert len(rank.returned) == 1 and agree(rank.returned[0], expected.returned[0])


@pytest.mark.parametrize(("batches", "named"), [(((0, 2),), "dataloader 0"), (((1, 1), (2, 0)), "dataloader 1")])
def test_a_rank_without_a_batch_cannot_gather_parameters(pool: RankPool, batches: Batches, named: str) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate, "zero3_custom", "validate", [batches], timeout=TIMEOUT)
    message = str(raised.value)
    assert message.count(MisconfigurationException.__name__ + ": ") == 2
    assert message.count(named) == 2 and "parameters are gathered" in message


def test_a_group_that_a_rank_does_not_know_is_refused_on_all(pool: RankPool) -> None:
    arguments = {"module_class": InGroup}
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate_with, "zero1_custom", "validate", [((0, 2),)], arguments, timeout=TIMEOUT)
    assert str(raised.value).count(MisconfigurationException.__name__ + ": Only some ranks had a batch") == 2


def train_and_stop(strategy: str) -> tuple[int, str]:
    stopping = EarlyStopping("mean", patience=1, mode="min")
    passes: list[Batches] = [((0, 1),), ((0, 2),), ((0, 3),), ((0, 4),)]
    result = evaluate(strategy, "fit", passes, callbacks=[stopping], num_sanity_val_steps=0, max_epochs=4)
    return len(result.samples), str(stopping.stopped_epoch)


@pytest.mark.parametrize("strategy", slow_unless(lambda strategy: strategy == "ddp_tuned", STRATEGIES))
def test_callbacks_of_a_rank_without_a_batch_see_the_values_of_all(pool: RankPool, strategy: str) -> None:
    assert pool.run(2, train_and_stop, strategy, timeout=TIMEOUT) == [(0, "1"), (6, "1")]


@pytest.mark.parametrize("strategy", slow_unless(lambda strategy: strategy == "zero1_custom", STRATEGIES))
@pytest.mark.parametrize(
    ("kind", "within", "batches", "named"),
    [
        ("validate", "log 0", ((0, 2),), "val_dataloader 0"),
        ("validate", "log 1", ((1, 1), (0, 2)), "val_dataloader 1"),
        ("test", "all_gather 1", ((1, 3), (2, 0), (1, 1)), "test_dataloader 1"),
        ("fit", "all_gather 1", ((0, 1), (2, 0)), "val_dataloader 1"),
        ("predict", "all_gather 0", ((0, 2),), "predict_dataloader 0"),
        ("predict", "all_gather 1", ((1, 1), (0, 2), (1, 1)), "predict_dataloader 1"),
    ],
)
def test_a_collective_in_a_step_is_refused_on_all_ranks(
    pool: RankPool, strategy: str, kind: str, within: str, batches: Batches, named: str
) -> None:
    arguments = {"num_sanity_val_steps": 0, "within": within}
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate_with, strategy, kind, [batches], arguments, timeout=TIMEOUT)
    message = str(raised.value)
    assert message.count(MisconfigurationException.__name__ + ": ") == 2
    assert message.count(named) == 2
    assert ("self.all_gather" if "all_gather" in within else "sync_dist=True, on_step=True") in message
