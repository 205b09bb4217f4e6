"""Trainings whose samples are divided unequally, or whose ranks change, end where one process ends."""

import time
import warnings
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
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_parstrat.distributed.gradients.loss_weights import InconsistentWeightsError
from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.parity import looks_at_no_gradient, make_trainer, whole
from tests.strategies.test_dataloaders import workers_allowed
from tests.strategies.test_report import listening

CLASSES: dict[str, Any] = {
    "ddp_tuned": TunedDDPStrategy,
    "zero1_custom": ZeRO1Strategy,
    "zero2_custom": ZeRO2Strategy,
    "zero3_custom": ZeRO3Strategy,
}
BATCH, EPOCHS = 4, 2
# Of two ranks, the last micro-batch has one sample, and one of them has none.
SAMPLES = 81
TOLERANCES = {"SGD": 1e-6, "AdamW": 2e-5}


class Counts(LightningModule):
    """Notes the samples of each of this rank's micro-batches, by step."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = optimizer
        self.steps: dict[int, list[list[int]]] = {}
        self.trained: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.steps.setdefault(self.trainer.global_step, []).append(batch[0].tolist())
        return self.loss_of(batch)

    def loss_of(self, batch: list[Tensor]) -> Any:
        return (self.layers(batch[1]) - batch[2]).square().mean()

    def configure_optimizers(self) -> Any:
        arguments = {"momentum": 0.9} if self.optimizer == "SGD" else {"eps": 1e-4}
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01, **arguments)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch: list[Tensor]) -> None:
        assert batch

    def on_train_end(self) -> None:
        self.trained = [whole(parameter.detach()).clone() for parameter in self.parameters()]


class Tokens(Counts):
    """Its loss is a mean over tokens, of which samples have unequally many."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        tokens = 1 + batch[0] % 5
        loss = ((self.layers(batch[1]) - batch[2]).square() * tokens[:, None]).sum() / tokens.sum()
        return {"loss": loss, "loss_weight": tokens.sum()}


class Reads(Counts):
    """Has the loaders made before the checkpoint is read."""

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


class ReadsLate(Counts):
    """Has the loaders made after the checkpoint is read, and before the loops continue."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Draws(Counts):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class SomeWeights(Tokens):
    """Returns a weight on one rank."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        output = super().loss_of(batch)
        return output if self.global_rank == 0 else output["loss"]


class LateWeights(Tokens):
    """Returns no weight in the first step."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        output = super().loss_of(batch)
        return output if self.trainer.global_step else output["loss"]


class LateWeightsOfOne(LateWeights):
    """Returns no weight in the first step, and later on one rank."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        return super().loss_of(batch) if self.global_rank == 0 else Counts.loss_of(self, batch)


class OneIsSlow(Counts):
    """A sample takes the last rank three times as long."""

    def loss_of(self, batch: list[Tensor]) -> Any:
        slow = dist.get_rank() == dist.get_world_size() - 1
        time.sleep(len(batch[0]) * (0.012 if slow else 0.004))
        return super().loss_of(batch)


class ByHand(Counts):
    automatic_optimization = False


class EverySecondStep(ReadsLate):
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        configured["lr_scheduler"]["frequency"] = 2
        return configured


MODULES: dict[str, Any] = {
    "SGD": Counts,
    "AdamW": lambda: Counts("AdamW"),
    "tokens": Tokens,
    "slow": OneIsSlow,
    "reads": Reads,
    "reads late": ReadsLate,
}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    numbers = [torch.randn(SAMPLES, width, generator=generator) for width in (8, 1)]
    return TensorDataset(torch.arange(SAMPLES), *numbers)


def loader(batch_size: int = BATCH, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size, **{"shuffle": True, **arguments})


class Trained(NamedTuple):
    """What a training ended with: parameters, the samples of each step of all ranks, steps, lines that were logged."""

    parameters: list[Tensor]
    samples: dict[int, list[int]]
    parts: list[list[int]]
    trainer: Trainer


def fit(
    strategy: Any, module: Any, data: Any, ckpt_path: str | None = None, val: Any = None, **arguments: Any
) -> Trained:
    trainer = make_trainer(strategy, **{"max_epochs": EPOCHS, **arguments})
    with workers_allowed():
        trainer.fit(module, data, val, ckpt_path=ckpt_path)
    of_ranks: list[Any] = [module.steps]
    if strategy is not None:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, module.steps)
    samples = {
        step: sorted(sample for one in of_ranks for batch in one.get(step, ()) for sample in batch)
        for step in of_ranks[0]
    }
    parts = [[len(batch) for batch in step] for step in module.steps.values()]
    return Trained(module.trained, samples, parts, trainer)


def in_own_order() -> Any:
    """A sampler that draws from a generator of its own."""
    return SubsetRandomSampler(range(SAMPLES), torch.Generator().manual_seed(5))


def one_process(module: Any, step: int, drop_last: bool = False, sampler: Any = None) -> Trained:
    """What the ranks have to end with: a batch is a step."""
    if sampler is None:
        sampler = DistributedSampler(dataset(), 1, 0, shuffle=True)
    else:
        sampler = DistributedSamplerWrapper(sampler, num_replicas=1, rank=0)
    return fit(None, module, DataLoader(dataset(), step, sampler=sampler, drop_last=drop_last))


class Row(NamedTuple):
    """A training on unequal ranks."""

    strategy: str
    ranks: int
    shares: Any
    module: str = "SGD"
    accumulate: int = 1
    arguments: dict[str, Any] = {}  # noqa: RUF012  (never changed)


ROWS = {
    "ddp_tuned": Row("ddp_tuned", 2, [3, 1]),
    "zero1": Row("zero1_custom", 2, [3, 1], accumulate=2),
    "zero2": Row("zero2_custom", 3, [1, 1, 2], accumulate=3),
    "zero3": Row("zero3_custom", 3, [1, 2, 0.5], accumulate=2),
    "AdamW": Row("zero1_custom", 2, [3, 1], "AdamW"),
    "AdamW, zero3": Row("zero3_custom", 2, [1, 3], "AdamW", 2),
    "AdamW, ddp_tuned": Row("ddp_tuned", 3, [1, 3, 2], "AdamW", 2),
    "workers": Row("zero1_custom", 2, [1, 3], arguments={"num_workers": 2}),
    "the same workers": Row("ddp_tuned", 2, [1, 3], arguments={"num_workers": 2, "persistent_workers": True}),
    "own order": Row("zero1_custom", 2, [3, 1], arguments={"shuffle": False, "sampler": in_own_order}),
    "loaders made in setup": Row("zero1_custom", 2, [3, 1], "reads"),
    "loaders made for optimizers": Row("zero3_custom", 2, [3, 1], "reads late"),
    "tokens": Row("zero1_custom", 2, [3, 1], "tokens", 2),
    "tokens, zero3": Row("zero3_custom", 2, [3, 1], "tokens", 2),
    "measured": Row("zero1_custom", 2, "auto", "slow"),
    "measured, zero3": Row("zero3_custom", 2, "auto", "slow", 2),
    "one rank": Row("zero1_custom", 1, [2]),
}


QUICK = ("ddp_tuned", "zero1", "zero3", "own order", "loaders made in setup", "tokens")


def train_row(name: str) -> tuple[float, bool, list[list[int]]]:
    row = ROWS[name]
    step = BATCH * row.ranks * row.accumulate
    sampler = row.arguments.get("sampler")
    expected = one_process(MODULES[row.module](), step, sampler=None if sampler is None else sampler())
    strategy = CLASSES[row.strategy](rank_shares=row.shares, max_share=3)
    data = loader(**{**row.arguments, "sampler": None if sampler is None else sampler()})
    actual = fit(strategy, MODULES[row.module](), data, accumulate_grad_batches=row.accumulate)
    apart = distance(actual.parameters, expected.parameters)
    # A rank without samples repeats one, which counts nothing.
    repeated = {number: sorted(set(samples)) for number, samples in actual.samples.items()}
    return apart, repeated == expected.samples and len(repeated) > 3, actual.parts


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, ROWS))
def test_unequal_ranks_end_where_one_process_ends(pool: RankPool, name: str) -> None:
    row = ROWS[name]
    for rank, (apart, is_same, parts) in enumerate(pool.run(row.ranks, train_row, name)):
        assert is_same and apart <= TOLERANCES.get(row.module, 1e-6)
        if row.shares != "auto":
            assert parts[0][0] == round(BATCH * row.ranks * row.shares[rank] / sum(row.shares))


def test_a_rest_is_dropped_as_one_process_drops_it(pool: RankPool) -> None:
    assert pool.run(2, train_and_drop) == [(True, True)] * 2


def train_and_drop() -> tuple[bool, bool]:
    expected = one_process(Counts(), BATCH * 2, drop_last=True)
    actual = fit(ZeRO1Strategy(rank_shares=[1, 2]), Counts(), loader(drop_last=True))
    return actual.samples == expected.samples, distance(actual.parameters, expected.parameters) <= 1e-6


# "auto" measures ranks.


def train_measured(name: str, path: str) -> tuple[list[int], list[int], list[str]]:
    with listening() as lines:
        trained = fit(CLASSES[name](rank_shares="auto"), OneIsSlow(), loader(8), max_epochs=6)
    trained.trainer.save_checkpoint(path)
    bounded = CLASSES[name](rank_shares="auto", max_share=1.25)
    resumed = fit(bounded, OneIsSlow(), loader(8), path, max_epochs=7)
    parts, parts_resumed = ([part for step in one.parts for part in step] for one in (trained, resumed))
    return parts, parts_resumed, lines


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero1_custom", CLASSES))
def test_a_rank_that_is_three_times_slower_gets_a_third(pool: RankPool, tmp_path: Path, name: str) -> None:
    (fast, resumed, lines), (slow, _, _) = pool.run(2, train_measured, name, str(tmp_path / "measured.ckpt"))
    assert fast[:4] == slow[:4] == [8] * 4
    last_whole = max(number for number in range(len(fast)) if fast[number] + slow[number] == 16)
    assert 11 <= fast[last_whole] <= 13
    # The checkpoint's shares are larger than `max_share` allows now.
    assert resumed[:2] == [8, 8] and max(resumed) <= 10
    said = [line for line in lines if "Equal shares" in line]
    # After a cut that changes shares, and at the end.
    assert len(said) >= 2 and all(1.3 < float(line.split("take ")[1].split(" ")[0]) < 2.2 for line in said)


# A training that resumes.


@looks_at_no_gradient
class Saves(Callback):
    """Saves after some micro-batches, within a window, too, or after a step."""

    def __init__(self, folder: str, after: Any, name: Any = None) -> None:
        self.folder, self.after, self.name = folder, after, name

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if self.name is None and batches in self.after:
            trainer.save_checkpoint(f"{self.folder}/{batches}.ckpt")
        self.on_validation_end(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        # The later one replaces the one after the last batch.
        if self.name is not None and trainer.global_step == self.after:
            trainer.save_checkpoint(f"{self.folder}/{self.name}.ckpt")


RESUMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "ddp_tuned": ("ddp_tuned", {"rank_shares": [3, 1]}, "slow"),
    "zero1": ("zero1_custom", {"rank_shares": [3, 1]}, "slow"),
    "zero3": ("zero3_custom", {"rank_shares": [3, 1]}, "slow"),
    "measured": ("zero1_custom", {"rank_shares": "auto"}, "slow"),
    "measured, ddp_tuned": ("ddp_tuned", {"rank_shares": "auto"}, "slow"),
    "kept": ("zero1_custom", {"keep_global_batch": True}, "slow"),
    "loaders made in setup": ("zero1_custom", {"rank_shares": [3, 1]}, "reads"),
    "loaders made for optimizers": ("zero1_custom", {}, "reads late"),
}


def train_and_resume(name: str, folder: str) -> list[bool]:
    strategy, arguments, module = RESUMED[name]
    measured = arguments.get("rank_shares") == "auto"
    # Measured shares are kept from the second cut on.
    after = (29, 31) if measured else (2, 3, 10, 11, 14)
    fixed: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 5 if measured else EPOCHS}

    def train(ckpt_path: str | None, **more: Any) -> Trained:
        arguments_of_trainer = {**fixed, **more}
        return fit(CLASSES[strategy](**arguments), MODULES[module](), loader(), ckpt_path, **arguments_of_trainer)

    uninterrupted = train(None, callbacks=[Saves(folder, after)])
    found = []
    for number in after:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The checkpoint was saved within an epoch")
            resumed = train(f"{folder}/{number}.ckpt")
        left = {step: uninterrupted.samples[step] for step in resumed.samples}
        same_parts = resumed.parts == uninterrupted.parts[-len(resumed.parts) :]
        same = distance(resumed.parameters, uninterrupted.parameters) == 0
        found.append(same and resumed.samples == left and same_parts and len(left) > 1)
    return found


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("zero1", "kept", "loaders made in setup"), RESUMED))
def test_a_training_resumes_bit_for_bit(pool: RankPool, tmp_path: Path, name: str) -> None:
    for found in pool.run(2, train_and_resume, name, str(tmp_path)):
        assert found and all(found)


# A training on as many ranks as there are.

# Ranks, and the step that they end after. Epochs have 6 steps of 12 samples. One phase resumes at an epoch's end.
PHASES = ((4, 3), (2, 5), (4, 6), (2, 8), (3, None))
OF_3 = 3


class KeptRow(NamedTuple):
    """A training of several phases."""

    strategy: str
    shares: Any = "equal"
    optimizer: str = "SGD"
    validates: bool = False
    accumulates: bool = False


KEPT = {
    "zero1": KeptRow("zero1_custom"),
    "ddp_tuned": KeptRow("ddp_tuned"),
    "zero3": KeptRow("zero3_custom"),
    "zero3, divided": KeptRow("zero3_custom", [1, 2, 1], "AdamW"),
    "saved after validation": KeptRow("zero1_custom", validates=True),
    "the user accumulates more": KeptRow("zero1_custom", accumulates=True),
}


def train_phase(name: str, folder: str, phase: int) -> Trained:
    row, (ranks, last) = KEPT[name], PHASES[phase] if phase >= 0 else (4, None)
    shares = row.shares if ranks == OF_3 else "equal"
    before = f"{folder}/{phase - 1}.ckpt" if phase > 0 else None
    # No epoch ends with a step of less: `drop_last` keeps whole micro-batches of four ranks.
    data = loader(OF_3, drop_last=True)
    trained = fit(
        CLASSES[row.strategy](keep_global_batch=True, rank_shares=shares),
        Counts(row.optimizer),
        data,
        before,
        val=loader() if row.validates else None,
        max_steps=last or -1,
        accumulate_grad_batches=2 if row.accumulates and ranks == 2 else 1,
        callbacks=[Saves(folder, last or -1, phase)],
    )
    return trained._replace(trainer=None)


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero1", KEPT))
def test_other_ranks_train_on_the_same_steps(pool: RankPool, tmp_path: Path, name: str) -> None:
    (expected, *_) = pool.run(4, train_phase, name, str(tmp_path), -1)
    samples: dict[int, list[int]] = {}
    for phase, (ranks, _) in enumerate(PHASES):
        (trained, *_) = pool.run(ranks, train_phase, name, str(tmp_path), phase)
        samples |= trained.samples
    assert samples == expected.samples and len(samples) == 12
    # 4 ranks of 3 samples became 3 of 2 + 2.
    assert KEPT[name].shares != "equal" or trained.parts[-1] == [2, 2]
    assert distance(trained.parameters, expected.parameters) <= TOLERANCES[KEPT[name].optimizer]


# What is refused.


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(dataset())


def of_own_ranks() -> DataLoader[Any]:
    class Own(DistributedSampler[Any]):
        pass

    return DataLoader(dataset(), BATCH, sampler=Own(dataset(), 2, 0))


def of_own_order() -> DataLoader[Any]:
    return DataLoader(dataset(), BATCH, sampler=SubsetRandomSampler(range(SAMPLES)))


def of_unequal_orders() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return DataLoader(dataset(), BATCH, sampler=SubsetRandomSampler(range(SAMPLES), generator))


def of_batches() -> DataLoader[Any]:
    class Own(BatchSampler):
        pass

    return DataLoader(dataset(), batch_sampler=Own(DistributedSampler(dataset(), 2, 0), BATCH, False))


SCHEDULED = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
# What the training has: arguments of the strategy and of the Trainer, the module, the loader; and a part of the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any, str]] = {
    "three for two": ({"rank_shares": [1, 1, 1]}, {}, Counts, loader, "has 3 numbers, and there are 2 ranks"),
    "iterable": ({"rank_shares": "auto"}, {}, Counts, lambda: DataLoader(Endless(), BATCH), "over Endless"),
    "own batches": ({"rank_shares": [3, 1]}, {}, Counts, of_batches, "the batch sampler Own"),
    "own ranks": ({"rank_shares": [3, 1]}, {}, Counts, of_own_ranks, "the sampler Own"),
    "own order": ({"rank_shares": [3, 1]}, {}, Counts, of_own_order, "Give SubsetRandomSampler its own `generator`"),
    "unequal orders": ({"rank_shares": [3, 1]}, {}, Counts, of_unequal_orders, "the same seed on all ranks"),
    "draws itself": ({"rank_shares": [3, 1]}, {}, Draws, loader, "`dataloader_iter`"),
    "not distributed": (
        {"keep_global_batch": True},
        {"use_distributed_sampler": False},
        *(Counts, loader, "Lightning's distributed sampler"),
    ),
    "by hand": ({"rank_shares": [3, 1]}, {}, ByHand, loader, "automatic_optimization = True"),
    "scheduler": ({"keep_global_batch": True}, SCHEDULED, Counts, loader, "GradientAccumulationScheduler"),
    "two loaders": ({"rank_shares": [3, 1]}, {}, Counts, lambda: [loader(), loader()], "one training loader"),
    "some weights": ({"rank_shares": [3, 1]}, {}, SomeWeights, loader, "on some ranks and none on others"),
    "late weights": ({"rank_shares": [3, 1]}, {}, LateWeights, loader, "now and none before"),
    "of one": ({"rank_shares": [3, 1]}, {}, LateWeightsOfOne, loader, "rank 0: `training_step` returned a"),
}


def train_refused(name: str) -> str:
    arguments, of_trainer, module, data, _ = REFUSED[name]
    with pytest.raises((MisconfigurationException, InconsistentWeightsError)) as caught:
        fit(ZeRO1Strategy(**arguments, max_share=3), module(), data(), **of_trainer)
    return str(caught.value)


def test_what_cannot_be_divided_is_refused(pool: RankPool) -> None:
    for name, row in REFUSED.items():
        for error in pool.run(2, train_refused, name):
            assert row[-1] in error, name


RESUMES_REFUSED = {
    EverySecondStep: "changes accumulate_grad_batches from 1 to 2, and Lightning counts a scheduler's frequency=2",
    Reads: "changes accumulate_grad_batches from 1 to 2, and `trainer.estimated_stepping_batches`",
}


def resume_refused(module: Any, folder: str) -> str:
    ranks = dist.get_world_size()
    path = f"{folder}/refused.ckpt"
    arguments: dict[str, Any] = {"max_steps": 2 if ranks == 3 else 4}
    strategy = ZeRO1Strategy(keep_global_batch=True)
    if ranks == 3:
        fit(strategy, module(), loader(), **arguments).trainer.save_checkpoint(path)
        return ""
    with pytest.raises(MisconfigurationException) as caught:
        fit(strategy, module(), loader(), path, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("module", RESUMES_REFUSED)
def test_what_has_counted_batches_cannot_follow(pool: RankPool, tmp_path: Path, module: Any) -> None:
    pool.run(3, resume_refused, module, str(tmp_path))
    for error in pool.run(2, resume_refused, module, str(tmp_path)):
        assert RESUMES_REFUSED[module] in error
