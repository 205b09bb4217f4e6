"""Evaluations: what stock DDP evaluates, all flags evaluate, with the same values; and no sample counts twice."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from tests.comparing import assert_same
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies.parity import ddp, make_trainer, whole
from tests.strategies.zoo import Stream

STRATEGIES: dict[str, Any] = {
    "ddp": ddp,
    "zero1_custom": ZeRO1Strategy,
    "ddp_tuned": TunedDDPStrategy,
    "zero3_custom": lambda **arguments: ZeRO3Strategy(min_num_params=0, **arguments),
}
TIMEOUT = 100.0


class Evaluated(LightningModule):
    """Notes the samples that it sees, and logs in all ways; what ``within`` says happens in each step."""

    def __init__(self, within: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        # Has buffers that are broadcast in the first step.
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)
        self.metric, self.at_end = MeanMetric(), MeanMetric()
        self.within = within
        self.seen: list[list[float]] = []

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(samples / 100)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = [part for part in batch if part is not None] if self.within == "together" else [batch]
        for (samples,) in parts:
            self.seen.append([float(dataloader_idx), *samples.flatten().tolist()])
            value = self(samples).mean()
            if self.within != "alone":
                self.log("value", value, sync_dist=True, batch_size=len(samples))
                self.log("mean", samples.mean(), sync_dist=True, batch_size=len(samples))
                self.log("largest", samples.max(), reduce_fx="max", sync_dist=True)
                self.metric.update(samples)
                self.log("metric", self.metric, add_dataloader_idx=False)
                self.at_end.update(samples)
            self.log("local", value, batch_size=len(samples))
            if self.within == "log":
                self.log("step", value, on_step=True, sync_dist=True)
            elif self.within == "slope":
                with torch.enable_grad():
                    samples = samples.clone().requires_grad_(True)
                    (slope,) = torch.autograd.grad(self(self(samples)).sum(), samples)
                self.log("slope", slope.norm(), sync_dist=True, batch_size=len(samples))
            elif self.within == "gather":
                self.log("gathered", self.all_gather(value).mean(), batch_size=1)

    def on_validation_epoch_end(self) -> None:
        if self.within != "alone":
            self.log("at end", self.at_end)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fetching(Evaluated):
    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        super().validation_step(*next(dataloader_iter))

    test_step = validation_step


class Noted(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Row(NamedTuple):
    """An evaluation: how many batches each rank has of each loader, which are streams ("s") or know their lengths."""

    how: Literal["fit", "validate", "test", "predict"]
    batches: tuple[tuple[int, ...], ...]
    streams: str
    within: str = ""
    arguments: Any = None
    module: type[Evaluated] = Evaluated
    mode: str = "sequential"


def evaluate(strategy: str, row: Row) -> Any:
    """All that a rank sees of it, or the error."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    loaders = []
    for number, of_ranks in enumerate(row.batches):
        # Two samples a batch, with numbers that no other rank has.
        samples = torch.arange(2.0 * of_ranks[rank]).view(-1, 1) + 100 * rank + 1000 * number
        if row.streams[number] == "s" or row.streams[number] == str(rank):
            loaders.append(DataLoader(Stream([row] for row in samples), batch_size=2))
        else:
            loaders.append(DataLoader(TensorDataset(samples), batch_size=2))
    noted = Noted()
    arguments = {"max_epochs": 2, "use_distributed_sampler": False, **(row.arguments or {})}
    arguments["callbacks"] = [noted, *(make() for make in arguments.get("callbacks", []))]
    trainer, module = make_trainer(STRATEGIES[strategy](), **arguments), row.module(row.within)
    given: Any = loaders[0] if len(loaders) == 1 else CombinedLoader(loaders, row.mode)
    returned = None
    try:
        if row.how == "fit":
            trainer.fit(module, DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1) + rank), batch_size=2), given)
        else:
            returned = getattr(trainer, row.how)(module, given)
    except MisconfigurationException as error:
        return str(error)
    # A message too many of one rank would be taken for this one.
    trainer.strategy.barrier()
    state = [whole(tensor.detach()).clone() for tensor in (*module.parameters(), *module.buffers())]
    return {"seen": module.seen, "returned": returned, "metrics": noted.metrics, "state": state}


def evaluate_all(strategy: str, rows: list[Row]) -> list[Any]:
    return [evaluate(strategy, row) for row in rows]


def evaluate_in_turn(strategy: str) -> dict[str, Any]:
    """What a rank holds and predicts after each call. The last step of the fit leaves ranks with other statistics."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.arange(14.0).view(-1, 1) * 7 + 100 * dist.get_rank())
    loader, module = DataLoader(samples, batch_size=2), Evaluated()
    trainer = make_trainer(STRATEGIES[strategy](), use_distributed_sampler=False, val_check_interval=2)
    found: dict[str, Any] = {}
    for call, loaders in (("validate", 1), ("fit", 2), ("test", 1), ("predict", 1)):
        returned = getattr(trainer, call)(module, *[loader] * loaders)
        found[call] = (returned, [one.clone() for one in (module.norm.running_mean, module.norm.running_var)])
    return found


@pytest.mark.parametrize("strategy", ["zero1_custom", "ddp_tuned", "zero3_custom"])
def test_buffers_after_each_call_of_a_program_are_those_of_ddp(pool: RankPool, strategy: str) -> None:
    expected = pool.run(2, evaluate_in_turn, "ddp", timeout=TIMEOUT)
    for ours, theirs in zip(pool.run(2, evaluate_in_turn, strategy, timeout=TIMEOUT), expected, strict=True):
        assert_same(ours, theirs, rtol=1e-4, atol=1e-5)


UNEVEN = {
    "fit, streams": Row("fit", ((1, 4), (3, 2)), "ss"),
    "validate, streams of three ranks": Row("validate", ((1, 4, 1), (2, 3, 4)), "ss"),
    "test, known lengths": Row("test", ((1, 4), (2, 1)), "kk"),
    "predict, streams": Row("predict", ((0, 3), (2, 1)), "ss"),
    # Nothing is combined, so that nobody waits.
    "a rank without a batch": Row("validate", ((0, 2),), "s", "alone"),
    "together": Row("validate", ((1, 4), (3, 1)), "ss", "together", mode="max_size"),
}
EVEN = {
    "fit, logged in steps": Row("fit", ((2, 2), (3, 3)), "sk", "log"),
    "gathered in steps": Row("validate", ((3, 3), (2, 2)), "sk", "gather"),
    "test, limited": Row("test", ((3, 4),), "s", "log", {"limit_test_batches": 3}),
    "limited by less": Row("validate", ((3, 4),), "s", "log", {"limit_val_batches": 2}),
    "gradients in steps": Row("fit", ((2, 2),), "k", "slope", {"inference_mode": False}),
    "fetched in steps": Row("validate", ((2, 2),), "s", module=Fetching),
    "loaders that begin again": Row("validate", ((2, 2), (5, 5)), "ss", "together", mode="max_size_cycle"),
    # Buffers are rank 0's from the first step of the validation.
    "averages of weights": Row("fit", ((2, 2),), "k", arguments={"callbacks": [WeightAveraging]}),
    "no batch at all": Row("validate", ((0, 0), (1, 1)), "ss"),
}
KNOWN = {
    "fit, known lengths": Row("fit", ((1, 4), (3, 2)), "kk"),
    "fetched in steps, known": Row("test", ((1, 3),), "k", module=Fetching),
    "predict, limited": Row("predict", ((1, 4), (5, 2)), "kk", arguments={"limit_predict_batches": 3}),
    "sanity check": Row("fit", ((1, 3),), "k", arguments={"num_sanity_val_steps": 2, "max_epochs": 1}),
}
SAME = {
    "zero1_custom": {**UNEVEN, **EVEN, **KNOWN},
    "ddp_tuned": {**UNEVEN, **EVEN, **KNOWN},
    "zero3_custom": {**EVEN, **KNOWN, "test, known lengths": UNEVEN["test, known lengths"]},
}


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    slow_unless(
        lambda strategy, _: strategy != "ddp_tuned",
        [("zero1_custom", 2), ("zero1_custom", 3), ("ddp_tuned", 2), ("ddp_tuned", 3), ("zero3_custom", 2)],
    ),
)
def test_evaluations_are_those_of_ddp(pool: RankPool, strategy: str, ranks: int) -> None:
    rows = {name: row for name, row in SAME[strategy].items() if len(row.batches[0]) == ranks}
    expected = pool.run(ranks, evaluate_all, "ddp", list(rows.values()), timeout=TIMEOUT)
    actual = pool.run(ranks, evaluate_all, strategy, list(rows.values()), timeout=TIMEOUT)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(dict(zip(rows, ours, strict=True)), dict(zip(rows, theirs, strict=True)), rtol=1e-4, atol=1e-5)


# What ranks say all of which gather parameters in every step.
REFUSED = {
    "streams": (Row("fit", ((2, 3),), "s"), "After 2 batches of a val_dataloader"),
    "streams, limited": (Row("test", ((2, 4),), "s", "", {"limit_test_batches": 3}), "After 2 batches of a test_"),
    "one rank knows its length": (Row("validate", ((2, 3),), "0"), "After 2 batches of a val_dataloader"),
    "no batch of a stream": (Row("predict", ((1, 1), (0, 2)), "ss"), "After 0 batches of a predict_dataloader"),
    "gradients": (
        Row("validate", ((1, 2),), "k", "slope", {"inference_mode": False}),
        "gradients are computed in a step",
    ),
    "no batch": (Row("validate", ((0, 2),), "k"), "A rank has no batch of a val_dataloader, while another one has 2"),
    "together": (
        Row("validate", ((2, 3), (3, 3)), "kk", "together", mode="max_size"),
        "between 2 and 3 batches of val_datal",
    ),
    "beside a stream": (Row("test", ((2, 2), (1, 3)), "sk"), "between 1 and 3 batches of test_dataloader 1"),
}


def test_ranks_that_take_all_steps_together_need_equally_many(pool: RankPool) -> None:
    rows = [row for row, _ in REFUSED.values()]
    for errors in pool.run(2, evaluate_all, "zero3_custom", rows, timeout=TIMEOUT):
        for name, error, (_, expected) in zip(REFUSED, errors, REFUSED.values(), strict=True):
            assert isinstance(error, str) and expected in error, (name, error)
            assert "gathers parameters" in error and "limit_val_batches" in error


class Pairs(BatchSampler):
    """One of the user's, in which Lightning puts its sampler, and which keeps it in another place, too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.inner = BatchSampler(self.sampler, 2, drop_last=False)

    def __iter__(self) -> Any:
        return iter(self.inner)


def as_batch(sample: Sequence[Tensor]) -> list[Tensor]:
    return [one[None] for one in sample]


OwnSampler = Literal["none", "distributed", "in batches", "by samples", "full batches"]


def evaluate_exactly(strategy: str, kind: str, size: int, exact: bool, own: OwnSampler = "none") -> Any:
    samples = TensorDataset(torch.arange(float(size)).view(-1, 1))
    if own == "in batches":
        loader = DataLoader(samples, batch_sampler=Pairs(SequentialSampler(samples), 2, drop_last=False))
    else:
        sampler = DistributedSampler(samples, shuffle=False) if own in ("distributed", "by samples") else None
        batches: dict[str, Any] = {"batch_size": 2, "drop_last": own == "full batches"}
        if own == "by samples":
            batches = {"batch_size": None, "collate_fn": as_batch}
        loader = DataLoader(samples, sampler=sampler, **batches)
    module = Evaluated()
    trainer = make_trainer(STRATEGIES[strategy](exact_evaluation=exact))
    if kind == "fit":
        trainer.fit(module, loader, loader)
    else:
        getattr(trainer, kind)(module, loader)
    # A training with the same loader draws as many as without exact evaluation.
    assert trainer.global_step == (len(loader) if kind == "fit" else 0)
    if own == "distributed":
        assert len(loader.sampler) == len(list(loader.sampler)) == -(-size // dist.get_world_size())
    return [sample for seen in module.seen for sample in seen[1:]], dict(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("strategy", "ranks", "size", "kind", "own"),
    slow_unless(
        lambda strategy, *_: strategy != "ddp_tuned",
        [
            ("zero1_custom", 3, 7, "validate", "in batches"),
            ("zero3_custom", 2, 9, "test", "distributed"),
            ("ddp_tuned", 3, 8, "test", "none"),
            ("ddp_tuned", 2, 7, "fit", "distributed"),
            ("ddp_tuned", 2, 7, "validate", "by samples"),
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
    # The sanity check has seen the same before: two batches are all that a rank has.
    times = 2 if kind == "fit" else 1
    assert sorted(sample for seen, _ in exact for sample in seen) == sorted([*range(size)] * times)
    one_process = (size - 1) / 2
    for _, metrics in exact:
        assert float(metrics["metric"]) == pytest.approx(one_process)
        assert float(metrics["mean"]) == pytest.approx(one_process)
    # The default is that of `ddp`: what is repeated counts.
    assert len([sample for seen, _ in padded for sample in seen]) == -(-size // ranks) * ranks * times


@pytest.mark.parametrize(("samples", "own"), [(2, "none"), (5, "full batches")])
def test_exact_evaluation_needs_a_batch_for_every_rank(pool: RankPool, samples: int, own: OwnSampler) -> None:
    with pytest.raises(RankError, match=f"{samples} samples for 3 ranks"):
        pool.run(3, evaluate_exactly, "zero1_custom", "validate", samples, True, own, timeout=TIMEOUT)
