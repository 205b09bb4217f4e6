"""Whose gradients are not finite: seen by each rank alone, told to all."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.gradients.nonfinite import (
    Leaf,
    NonfiniteGradientError,
    NonfiniteTracker,
    raise_nonfinite,
)
from tests.distributed.engines import backward, make_engine, sgd
from tests.pool import RankPool

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def control() -> Collectives:
    return make_collectives(process_groups().control, torch.device("cpu"))


class Branches(nn.Module):
    """Each of its parameters has for gradient what it was multiplied by."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in ("one", "two", "three"):
            setattr(self, name, nn.Parameter(torch.ones(5, dtype=dtype)))

    def forward(self, **factors: Any) -> Tensor:
        return torch.stack([(getattr(self, name) * factor).sum().real for name, factor in factors.items()]).sum()


def tracker_of(module: nn.Module) -> NonfiniteTracker:
    return NonfiniteTracker(Leaf(name, one, one) for name, one in module.named_parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_are_named_whose_gradients_are_not_finite(dtype: torch.dtype, position: int, value: float) -> None:
    module = Branches(dtype)
    tracker = tracker_of(module)
    spoil = torch.ones(5, dtype=dtype)
    spoil[position] = value
    module(one=1.0, two=spoil, three=2.0).backward()
    assert tracker.nonfinite() == ["two"]


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(5, dtype=dtype))
    tracker = NonfiniteTracker([Leaf("weight", parameter, parameter)])
    # Their sum, and their squares, are not.
    largest = torch.finfo(dtype).max
    parameter.backward(torch.tensor([largest, largest, -largest, largest, largest], dtype=dtype))
    assert tracker.nonfinite() == []


def test_a_backward_that_was_not_finite_is_remembered_until_told_to_forget() -> None:
    module = Branches()
    tracker = tracker_of(module)
    module(one=1.0, two=math.inf).backward()
    # Accumulates onto it; what did not take part again is still known.
    module(one=1.0, three=1.0).backward()
    module(two=1.0).backward()
    assert tracker.nonfinite() == ["two"]
    module(one=-math.inf).backward()
    assert sorted(tracker.nonfinite()) == ["one", "two"]
    # A step later.
    module.zero_grad()
    tracker.forget({module.one})
    assert tracker.nonfinite() == ["two"]
    tracker.forget(set(module.parameters()))
    assert tracker.nonfinite() == []
    module(two=1.0, three=math.nan).backward()
    assert tracker.nonfinite() == ["three"]


def test_a_gradient_that_was_taken_away_is_remembered() -> None:
    """As where each micro-batch's gradients are sent, and added up elsewhere."""
    module = Branches()
    tracker = tracker_of(module)
    for factor in (math.nan, 1.0):
        module(two=factor).backward()
        module.zero_grad()
    assert tracker.nonfinite() == ["two"]


def test_what_accumulates_beyond_the_largest_number_is_seen() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    tracker = NonfiniteTracker([Leaf("weight", parameter, parameter)])
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    parameter.backward(largest)
    assert tracker.nonfinite() == []
    parameter.backward(largest)
    assert tracker.nonfinite() == ["weight"]


def test_a_frozen_parameter_is_looked_at_once_it_is_trained() -> None:
    module = Branches()
    module.two.requires_grad_(False)
    counter = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    tracker = NonfiniteTracker(Leaf(name, one, one) for name, one in (*module.named_parameters(), ("counter", counter)))
    assert [module.one.requires_grad, module.two.requires_grad, counter.requires_grad] == [True, False, False]
    module(one=1.0, two=math.nan).backward()
    assert module.two.grad is None
    assert tracker.nonfinite() == []
    module.two.requires_grad_(True)
    module(one=1.0, two=math.nan).backward()
    assert tracker.nonfinite() == ["two"]


@pytest.mark.parametrize("tokens", [[1, 3, 1], []], ids=["rows", "no rows"])
def test_sparse_gradients_are_looked_at_where_they_are(tokens: list[int]) -> None:
    module = nn.Embedding(6, 4, sparse=True)
    tracker = tracker_of(module)
    rows = module(torch.tensor(tokens, dtype=torch.int64))
    rows.sum().backward(retain_graph=True)
    assert module.weight.grad.is_sparse
    assert tracker.nonfinite() == []
    # Of one row, given in two parts, each of which is finite.
    rows.backward(torch.full_like(rows, 2e38))
    assert tracker.nonfinite() == (["weight"] if tokens else [])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_parameters_without_elements_are_finite(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.empty(shape))
    tracker = NonfiniteTracker([Leaf("empty", parameter, parameter)])
    (parameter * math.nan).sum().backward()
    assert parameter.grad is not None
    assert tracker.nonfinite() == []


def test_a_gradient_that_a_users_hook_has_taken_away_is_not_missed() -> None:
    module = Branches()
    module.one.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    tracker = tracker_of(module)
    module(one=math.nan).backward()
    assert module.one.grad is None
    assert tracker.nonfinite() == []


def test_a_witness_that_was_removed_leaves_nothing_behind() -> None:
    module = Branches()
    module.two.requires_grad_(False)
    seen: list[str] = []
    module.one.register_post_accumulate_grad_hook(lambda _: seen.append("the user's"))
    tracker = tracker_of(module)
    module(one=math.nan).backward()
    assert tracker.nonfinite() == ["one"]
    tracker.remove()
    assert tracker.nonfinite() == []
    module.two.requires_grad_(True)
    module(one=math.nan, two=math.nan).backward()
    assert tracker.nonfinite() == []
    assert seen == ["the user's"] * 2
    assert [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()] == [1, 0, 0]


def seen_before_the_sum(kind: str) -> tuple[list[str], list[bool]]:
    """The names that this rank has seen; and of all parameters, whether their gradients are finite after the sum."""
    module = Branches()
    factors = {"one": 1.0, "two": [1.0, math.nan][dist.get_rank()], "three": 2.0}
    tracker = tracker_of(module) if kind == "ddp around it" else None
    if kind == "shards":
        engine = make_engine(module, sgd(module.parameters()))
        tracker = tracker_of(module)
        with engine.no_sync():
            backward(engine, module(**{**factors, "two": 1.0}))
        backward(engine, module(**factors))
        with engine.full_gradients():
            return tracker.nonfinite(), [bool(parameter.grad.isfinite().all()) for parameter in module.parameters()]
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=kind == "ddp with views")
    tracker = tracker or tracker_of(module)
    with wrapped.no_sync():
        wrapped(**{**factors, "two": 1.0}).backward()
    wrapped(**factors).backward()
    return tracker.nonfinite(), [bool(parameter.grad.isfinite().all()) for parameter in module.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "ddp with views", "ddp around it", "shards"])
def test_a_rank_sees_its_own_gradients_before_they_are_summed(pool: RankPool, kind: str) -> None:
    after = [True, False, True]
    assert pool.run(2, seen_before_the_sum, kind) == [([], after), (["two"], after)]


def one_says(flags: list[bool]) -> tuple[bool, int]:
    collectives = control()
    return any_rank(flags[dist.get_rank()], collectives), collectives.traffic.small_reductions


@pytest.mark.parametrize(
    "flags", [[False], [True], [False, False], [False, True], [True, False], [True] * 3, [False, False, True]], ids=str
)
def test_all_ranks_learn_what_any_says(pool: RankPool, flags: list[bool]) -> None:
    ranks = len(flags)
    assert pool.run(ranks, one_says, flags) == [(any(flags), int(ranks > 1))] * ranks


def raised(names: list[list[str]]) -> str:
    try:
        raise_nonfinite(names[dist.get_rank()], "in epoch 3, batch 14", control())
    except NonfiniteGradientError as error:
        return str(error)
    return "no error"


OVERFLOWED = "in no rank's own backward: their sum over ranks overflowed, or a hook has made them so"


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        ([["a"]], ["rank 0: a"]),
        ([[]], [OVERFLOWED]),
        ([[], []], [OVERFLOWED]),
        ([[], ["net.0.weight", "net.0.bias"]], ["rank 1: net.0.weight, net.0.bias"]),
        ([list("abcde"), list("abcdef")], ["rank 0: a, b, c, d, e", "rank 1: a, b, c, d, e and 1 more"]),
        ([list("abcdefgh"), [], ["x"]], ["rank 0: a, b, c, d, e and 3 more", "rank 2: x"]),
    ],
    ids=["alone", "alone, nobody", "nobody", "one of two", "five and six", "not the second"],
)
def test_all_ranks_raise_the_same_with_the_names_of_each(
    pool: RankPool, names: list[list[str]], lines: list[str]
) -> None:
    first, *others = pool.run(len(names), raised, names)
    head, *listed, tail = first.splitlines()
    assert head == "Gradients are not finite in epoch 3, batch 14:"
    assert listed == [f"  {line}" for line in lines]
    assert tail.startswith("Parameters and optimizer state are as before this step. nonfinite_grads='skip'")
    assert others == [first] * len(others)
