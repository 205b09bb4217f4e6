"""Trainings whose samples are divided unequally, or whose ranks change, end where one process ends."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.distributed.gradients.loss_weights import InconsistentWeightsError
from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.parity import looks_at_no_gradient, make_trainer, whole
from tests.strategies.test_dataloaders import workers_allowed
from tests.strategies.test_report import STRATEGIES, listening

BATCH, EPOCHS = 4, 2
# Of two ranks, the last micro-batch has one sample, and one of them has none.
SAMPLES = 81
TOLERANCES = {"AdamW": 2e-5}


class Counts(LightningModule):
    """Notes the samples of each of this rank's micro-batches, by step."""

    def __init__(self, optimizer: str = "SGD", frequency: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer, self.frequency = optimizer, frequency
        self.steps: dict[int, list[list[int]]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.steps.setdefault(self.trainer.global_step, []).append(batch[0].tolist())
        return self.loss_of(batch)

    def loss_of(self, batch: list[Tensor]) -> Any:
        return (self.layers(batch[1]) - batch[2]).square().mean()

    def configure_optimizers(self) -> Any:
        arguments = {"momentum": 0.9} if self.optimizer == "SGD" else {"eps": 1e-4}
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01, **arguments)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        scheduled = {"scheduler": schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": scheduled}

    def validation_step(self, batch: list[Tensor]) -> None:
        assert batch

    def on_train_end(self) -> None:
        self.trained = [whole(parameter.detach()).clone() for parameter in self.parameters()]


class Tokens(Counts):
    """Its loss is a mean over tokens, of which samples have unequally many. Some ranks or steps may have no weight."""

    weighs: Callable[[Any], bool] = lambda self: True

    def loss_of(self, batch: list[Tensor]) -> Any:
        tokens = 1 + batch[0] % 5
        loss = ((self.layers(batch[1]) - batch[2]).square() * tokens[:, None]).sum() / tokens.sum()
        return {"loss": loss, "loss_weight": tokens.sum()} if self.weighs() else loss


class Reads(Counts):
    """Has the loaders made before the checkpoint is read."""

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


class ReadsLate(Counts):
    """Has the loaders made after the checkpoint is read, and before the loops continue."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class OneIsSlow(Counts):
    """A sample takes the last rank three times as long."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        slow = dist.get_rank() == dist.get_world_size() - 1
        time.sleep(len(batch[0]) * (0.012 if slow else 0.004))
        # Here the fast rank waits for the slow one.
        self.log("seen", float(len(batch[0])), sync_dist=True)
        self.all_gather(torch.zeros(1))
        return super().loss_of(batch)


MODULES: dict[str, Callable[[], Counts]] = {
    "SGD": Counts,
    "AdamW": lambda: Counts("AdamW"),
    "tokens": Tokens,
    "slow": OneIsSlow,
    "reads": Reads,
    "reads late": ReadsLate,
    "every second step": lambda: Counts(frequency=2),
}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    numbers = [torch.randn(SAMPLES, width, generator=generator) for width in (8, 1)]
    return TensorDataset(torch.arange(SAMPLES), *numbers)


def in_own_order(seed: int) -> Any:
    """A sampler that draws from a generator of its own."""
    return SubsetRandomSampler(range(SAMPLES), torch.Generator().manual_seed(seed))


def loader(batch_size: int = BATCH, **arguments: Any) -> DataLoader[Any]:
    shuffle = "sampler" not in arguments
    return DataLoader(dataset(), batch_size, shuffle=shuffle, **arguments)


class Trained(NamedTuple):
    """What a training ended with: parameters, the samples of each step of all ranks, and this rank's of each."""

    parameters: list[Tensor]
    samples: dict[int, list[int]]
    parts: list[list[int]]


def fit(strategy: Any, module: Any, data: Any, ckpt_path: str | None = None, val: Any = None, **more: Any) -> Trained:
    trainer = make_trainer(strategy, **{"max_epochs": EPOCHS, **more})
    with workers_allowed():
        trainer.fit(module, data, val, ckpt_path=ckpt_path)
    of_ranks: list[Any] = [module.steps]
    if strategy is not None:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, module.steps)
    # A rank without samples repeats one, which counts nothing.
    samples = {
        step: sorted({sample for one in of_ranks for batch in one.get(step, ()) for sample in batch})
        for step in of_ranks[0]
    }
    return Trained(module.trained, samples, [[len(batch) for batch in step] for step in module.steps.values()])


class Row(NamedTuple):
    """A training on unequal or changing ranks."""

    strategy: str
    shares: Any = "equal"
    module: str = "SGD"
    accumulate: int = 1
    ranks: int = 2
    seed: int | None = None
    loader: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def make(self) -> Any:
        keeps = self.shares == "equal"
        return STRATEGIES[self.strategy](rank_shares=self.shares, max_share=3, keep_global_batch=keeps)


ROWS = {
    "ddp_tuned": Row("ddp_tuned", [3, 1]),
    "zero1": Row("zero1_custom", [3, 1], accumulate=2),
    "zero2": Row("zero2_custom", [1, 1, 2], accumulate=3, ranks=3),
    "zero3": Row("zero3_custom", [1, 2, 0.5], accumulate=2, ranks=3),
    "AdamW": Row("ddp_tuned", [1, 3, 2], "AdamW", 2, 3),
    "AdamW, zero3": Row("zero3_custom", [1, 3], "AdamW", 2),
    "workers": Row("zero1_custom", [1, 3], loader={"num_workers": 2}),
    "the same workers": Row("ddp_tuned", [1, 3], loader={"num_workers": 2, "persistent_workers": True}),
    "a rest is dropped": Row("zero1_custom", [1, 2], loader={"drop_last": True}),
    "own order": Row("zero1_custom", [3, 1], seed=5),
    "loaders made in setup": Row("zero1_custom", [3, 1], "reads"),
    "loaders made for optimizers": Row("zero3_custom", [3, 1], "reads late"),
    "tokens": Row("zero1_custom", [3, 1], "tokens", 2),
    "tokens, zero3": Row("zero3_custom", [3, 1], "tokens", 2),
    "measured, zero3": Row("zero3_custom", "auto", "slow", 2),
    "kept": Row("zero1_custom", accumulate=2),
    "one rank": Row("zero1_custom", [2], ranks=1),
}
QUICK = ("ddp_tuned", "zero1", "zero3", "a rest is dropped", "own order", "loaders made in setup", "tokens")


def train_row(name: str) -> tuple[float, bool, list[list[int]]]:
    row = ROWS[name]
    own = {} if row.seed is None else {"sampler": in_own_order(row.seed)}
    actual = fit(row.make(), MODULES[row.module](), loader(**row.loader, **own), accumulate_grad_batches=row.accumulate)
    # One process for which a batch is a step.
    order: Any = DistributedSampler(dataset(), 1, 0, shuffle=True)
    if row.seed is not None:
        order = DistributedSamplerWrapper(in_own_order(row.seed), num_replicas=1, rank=0)
    whole_steps = loader(BATCH * row.ranks * row.accumulate, sampler=order, drop_last="drop_last" in row.loader)
    expected = fit(None, MODULES[row.module](), whole_steps)
    apart = distance(actual.parameters, expected.parameters)
    return apart, actual.samples == expected.samples and len(actual.samples) > 3, actual.parts


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ROWS))
def test_unequal_ranks_end_where_one_process_ends(pool: RankPool, name: str) -> None:
    row = ROWS[name]
    for rank, (apart, is_same, parts) in enumerate(pool.run(row.ranks, train_row, name)):
        assert is_same and apart <= TOLERANCES.get(row.module, 1e-6)
        if not isinstance(row.shares, str):
            assert parts[0][0] == round(BATCH * row.ranks * row.shares[rank] / sum(row.shares))


# "auto" measures ranks.


@looks_at_no_gradient
class Saves(Callback):
    """Saves where a function of the Trainer gives a path."""

    def __init__(self, path: Callable[[Trainer], str]) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if path := self.path(trainer):
            trainer.save_checkpoint(path)

    # The later one replaces the one after the last batch.
    on_validation_end = on_train_batch_end


def batches(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def train_measured(name: str, path: str) -> tuple[list[int], list[int], list[str]]:
    saves = Saves(lambda trainer: path if batches(trainer) == 36 else "")
    with listening() as lines:
        trained = fit(STRATEGIES[name](rank_shares="auto"), OneIsSlow(), loader(8), max_epochs=6, callbacks=[saves])
    bounded = STRATEGIES[name](rank_shares="auto", max_share=1.25)
    resumed = fit(bounded, OneIsSlow(), loader(8), path, max_epochs=7)
    return *([part for step in one.parts for part in step] for one in (trained, resumed)), lines


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero1_custom", STRATEGIES))
def test_a_rank_that_is_three_times_slower_gets_a_third(pool: RankPool, tmp_path: Path, name: str) -> None:
    (fast, resumed, lines), (slow, _, _) = pool.run(2, train_measured, name, str(tmp_path / "measured.ckpt"))
    assert fast[:4] == slow[:4] == [8] * 4
    last_whole = max(number for number in range(len(fast)) if fast[number] + slow[number] == 16)
    assert 11 <= fast[last_whole] <= 13
    # The checkpoint's shares are larger than `max_share` allows now.
    assert resumed[:2] == [8, 8] and max(resumed) <= 10
    *_, said = [line for line in lines if "Equal shares" in line]
    assert 1.3 < float(said.split("take ")[1].split(" ")[0]) < 2.2


# A training that resumes.

RESUMED = ("zero1", "zero3", "kept", "measured, zero3", "loaders made in setup", "loaders made for optimizers")


def train_and_resume(name: str, folder: str) -> list[bool]:
    row = ROWS[name]
    # Measured shares are kept from the second cut on.
    after, epochs = ((29, 31), 5) if row.shares == "auto" else ((2, 3, 7, 10, 11, 12), EPOCHS)
    fixed = {"accumulate_grad_batches": row.accumulate, "max_epochs": epochs}
    saves = Saves(lambda trainer: f"{folder}/{batches(trainer)}.ckpt" if batches(trainer) in after else "")
    uninterrupted, found = fit(row.make(), MODULES[row.module](), loader(), callbacks=[saves], **fixed), []
    for number in after:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The checkpoint was saved within an epoch")
            resumed = fit(row.make(), MODULES[row.module](), loader(), f"{folder}/{number}.ckpt", **fixed)
        left = {step: uninterrupted.samples[step] for step in resumed.samples}
        same_parts = resumed.parts == uninterrupted.parts[-len(resumed.parts) :]
        same = distance(resumed.parameters, uninterrupted.parameters) == 0
        found.append(same and resumed.samples == left and same_parts and len(left) > 1)
    return found


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("zero1", "kept", "loaders made in setup"), RESUMED))
def test_a_training_resumes_bit_for_bit(pool: RankPool, tmp_path: Path, name: str) -> None:
    for found in pool.run(ROWS[name].ranks, train_and_resume, name, str(tmp_path)):
        assert found and all(found)


# A training on as many ranks as there are.

# Ranks, and the step that they end after. Epochs have 6 steps of 12 samples. One phase resumes at an epoch's end.
PHASES = ((4, 3), (2, 5), (4, 6), (2, 8), (3, None))
OF_3 = 3
KEPT = {
    "zero1": Row("zero1_custom"),
    "zero3, divided": Row("zero3_custom", [1, 2, 1], "AdamW"),
    "saved after validation": Row("zero1_custom"),
    "the user accumulates more": Row("zero1_custom", accumulate=2),
    "own order": Row("zero1_custom", seed=5),
    "own order, zero3": Row("zero3_custom", [1, 2, 1], "AdamW", seed=5),
}


def train_phase(row: Row, folder: str, phase: int, validates: bool = False) -> Trained:
    ranks, last = PHASES[phase] if phase >= 0 else (4, None)
    shares = row.shares if ranks == OF_3 else "equal"
    own = {} if row.seed is None else {"sampler": in_own_order(row.seed)}
    return fit(
        STRATEGIES[row.strategy](keep_global_batch=True, rank_shares=shares),
        MODULES[row.module](),
        # No epoch ends with a step of less: `drop_last` keeps whole micro-batches of four ranks.
        loader(OF_3, drop_last=True, **own),
        f"{folder}/{phase - 1}.ckpt" if phase > 0 else None,
        val=loader() if validates else None,
        max_steps=last or -1,
        accumulate_grad_batches=row.accumulate if ranks == 2 else 1,
        callbacks=[Saves(lambda trainer: f"{folder}/{phase}.ckpt" if trainer.global_step == last else "")],
    )


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero1", KEPT))
def test_other_ranks_train_on_the_same_steps(pool: RankPool, tmp_path: Path, name: str) -> None:
    row, validates, samples = KEPT[name], "validation" in name, dict[int, list[int]]()
    (expected, *_) = pool.run(4, train_phase, row, str(tmp_path), -1)
    for phase, (ranks, _) in enumerate(PHASES):
        (trained, *_) = pool.run(ranks, train_phase, row, str(tmp_path), phase, validates)
        samples |= trained.samples
    assert samples == expected.samples and len(samples) == 12
    # 4 ranks of 3 samples became 3 of 2 + 2.
    assert row.shares != "equal" or trained.parts[-1] == [2, 2]
    assert distance(trained.parameters, expected.parameters) <= TOLERANCES.get(row.module, 1e-6)


COUNTED = {
    "every second step": "Lightning counts a scheduler's frequency=2",
    "reads": "`trainer.estimated_stepping_batches`",
}


def error_of_phase(row: Row, folder: str) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        train_phase(row, folder, 1)
    return str(caught.value)


@pytest.mark.parametrize("module", COUNTED)
def test_what_has_counted_batches_cannot_follow(pool: RankPool, tmp_path: Path, module: str) -> None:
    row = Row("zero1_custom", module=module)
    pool.run(4, train_phase, row, str(tmp_path), 0)
    for error in pool.run(2, error_of_phase, row, str(tmp_path)):
        assert f"changes accumulate_grad_batches from 1 to 2, and {COUNTED[module]}" in error


# What is refused.


class Refused(NamedTuple):
    """A part of the error, and the training that raises it."""

    error: str
    module: Any = Counts
    data: Callable[[], Any] = loader
    strategy: dict[str, Any] = {"rank_shares": [3, 1]}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012


def own(base: type[Any], **attributes: Any) -> Any:
    return type(f"Own{base.__name__}", (base,), attributes)


KEEPS = {"keep_global_batch": True}
REFUSED = {
    "three for two": Refused("has 3 numbers, and there are 2 ranks", strategy={"rank_shares": [1, 1, 1]}),
    "iterable": Refused("over ChainDataset", data=lambda: DataLoader(ChainDataset([dataset()]), BATCH)),
    "own batches": Refused(
        "the batch sampler OwnBatchSampler",
        data=lambda: DataLoader(
            dataset(), batch_sampler=own(BatchSampler)(DistributedSampler(dataset(), 2, 0), 4, False)
        ),
    ),
    "own ranks": Refused(
        "the sampler OwnDistributedSampler", data=lambda: loader(sampler=own(DistributedSampler)(dataset(), 2, 0))
    ),
    "own order": Refused("its own `generator`", data=lambda: loader(sampler=SubsetRandomSampler(range(SAMPLES)))),
    "unequal orders": Refused("the same seed", data=lambda: loader(sampler=in_own_order(dist.get_rank()))),
    "not distributed": Refused("Lightning's distributed", strategy=KEEPS, trainer={"use_distributed_sampler": False}),
    "draws itself": Refused("`dataloader_iter`", own(Counts, training_step=lambda self, dataloader_iter: None)),
    "by hand": Refused("automatic_optimization = True", own(Counts, automatic_optimization=False)),
    "scheduler": Refused(
        "GradientAccumulationScheduler",
        strategy=KEEPS,
        trainer={"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
    ),
    "two loaders": Refused("one training loader", data=lambda: [loader(), loader()]),
    "weights of one": Refused("on 1 of 2 ranks", own(Tokens, weighs=lambda self: self.global_rank == 0)),
    "late weights of one": Refused(
        "rank 0: `training_step` returned a `loss_weight` now and none before",
        own(Tokens, weighs=lambda self: self.global_rank == 0 and self.trainer.global_step > 0),
    ),
}


def train_refused(name: str) -> str:
    row = REFUSED[name]
    with pytest.raises((MisconfigurationException, InconsistentWeightsError)) as caught:
        fit(ZeRO1Strategy(**row.strategy, max_share=3), row.module(), row.data(), **row.trainer)
    return str(caught.value)


def test_what_cannot_be_divided_is_refused(pool: RankPool) -> None:
    for name, row in REFUSED.items():
        for error in pool.run(2, train_refused, name):
            assert row.error in error, name
