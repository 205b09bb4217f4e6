"""Weights of micro-batches: their total over ranks, the messages that it takes, and errors that come on all ranks."""

import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.gradients.loss_weights import (
    InconsistentWeightsError,
    LossWeights,
    _HostCopy,
    watch_gradients,
)
from tests.pool import RankPool

# An error that only one rank knows of shows as a rank that waits.
SOON = 20.0
Steps = list[list[list[Any]]]
"""Weights by step, micro-batch and rank."""


class Weighed:
    """Weights, and the messages that they ride in: one is launched before every total."""

    def __init__(self) -> None:
        self.messages = ControlMessages(make_collectives(process_groups().control, torch.device("cpu")))
        self.weights = LossWeights(self.messages)
        self._sent_before = small_reductions_of(self.messages.control.group)

    @property
    def sent(self) -> int:
        return small_reductions_of(self.messages.control.group) - self._sent_before

    def total(self) -> float:
        self.messages.launch()
        return self.weights.total()


def check_no_weights() -> None:
    weighed = Weighed()
    for number in range(5):
        weighed.weights.begin_window()
        assert weighed.weights.add(number % 2, None) is None
        assert not weighed.weights.used
        # Asked once and never again.
        assert weighed.sent == int(dist.get_world_size() > 1)
    # One that appears later is an error there, and no rank waits.
    if dist.get_rank() == 0:
        with pytest.raises(InconsistentWeightsError, match="returned a `loss_weight` now and none before"):
            weighed.weights.add(1, 1.0)
    assert weighed.sent == int(dist.get_world_size() > 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_nobody_gives_weights_ranks_ask_once(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, check_no_weights, timeout=SOON)


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


# Each on the second of two ranks.
NO_WEIGHTS = (
    *(-1, math.nan, math.inf, -math.inf, "many", "3", [1.0], 2j, 10**400),
    *(torch.tensor([1.0, 2.0]), torch.empty(0), torch.tensor(math.nan), torch.tensor([-2]), torch.tensor(2j)),
)
BEFORE = "`training_step` returned a `loss_weight` before and none now. Return it in every step"
INVALID = "rank 1: Invalid loss_weight: "
# Weights, where the error comes, and how it begins on both ranks, or a part of it on each.
FAILURES: list[tuple[Steps, str, tuple[str, str]]] = [
    # Ranks agree at the very first micro-batch, and then once per step.
    *(([[[2, bad], [2, 2]]], "step 0, micro-batch 0", (INVALID, INVALID)) for bad in NO_WEIGHTS),
    *(([[[2, 2], [2, 2]], [[2, bad], [2, 2]]], "step 1, total", (INVALID, INVALID)) for bad in NO_WEIGHTS),
    *(
        ([[[some, None]]], "step 0, micro-batch 0", ("on 1 of 2 ranks; this one did. ", "this one did not. "))
        for some in (0, 1)
    ),
    ([[[1, 1], [1, None]]], "step 0, total", (f"rank 1: {BEFORE}",) * 2),
    ([[[1, 1]], [[None, 1]]], "step 1, total", (f"rank 0: {BEFORE}",) * 2),
    ([[[1, 1]], [[None, None]]], "step 1, total", (f"rank 0: {BEFORE}", f"rank 1: {BEFORE}")),
    # Where the reference is still asked for.
    ([[[0, 0], [0, None]]], "step 0, micro-batch 1", (f"rank 1: {BEFORE}",) * 2),
    ([[[0, 0]], [[None, None]]], "step 1, micro-batch 0", (f"rank 0: {BEFORE}", f"rank 1: {BEFORE}")),
]


def test_what_is_no_weight_or_missing_is_an_error_on_all_ranks(pool: RankPool) -> None:
    for steps, expected, messages in FAILURES:
        for (where, message), words in zip(pool.run(2, failure, steps, timeout=SOON), messages, strict=True):
            assert where == expected and words in message, steps


class OnDevice(_HostCopy):
    """As on a GPU: the losses are multiplied by a tensor, and the host asks for the number later."""

    def __init__(self, weight: float) -> None:
        self.on_device, self._value = torch.tensor(weight), weight


def nan_on_a_device(weight: float, sparse: bool) -> str:
    """The error of a window whose second micro-batch has NaN gradients on the last rank, and this weight there."""
    weighed, module = Weighed(), nn.Embedding(4, 3, sparse=sparse)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(LossWeights, "_read", lambda _, weight: OnDevice(weight)):
        for number, own in enumerate((2.0, weight if is_last else 1.0)):
            factor = weighed.weights.add(number, own, functools.partial(watch_gradients, module.parameters()))
            assert isinstance(factor, torch.Tensor)
            (module(torch.tensor([1, 1])).sum() * (math.nan if number and is_last else 1.0) * factor).backward()
            weighed.weights.end_backward()
    try:
        weighed.total()
    except InconsistentWeightsError as error:
        return str(error)
    return ""


def test_nan_without_a_weight_on_a_device_is_an_error_on_all_ranks(pool: RankPool) -> None:
    for weight, sparse in ((0.0, False), (0.0, True), (5.0, False)):
        for message in pool.run(2, nan_on_a_device, weight, sparse):
            # A NaN that counts is the user's to see.
            assert message.startswith("rank 1: The gradients of a micro-batch" if weight == 0 else "")
            assert bool(message) == (weight == 0)
