"""A loss with a weight counts for as much of its window; one without any does not count, whatever it came to."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.distributed.gradients.loss_weights import LossWeights, without_weightless
from lightning_parstrat.strategies.gradients import precision
from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.gradients import big_batch
from tests.strategies.gradients.big_batch import Regression, Sample, train_on_big_batches, windows_of
from tests.strategies.gradients.trainings import WEIGHTS, differences, fit, kinds_of, ranks_batches, strategy
from tests.strategies.parity import largest_difference, make_trainer, train, whole, zero1

BATCHES = 8


class Masked(Regression):
    """The mean over what is not padding: 0 / 0 where all is. ``kind_of`` turns the weight into what is returned."""

    def __init__(self, kind_of: Callable[[float], Any] = float) -> None:
        super().__init__(weighted=True)
        self.kind_of = kind_of

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] * batch.weight / torch.tensor(batch.weight)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return {"loss": loss, "loss_weight": self.kind_of(batch.weight), "extra": batch_idx}


class Outputs(Callback):
    """What others are shown as the loss."""

    def __init__(self) -> None:
        self.returned: list[float] = []
        self.logged: list[float] = []
        self.extra: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.returned.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["loss"]))
        self.extra.append(outputs["extra"])


def number(weight: float) -> Any:
    return int(weight)


def tensor(weight: float) -> Any:
    return torch.tensor(weight)


def one_element(weight: float) -> Any:
    return torch.tensor([int(weight)])


def half(weight: float) -> Any:
    return torch.tensor(weight, dtype=torch.bfloat16)


def with_graph(weight: float) -> Any:
    return torch.tensor(weight, requires_grad=True) * 1


def of_numpy(weight: float) -> Any:
    return numpy.float32(weight)


def array(weight: float) -> Any:
    return numpy.array(weight)


def masked(kind: str, kind_of: Any, accumulate: int) -> tuple[tuple[float, float], list[float], list[float], int]:
    data = ranks_batches(BATCHES, WEIGHTS)
    module, outputs = Masked(kind_of), Outputs()
    fit(module, strategy(kind), BATCHES, accumulate_grad_batches=accumulate, callbacks=[outputs])
    truth = train_on_big_batches(windows_of(data, accumulate))
    assert outputs.extra == list(range(BATCHES))
    nans = sum(sample.weight == 0 for sample in data[dist.get_rank()])
    return differences(module, truth, accumulate, BATCHES), outputs.returned, outputs.logged, nans


OTHER_WEIGHTS = [number, one_element, half, with_graph, of_numpy, array]


@pytest.mark.parametrize(
    ("kind_of", "kind"),
    [*kinds_of([float, tensor]), *((kind_of, "zero1") for kind_of in OTHER_WEIGHTS)],
)
def test_a_loss_that_is_nan_without_weight_does_not_count_and_the_users_loss_stays(
    pool: RankPool, kind: str, kind_of: Any
) -> None:
    for accumulate in (1, 3):
        for (parameters, _), returned, logged, nans in pool.run(2, masked, kind, kind_of, accumulate):
            assert parameters <= 2e-6
            assert sum(map(math.isnan, returned)) == sum(map(math.isnan, logged)) == nans > 0
            # Lightning hands on what it divides by the window's length, and logs what the user has logged.
            assert [loss * accumulate for loss in returned] == pytest.approx(logged, nan_ok=True)


_ADD = LossWeights.add


def add_on_device(self: LossWeights, *of_micro_batch: Any) -> Any:
    """As if weights were on a GPU, where the host is given no number."""
    return torch.tensor(_ADD(self, *of_micro_batch))


def masked_on_device(kind: str, arguments: dict[str, Any], accumulate: int) -> tuple[float, set[int]]:
    """How far parameters are from the truth's, and of how many parameters each is filtered."""
    filtered = set()

    def filter_each(parameters: Iterable[Tensor], factor: Any) -> Any:
        parameters = list(parameters)
        filtered.add(len(parameters))
        return without_weightless(parameters, factor)

    data = ranks_batches(BATCHES, WEIGHTS)
    module = Masked()
    with (
        mock.patch.object(LossWeights, "add", add_on_device),
        mock.patch.object(precision, "without_weightless", filter_each),
    ):
        fit(module, strategy(kind, **arguments), BATCHES, accumulate_grad_batches=accumulate)
    truth = train_on_big_batches(windows_of(data, accumulate))
    return differences(module, truth, accumulate, BATCHES)[0], filtered


ON_DEVICE: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "every micro-batch is sent": ("zero1", {}, 1, False),
    "and shown": ("exposed", {}, 1, False),
    "micro-batches add up in shards": ("zero2", {}, 3, False),
    "micro-batches add up on every rank": ("zero1", {}, 3, True),
    "parameters are named": ("zero1", {"nonfinite_grads": "raise"}, 1, True),
    "ddp_tuned": ("ddp_tuned", {}, 3, True),
}


@pytest.mark.parametrize(("kind", "arguments", "accumulate", "each"), ON_DEVICE.values(), ids=ON_DEVICE)
def test_weights_that_only_the_device_knows(
    pool: RankPool, kind: str, arguments: dict[str, Any], accumulate: int, each: bool
) -> None:
    for parameters, filtered in pool.run(2, masked_on_device, kind, arguments, accumulate):
        assert parameters <= 2e-6
        # Each parameter's gradient alone only where there is no bucket of this micro-batch's gradients to filter.
        assert (max(filtered) > 0) is each


class LossIn16Bits(Masked):
    """As in a training in bf16-true, whose loss is in bf16."""

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"].bfloat16()}


def weighed_in_16_bits(on_device: bool) -> list[Tensor]:
    module = LossIn16Bits()
    with mock.patch.object(LossWeights, "add", add_on_device if on_device else _ADD):
        fit(module, strategy("zero1"), BATCHES)
    return [parameter.detach().clone() for parameter in module.parameters()]


def difference_of_a_weight_on_the_device() -> float:
    return distance(weighed_in_16_bits(True), weighed_in_16_bits(False))


def test_a_loss_in_16_bits_is_weighed_by_a_number_on_the_device_as_by_one_on_the_host(pool: RankPool) -> None:
    assert max(pool.run(2, difference_of_a_weight_on_the_device)) <= 2e-6


def weightless(kind: str, accumulate: int) -> tuple[float, int, list[str]]:
    weights = (1.0, 2.0, 4.0, 0.0, 0.0, 0.0, 3.0, 5.0)
    data = [big_batch.samples(BATCHES, seed=rank, weights=weights) for rank in range(dist.get_world_size())]
    module = Masked()
    chosen = strategy(kind)
    trainer = make_trainer(
        chosen, use_distributed_sampler=False, accumulate_grad_batches=accumulate, gradient_clip_val=0.2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, big_batch.loader(data[dist.get_rank()]))
    truth = train_on_big_batches(windows_of(data, accumulate), 0.2)
    said = [str(one.message) for one in caught if "loss_weight" in str(one.message)]
    return differences(module, truth, accumulate, BATCHES)[0], chosen.skipped_steps, said


@pytest.mark.parametrize(("accumulate", "kind"), kinds_of([1, 3]))
def test_a_window_without_any_weight_is_skipped_and_told_of(pool: RankPool, kind: str, accumulate: int) -> None:
    skipped = 3 // accumulate
    for rank, (difference, counted, said) in enumerate(pool.run(2, weightless, kind, accumulate)):
        assert difference <= 2e-6
        assert counted == skipped
        assert len(said) == (skipped if rank == 0 else 0)


class ByHand(Regression):
    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted=weighted)
        self.automatic_optimization = False

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(output["loss"] if self.weighted else output)
        self.optimizers().step()
        return output


def by_hand(kind: str) -> tuple[float, list[str]]:
    seen = []
    said: list[str] = []
    for weighted in (True, False):
        module = ByHand(weighted)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(strategy(kind), use_distributed_sampler=False).fit(
                module, big_batch.loader(ranks_batches(BATCHES, WEIGHTS)[dist.get_rank()])
            )
        seen.append(module.seen)
        said += [str(one.message) for one in caught if "loss_weight" in str(one.message)]
    return distance(*seen), said


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_manual_optimization_is_told_once_that_weights_have_no_effect(pool: RankPool, kind: str) -> None:
    for rank, (difference, said) in enumerate(pool.run(2, by_hand, kind)):
        assert difference == 0.0
        assert len(said) == (rank == 0)
        assert all("manual optimization" in one for one in said)


def end_of(chosen: Any, weighted: bool, accumulate: int) -> Tensor:
    module = Silent(weighted=weighted)
    trainer = make_trainer(
        chosen,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        precision="bf16-mixed",
        max_epochs=3,
        limit_train_batches=6,
    )
    trainer.fit(module, big_batch.loader(ranks_batches(BATCHES, WEIGHTS)[dist.get_rank()]))
    return torch.cat([whole(parameter.detach()).reshape(-1) for parameter in module.parameters()])


class Silent(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        """Lightning's own strategies know no norm."""


def distances_from_truth(kind: str, accumulate: int) -> tuple[float, float]:
    """Of a training with weights in bf16-mixed, and of Lightning's own without any."""
    alike, weighted = (
        train_on_big_batches(
            windows_of([rank[:6] for rank in ranks_batches(BATCHES, weights)], accumulate) * 3
        ).parameters[-1]
        for weights in ((1.0,), WEIGHTS)
    )
    ours = end_of(strategy(kind), True, accumulate)
    stock = end_of(DDPStrategy(), False, accumulate)
    return float((ours - weighted).norm()), float((stock - alike).norm())


@pytest.mark.parametrize(("accumulate", "kind"), kinds_of([1, 3]))
def test_weights_cost_no_precision_in_bf16(pool: RankPool, kind: str, accumulate: int) -> None:
    for ours, stock in pool.run(2, distances_from_truth, kind, accumulate):
        assert 0 < ours <= 2 * stock


class LooksAtTheLoss(torch.optim.SGD):
    """Cannot do without its closure, and keeps what that has come to."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.losses: list[float] = []

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        self.losses.append(float(loss))
        super().step()
        return loss


def losses_for_the_optimizer(kind: str, weighted: bool) -> tuple[list[float], list[tuple[float, float]]]:
    """What the optimizer was told, and this rank's losses with their weights."""
    module = Masked() if weighted else Regression()
    module.optimizer = LooksAtTheLoss
    own: list[tuple[float, float]] = []
    module.on_train_batch_end = lambda out, batch, _: own.append((float(out["loss"]), batch.weight))  # type: ignore
    trainer = fit(module, strategy(kind), BATCHES)
    return trainer.strategy.optimizers[0].losses, own


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_optimizer_that_needs_the_loss_gets_its_mean_over_ranks(pool: RankPool, kind: str, weighted: bool) -> None:
    ranks = pool.run(2, losses_for_the_optimizer, kind, weighted)
    pairs = zip(*(own for _, own in ranks), strict=True)
    expected = [
        sum(weight * loss for loss, weight in pair if weight) / sum(weight for _, weight in pair) for pair in pairs
    ]
    for told, _ in ranks:
        assert told == pytest.approx(expected, rel=1e-6)


class OwnPreBackward(Precision):
    """Of a user, who sees no need to ask the base class."""

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return tensor


class OwnPostBackward(Precision):
    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return tensor.detach()


class WeighedByLength(zoo.MLP):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        kept = 1 + (batch_idx + dist.get_rank()) % 4
        return {"loss": self.compute_loss(batch[:kept]), "loss_weight": float(kept)}


def beside_the_usual_plugin(name: str, plugin: type[Precision], accumulate: int) -> float:
    runs = [
        train(WeighedByLength, by_flag(name), accumulate_grad_batches=accumulate, precision=precision)
        for precision in (None, plugin())
    ]
    return largest_difference(*runs)


def by_flag(name: str) -> Any:
    return TunedDDPStrategy() if name == "ddp_tuned" else zero1()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("plugin", [OwnPreBackward, OwnPostBackward])
@pytest.mark.parametrize("name", ["ddp_tuned", "zero1_custom"])
def test_a_precision_plugin_of_the_users_changes_nothing(
    pool: RankPool, name: str, plugin: type[Precision], accumulate: int
) -> None:
    assert pool.run(2, beside_the_usual_plugin, name, plugin, accumulate) == [0.0, 0.0]
