"""Weights of micro-batches: the mean they make, what ranks ask of each other for it, and errors that none waits for."""

import copy
import math
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parstrat.core.accumulation import reference_weight
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.gradients.loss_weights import (
    InconsistentWeightsError,
    LossWeights,
    WindowWeight,
    _HostCopy,
    _Look,
)
from tests.pool import RankPool

CPU = torch.device("cpu")
# An error that only one rank knows of shows as a rank that waits.
SOON = 20.0
Steps = list[list[list[Any]]]
"""Weights by step, micro-batch and rank."""


class Step(NamedTuple):
    factors: list[Any]
    total: tuple[float, float]
    reductions: list[int]
    """Of this rank so far, after every micro-batch and after the total."""


def control_messages() -> ControlMessages:
    return ControlMessages(make_collectives(process_groups().control, CPU))


class Weighed:
    """Weights, and the messages that they ride in: one is launched before every total."""

    def __init__(self) -> None:
        self.messages = control_messages()
        self.weights = LossWeights(self.messages)

    @property
    def sent(self) -> int:
        return self.messages.control.traffic.small_reductions

    def total(self) -> WindowWeight:
        self.messages.launch()
        return self.weights.total()


def weigh(steps: Steps) -> list[Step]:
    weighed, found = Weighed(), []
    weights, rank = weighed.weights, dist.get_rank()
    for step in steps:
        weights.begin_window()
        factors, reductions = [], []
        for number, micro_batch in enumerate(step):
            factors.append(weights.add(number, micro_batch[rank]))
            reductions.append(weighed.sent)
        total = tuple(weighed.total())
        found.append(Step(factors, total, [*reductions, weighed.sent]))
    assert weights.used
    return found


def random_steps(world_size: int, seed: int) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(micro_batches, world_size, generator=generator, dtype=torch.float64) * size).tolist()
        for micro_batches, size in ((3, 10.0), (3, 4000.0), (1, 0.01), (2, 1.0))
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_factors_are_weights_over_a_shared_reference_and_the_total_is_over_all_ranks(
    pool: RankPool, world_size: int
) -> None:
    steps = random_steps(world_size, world_size)
    per_step = [[weight for micro_batch in step for weight in micro_batch] for step in steps]
    # The first step goes by what the ranks' first micro-batches weigh, others by the step before.
    means = [sum(steps[0][0]) / world_size, *(sum(weights) / len(weights) for weights in per_step[:-1])]
    for rank, found in enumerate(pool.run(world_size, weigh, steps)):
        sent = 0
        for number, (step, taken) in enumerate(zip(steps, found, strict=True)):
            reference = reference_weight(means[number])
            assert taken.factors == [micro_batch[rank] / reference for micro_batch in step]
            assert taken.total == (pytest.approx(sum(per_step[number]), rel=1e-14), reference)
            first = sent + int(number == 0 and world_size > 1)
            sent = first + int(world_size > 1)
            assert taken.reductions == [first] * len(step) + [sent]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_reference_is_agreed_on_as_soon_as_anything_weighs(pool: RankPool, world_size: int) -> None:
    nothing, something = [0] * world_size, [0] * (world_size - 1) + [48 * world_size]
    # Nothing in the first step, and not at first in the second.
    steps = [[nothing, nothing], [nothing, something, something], [something]]
    for rank, (first, second, third) in enumerate(pool.run(world_size, weigh, steps)):
        own = something[rank]
        assert first.factors == [0.0, 0.0]
        assert first.total[0] == 0.0
        assert second.factors == [0.0, own / 64, own / 64]
        assert second.total == (96 * world_size, 64.0)
        # What two of three micro-batches weigh on average.
        assert third == ([own / 32], (48 * world_size, 32.0), third.reductions)
        if world_size > 1:
            # It is asked for by every micro-batch until it is known, and by none after that.
            assert [first.reductions, second.reductions, third.reductions] == [[1, 2, 3], [4, 5, 5, 6], [6, 7]]


KINDS = {
    "int": 3,
    "float": 3.0,
    "bool": True,
    "numpy float32": np.float32(3),
    "numpy int64": np.int64(3),
    "0-d int64": torch.tensor(3),
    "0-d bool": torch.tensor(True),
    "0-d bfloat16": torch.tensor(3.0, dtype=torch.bfloat16),
    "1 element": torch.tensor([3.0]),
    "1 by 1": torch.tensor([[3]], dtype=torch.int32),
}


def weigh_all_kinds() -> list[Step]:
    return [step for weight in KINDS.values() for step in weigh([[[weight, 5], [5, weight]]])]


def test_whatever_is_a_number_is_a_weight(pool: RankPool) -> None:
    for rank, steps in enumerate(pool.run(2, weigh_all_kinds)):
        for (kind, weight), step in zip(KINDS.items(), steps, strict=True):
            value = float(weight)
            reference = reference_weight((value + 5) / 2)
            assert step.factors == [value / reference, 5 / reference][:: 1 - 2 * rank], kind
            # Nothing of the user's is kept, nor multiplied into the loss.
            assert {type(factor) for factor in step.factors} == {float}, kind
            assert step.total == (2 * (value + 5), reference), kind


def sent_by_nobody() -> list[tuple[float, int]]:
    weighed, found = Weighed(), []
    for step in (1.0, 2.0):
        weighed.weights.begin_window()
        weighed.weights.add(0, step)
        if step == 1.0:
            weighed.messages.launch()
        # It is later than the message, if there was one.
        weighed.weights.add(1, 10 * step)
        found.append((weighed.weights.total().weight, weighed.messages.launched))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_no_message_has_told_is_told_by_the_total(pool: RankPool, world_size: int) -> None:
    found = [(11.0 * world_size, 2), (22.0 * world_size, 3)]
    assert pool.run(world_size, sent_by_nobody) == [found] * world_size


def replaced_and_forgotten() -> None:
    weighed = Weighed()
    weights = weighed.weights
    ranks, rank = dist.get_world_size(), dist.get_rank()
    assert not weights.used
    assert weights.add(1, 4) == 1.0
    assert weights.used
    # A closure evaluated again, with another batch even.
    assert weights.add(2, 100 * rank) == 25 * rank
    assert weights.add(2, 12) == 3.0
    assert weighed.total() == (16 * ranks, 4.0)
    assert weights.reference == 8.0
    weights.begin_window()
    assert weights.add(1, 2) == 0.25
    assert weighed.total() == (2 * ranks, 8.0)
    weights.begin_window()
    # A step to which this rank adds nothing, nor another.
    assert weighed.total() == (0.0, 2.0)
    assert weights.reference == 2.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_micro_batch_again_replaces_and_a_new_window_forgets(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, replaced_and_forgotten)


def never_weighed(micro_batches: int) -> list[int]:
    weighed, sent = Weighed(), []
    weights = weighed.weights
    for number in range(micro_batches):
        weights.begin_window()
        assert weights.add(number % 2, None) is None
        assert not weights.used
        sent.append(weighed.sent)
    return sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trainings_without_weights_ask_once_and_never_again(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, never_weighed, 5) == [[int(world_size > 1)] * 5] * world_size


def failure(steps: Steps) -> tuple[str, str]:
    """Where the error came, and its message."""
    weighed = Weighed()
    where = "nowhere"
    try:
        for number, step in enumerate(steps):
            weighed.weights.begin_window()
            for micro_batch, by_rank in enumerate(step):
                where = f"step {number}, micro-batch {micro_batch}"
                weighed.weights.add(micro_batch, by_rank[dist.get_rank()])
            where = f"step {number}, total"
            weighed.total()
    except InconsistentWeightsError as error:
        return where, str(error)
    return "nowhere", ""


NO_WEIGHTS = {
    "negative": -1,
    "NaN": math.nan,
    "infinite": math.inf,
    "negative infinite": -math.inf,
    "word": "many",
    "digits": "3",
    "list": [1.0],
    "complex": 2j,
    "too large for a float": 10**400,
    "two elements": torch.tensor([1.0, 2.0]),
    "no elements": torch.empty(0),
    "NaN tensor": torch.tensor(math.nan),
    "negative tensor": torch.tensor([-2]),
    "complex tensor": torch.tensor(2j),
}


def failures() -> dict[tuple[str, int], tuple[str, str]]:
    """Of a bad weight on the last rank, in the first step and in the second."""
    good = [2.0] * dist.get_world_size()
    found = {}
    for name, weight in NO_WEIGHTS.items():
        bad = [*good[1:], weight]
        # The ranks meet at the very first micro-batch, and then once per step.
        found[name, 0] = failure([[bad, good]])
        found[name, 1] = failure([[good, good], [bad, good]])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_no_weight_is_an_error_on_all_ranks(pool: RankPool, world_size: int) -> None:
    *others, culprit = pool.run(world_size, failures, timeout=SOON)
    for (name, step), (where, message) in culprit.items():
        assert where == ("step 0, micro-batch 0" if step == 0 else "step 1, total"), name
        assert message.startswith(f"rank {world_size - 1}: Invalid loss_weight: "), name
        # All say the same.
        for other in others:
            assert other[name, step] == (where, message), name


BEFORE = "returned a `loss_weight` before and none now. Return it in every step"
MISSING: list[tuple[Steps, str, list[str]]] = [
    ([[[1, None]]], "step 0, micro-batch 0", ["on 1 of 2 ranks; this one did. ", "this one did not. "]),
    ([[[0, None]]], "step 0, micro-batch 0", ["on 1 of 2 ranks; this one did. ", "this one did not. "]),
    ([[[1, 1], [1, None]]], "step 0, total", [f"rank 1: `training_step` {BEFORE}"] * 2),
    ([[[1, 1]], [[None, 1]]], "step 1, total", [f"rank 0: `training_step` {BEFORE}"] * 2),
    ([[[1, 1]], [[None, None]]], "step 1, total", [BEFORE, BEFORE]),
    # Where the reference is still asked for.
    ([[[0, 0], [0, None]]], "step 0, micro-batch 1", [f"rank 1: `training_step` {BEFORE}"] * 2),
    ([[[0, 0]], [[None, None]]], "step 1, micro-batch 0", [BEFORE, BEFORE]),
]


def missing() -> list[tuple[str, str]]:
    return [failure(steps) for steps, _, _ in MISSING]


def test_a_weight_that_is_missing_is_an_error_on_all_ranks(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(2, missing, timeout=SOON)):
        for (where, message), (steps, expected, messages) in zip(found, MISSING, strict=True):
            assert where == expected, steps
            assert messages[rank] in message, steps


def appears(ranks: list[int]) -> str:
    weighed = Weighed()
    weighed.weights.add(0, None)
    sent = weighed.sent
    try:
        weighed.weights.add(1, 1.0 if dist.get_rank() in ranks else None)
    except InconsistentWeightsError as error:
        return str(error)
    finally:
        assert weighed.sent == sent
    return ""


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
def test_a_weight_that_appears_later_is_an_error_where_it_does_and_nobody_waits(
    pool: RankPool, ranks: list[int]
) -> None:
    for rank, message in enumerate(pool.run(2, appears, ranks, timeout=SOON)):
        assert ("returned a `loss_weight` now and none before" in message) == (rank in ranks)


class OnDevice(_HostCopy):
    """A weight that the host does not know before it asks."""

    def __init__(self, weight: float, weights: LossWeights) -> None:
        self.on_device = torch.tensor(weight)
        self._weights = weights

    def __float__(self) -> float:
        return self._weights.checked(float(self.on_device))


# Of a parameter, the gradient that a backward leaves.
PARAMETERS: dict[str, nn.Module] = {
    "dense": nn.Linear(3, 1, bias=False),
    "sparse": nn.Embedding(4, 3, sparse=True),
    "bfloat16": nn.Linear(3, 1, bias=False, dtype=torch.bfloat16),
    "complex": nn.Linear(3, 1, bias=False, dtype=torch.complex64),
}


def looked_at(kind: str, weight: float, gradient: float, on_device: bool) -> str:
    """The error of a window whose second micro-batch has such gradients on the last rank."""
    weighed = Weighed()
    module = copy.deepcopy(PARAMETERS[kind])
    parameters = [*module.parameters(), nn.Parameter(torch.ones(2), requires_grad=False)]
    read = (lambda self, weight: OnDevice(weight, self)) if on_device else LossWeights._read
    with mock.patch.object(LossWeights, "_read", read):
        for number, (own_weight, own_gradient) in enumerate([(2.0, 1.0), (weight, gradient), (3.0, 1.0)]):
            if dist.get_rank() < dist.get_world_size() - 1:
                own_weight, own_gradient = 1.0, 1.0
            factor = weighed.weights.add(number, own_weight, lambda: parameters)
            inputs = torch.tensor([1, 1]) if kind == "sparse" else torch.ones(2, 3, dtype=parameters[0].dtype)
            (module(inputs).real.float().sum() * own_gradient * factor).backward()
            weighed.weights.end_backward()
    assert not parameters[0]._backward_hooks
    try:
        weighed.total()
    except InconsistentWeightsError as error:
        return str(error)
    return ""


def all_looked_at() -> dict[tuple[str, float, float, bool], str]:
    cases = product(PARAMETERS, (0.0, 5.0), (1.0, math.nan), (False, True))
    return {case: looked_at(*case) for case in cases}


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_without_weight_must_be_finite(pool: RankPool, world_size: int) -> None:
    for found in pool.run(world_size, all_looked_at):
        for case, message in found.items():
            _, weight, gradient, _ = case
            # A NaN that counts is the user's to see.
            wrong = weight == 0 and math.isnan(gradient)
            assert message.startswith(f"rank {world_size - 1}: The gradients of a micro-batch") == wrong, case
            assert ("`mask.sum().clamp(min=1)`" in message) == wrong == bool(message), case


def waits_for_gradients(weight: Any) -> int:
    weighed = Weighed()
    parameter = nn.Parameter(torch.ones(3))
    read = (lambda self, weight: OnDevice(weight, self)) if weight is None else LossWeights._read
    with mock.patch.object(LossWeights, "_read", read), mock.patch.object(_Look, "is_finite") as asked:
        for number in range(2):
            weighed.weights.add(number, weight or 2.0, lambda: [parameter])
            weighed.weights.end_backward()
        weighed.total()
    return asked.call_count


def test_nobody_waits_for_gradients_where_everything_weighs(pool: RankPool) -> None:
    for weight in (3.0, None):
        assert pool.run(2, waits_for_gradients, weight) == [0, 0]
