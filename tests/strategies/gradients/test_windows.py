"""Whatever cuts an accumulation window short, its step is the mean over what was there; or Lightning's, if wanted."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Regression, Sample, train_on_big_batches
from tests.strategies.gradients.trainings import KINDS, WEIGHTS, fit, kinds_of, ranks_batches, strategy
from tests.strategies.parity import make_trainer, whole

BATCHES = 8
Windows = Sequence[Sequence[int]]


class Steps(Regression):
    """Keeps the parameters after every optimizer step; gives None for a loss, or ends the epoch, where it is told to.

    Batches are counted over epochs.
    """

    def __init__(self, none_at: tuple[int, ...] = (), ends_at: int = -1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.none_at, self.ends_at = none_at, ends_at
        self.count = self.steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == self.ends_at and self.current_epoch == 0 else None

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.count += 1
        return None if self.count - 1 in self.none_at else super().training_step(batch, batch_idx)

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        nn.functional.mse_loss(self.network(batch.inputs), batch.targets)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step > self.steps:
            self.steps = self.trainer.global_step
            self.seen.append(torch.cat([whole(parameter.detach()).reshape(-1) for parameter in self.parameters()]))


class Endless(IterableDataset[Any]):
    """Nobody is told how long it is."""

    def __init__(self, batches: Sequence[Sample]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.batches)


class SavesOnce(Callback):
    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if args[-1] == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def train_scheduler() -> dict[str, Any]:
    return {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 2: 5})], "max_epochs": 3}


Case = tuple[Callable[[], dict[str, Any]], dict[str, Any], Windows, int]
WHOLE = [[0, 1, 2], [3, 4, 5], [6, 7]]
CASES: dict[str, Case] = {
    "scheduler": (train_scheduler, {}, [*[[i] for i in range(8)], *WHOLE, [0, 1, 2, 3, 4], [5, 6, 7]], 2),
    "limit": (lambda: {"accumulate_grad_batches": 3, "limit_train_batches": 5}, {}, [[0, 1, 2], [3, 4]], 2),
    "limit below a window": (lambda: {"accumulate_grad_batches": 3, "limit_train_batches": 2}, {}, [[0, 1]], 2),
    "unknown length": (lambda: {"accumulate_grad_batches": 3, "max_epochs": 2}, {"endless": True}, WHOLE * 2, 2),
    "max steps": (
        lambda: {"accumulate_grad_batches": 3, "max_steps": 4, "max_epochs": -1},
        {},
        [*WHOLE, [0, 1, 2]],
        2,
    ),
    "epoch ended": (
        lambda: {"accumulate_grad_batches": 3, "max_epochs": 2},
        {"ends_at": 4},
        [[0, 1, 2], *WHOLE],
        2,
    ),
    "none first": (lambda: {"accumulate_grad_batches": 3}, {"none_at": (3,)}, [[0, 1, 2], [4, 5], [6, 7]], 1),
    "none twice": (lambda: {"accumulate_grad_batches": 4}, {"none_at": (0, 1)}, [[2, 3], [4, 5, 6, 7]], 1),
    "none last": (lambda: {"accumulate_grad_batches": 3}, {"none_at": (5,)}, [[0, 1, 2], [3, 4], [6, 7]], 1),
    "validation inside": (
        lambda: {"accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 2, "num_sanity_val_steps": 0},
        {"validates": True},
        WHOLE * 2,
        2,
    ),
}


def trained(case: str, chosen: Any) -> list[Tensor]:
    make_arguments, options, _, _ = CASES[case]
    options = dict(options)
    batches = ranks_batches(BATCHES)[dist.get_rank()]
    validation = big_batch.loader(batches[:2]) if options.pop("validates", False) else None
    endless = options.pop("endless", False)
    loader = DataLoader(Endless(batches), batch_size=None) if endless else big_batch.loader(batches)
    module = Steps(**options)
    trainer = make_trainer(chosen, use_distributed_sampler=False, **make_arguments())
    trainer.fit(module, loader, validation)
    return module.seen


def windows(picked: Windows) -> list[list[Sample]]:
    data = ranks_batches(BATCHES)
    return [[rank[index] for index in window for rank in data] for window in picked]


def truth_and_lightning(kind: str, case: str) -> tuple[float, float]:
    exact = distance(trained(case, strategy(kind)), train_on_big_batches(windows(CASES[case][2])).parameters)
    stock = trained(case, DDPStrategy())
    return exact, distance(trained(case, strategy(kind, partial_window="lightning")), stock)


@pytest.mark.parametrize(("case", "kind"), kinds_of(CASES, "none last"))
def test_a_window_is_a_mean_over_what_it_has_or_as_lightning_has_it(pool: RankPool, case: str, kind: str) -> None:
    for exact, lightning in pool.run(CASES[case][3], truth_and_lightning, kind, case):
        assert exact <= 2e-6
        assert lightning <= 2e-6


def weighted_without_the_last(kind: str) -> float:
    batches = ranks_batches(BATCHES, WEIGHTS)[0]
    module = Steps(none_at=(2, 5), weighted=True)
    trainer = make_trainer(strategy(kind), use_distributed_sampler=False, accumulate_grad_batches=3)
    trainer.fit(module, big_batch.loader(batches))
    picked = [[0, 1], [3, 4], [6, 7]]
    return distance(module.seen, train_on_big_batches([[batches[i] for i in one] for one in picked]).parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_has_its_own_weights_where_its_last_backward_sent_nothing(pool: RankPool, kind: str) -> None:
    (apart,) = pool.run(1, weighted_without_the_last, kind)
    assert apart <= 2e-6


def resume_inside(kind: str, path: str) -> float:
    """Saved after the second of three micro-batches: what they had accumulated is not in the file."""
    batches = ranks_batches(BATCHES)[dist.get_rank()]
    whole = make_trainer(
        strategy(kind), use_distributed_sampler=False, accumulate_grad_batches=3, callbacks=[SavesOnce(path, 4)]
    )
    whole.fit(Steps(), big_batch.loader(batches))
    module = Steps()
    trainer = make_trainer(strategy(kind), use_distributed_sampler=False, accumulate_grad_batches=3, max_epochs=2)
    trainer.fit(module, big_batch.loader(batches), ckpt_path=path, weights_only=False)
    # It goes on at the begin of that window.
    truth = train_on_big_batches(windows([*WHOLE, *WHOLE]))
    return distance(module.seen, truth.parameters)


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_resumed_inside_of_a_window_it_has_all_of_it(pool: RankPool, tmp_path: Path, kind: str) -> None:
    assert worst(pool.run(2, resume_inside, kind, str(tmp_path / "a.ckpt"))) <= 2e-6


class Normalised(Steps):
    """Stochastic weight averaging makes an epoch without any backward for batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(self.network, nn.BatchNorm1d(2))


def averaged(kind: str, partial_window: str, module_class: type[Steps]) -> float:
    weights = []
    for chosen in (strategy(kind, partial_window=partial_window), DDPStrategy()):
        module = module_class()
        fit(
            module,
            chosen,
            BATCHES,
            accumulate_grad_batches=2 if partial_window == "exact" else 3,
            max_epochs=4,
            callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)],
        )
        weights.append(torch.cat([whole(tensor).double().reshape(-1) for tensor in module.state_dict().values()]))
    return distance(weights[:1], weights[1:])


@pytest.mark.parametrize(("module", "kind"), kinds_of([Steps, Normalised]))
def test_weights_are_averaged_as_under_ddp(pool: RankPool, kind: str, module: type[Steps]) -> None:
    for partial_window in ("exact", "lightning"):
        # Over full windows both are the same.
        assert worst(pool.run(2, averaged, kind, partial_window, module)) <= 2e-6


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


class Looks(Regression):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(plain_sgd, **arguments)
        self.after_backward: list[Tensor] = []
        self.before_step: list[Tensor] = []

    def gradient(self) -> Tensor:
        return torch.cat([whole(parameter.grad).reshape(-1) for parameter in self.parameters()]).clone()

    def on_after_backward(self) -> None:
        self.after_backward.append(self.gradient())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self.gradient())


def gradients_seen(kind: str, weighted: bool) -> tuple[float, float]:
    weights = (3.0, 0.0, 11.0, 512.0, 1.0) if weighted else (1.0,)
    data = ranks_batches(BATCHES, weights)
    module = Looks(weighted=weighted)
    trainer = make_trainer(strategy(kind), use_distributed_sampler=False, accumulate_grad_batches=3)
    trainer.fit(module, big_batch.loader(data[dist.get_rank()]))
    truth = train_on_big_batches([[rank[i] for i in w for rank in data] for w in WHOLE], optimizer=plain_sgd)
    start = torch.cat([whole(parameter.detach()).reshape(-1) for parameter in big_batch.network().parameters()])
    # Without momentum a step is the gradient.
    expected = [(a - b) / 0.5 for a, b in zip([start, *truth.parameters], truth.parameters, strict=False)]
    last = [module.after_backward[window[-1]] for window in WHOLE]
    return distance(last, expected), distance(module.before_step, expected)


@pytest.mark.parametrize("kind", ["ddp_tuned", "exposed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_hooks_see_the_gradient_of_the_big_batch(pool: RankPool, kind: str, weighted: bool) -> None:
    for after_backward, before_step in pool.run(2, gradients_seen, kind, weighted):
        assert after_backward <= 2e-6
        assert before_step <= 2e-6


def backwards_of_strategy(kind: str) -> int:
    with mock.patch.object(Strategy, "backward", autospec=True, side_effect=Strategy.backward) as called:
        fit(Regression(), strategy(kind), BATCHES)
    return called.call_count


def backwards_of_wrapped_strategy(kind: str) -> int:
    """As programs' tests count them: what wraps the class's method is the object's own."""
    chosen = strategy(kind)
    with mock.patch.object(Strategy, "backward", wraps=chosen.backward) as called:
        fit(Regression(), chosen, BATCHES)
    return called.call_count


@pytest.mark.parametrize("count", [backwards_of_strategy, backwards_of_wrapped_strategy])
@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_every_backward_goes_through_lightnings_strategy(pool: RankPool, kind: str, count: Any) -> None:
    assert pool.run(1, count, kind) == [BATCHES]
