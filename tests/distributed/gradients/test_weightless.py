"""A backward whose weight is 0 adds zeros to gradients, also where its loss is NaN."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.gradients.loss_weights import without_weightless
from tests.comparing import distance
from tests.distributed.engines import assert_shards_hold, backward, make_engine, sgd
from tests.pool import RankPool

ZEROS = {"0": 0.0, "tensor of 0": torch.tensor(0.0), "bfloat16 of 0": torch.tensor(0.0, dtype=torch.bfloat16)}
POSITIVE = {"none": None, "0.5": 0.5, "tensor of 0.5": torch.tensor(0.5)}


class Tagger(nn.Module):
    """One of its parameters is frozen, one is used twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4, sparse=sparse)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.shared = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(self.frozen(self.embedding(tokens)))))
        # Of a mask of zeros: 0 / 0.
        return (hidden.square() * mask[:, None]).sum() / mask.sum()


TOKENS = torch.tensor([3, 1, 3, 5])
SOME, NONE = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4)


def run_backward(module: nn.Module, mask: Tensor, factor: Any, guarded: bool = True) -> None:
    loss = module(TOKENS, mask)
    with without_weightless(module.parameters(), factor if guarded else None):
        (loss if factor is None else loss * factor).backward()


def gradients(module: nn.Module) -> list[Tensor]:
    trained = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    return [gradient.to_dense().clone() for gradient in trained if gradient is not None]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("mask", [NONE, SOME], ids=["NaN", "finite"])
@pytest.mark.parametrize("factor", ZEROS.values(), ids=ZEROS)
def test_gradients_stay_as_they_were(factor: Any, mask: Tensor, sparse: bool) -> None:
    module = Tagger(sparse)
    assert module(TOKENS, NONE).isnan()
    run_backward(module, SOME, 1.0)
    before = gradients(module)
    assert all(gradient.any() for gradient in before)
    run_backward(module, mask, factor)
    assert distance(gradients(module), before) == 0
    assert module.embedding.weight.grad.is_sparse is sparse


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("factor", ZEROS.values(), ids=ZEROS)
def test_the_first_backward_of_a_window_leaves_zeros(factor: Any, sparse: bool) -> None:
    module = Tagger(sparse)
    run_backward(module, NONE, factor)
    zeros = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
    assert distance(gradients(module), zeros) == 0


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("factor", POSITIVE.values(), ids=POSITIVE)
def test_whatever_weighs_is_as_without(factor: Any, sparse: bool) -> None:
    ours, theirs = Tagger(sparse), Tagger(sparse)
    run_backward(ours, SOME, factor)
    run_backward(theirs, SOME, factor, guarded=False)
    assert distance(gradients(ours), gradients(theirs)) == 0
    # A NaN that counts is the user's to see.
    run_backward(ours, NONE, factor)
    assert all(gradient.isnan().any() for gradient in gradients(ours))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("factor", ZEROS.values(), ids=ZEROS)
def test_gradients_keep_their_dtype(factor: Any, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    with without_weightless([parameter], factor):
        (parameter * math.nan).abs().sum().backward()
    assert torch.equal(parameter.grad, torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("factor", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("fails", [False, True], ids=["ended", "raised"])
def test_nothing_is_filtered_afterwards(fails: bool, factor: Any) -> None:
    module = Tagger()
    try:
        with without_weightless(module.parameters(), factor):
            if fails:
                raise RuntimeError("backward failed")
            module(TOKENS, NONE).backward()
    except RuntimeError:
        assert fails
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    module(TOKENS, NONE).backward()
    assert all(gradient.isnan().all() for gradient in gradients(module)[1:])


def expected_of_two(factor: float) -> list[Tensor]:
    """The mean of rank 0's gradients and of zeros."""
    module = Tagger()
    (module(TOKENS, SOME) * factor / 2).backward()
    return gradients(module)


def under_ddp(as_tensor: bool) -> None:
    factor: Any = [1.5, 0.0][dist.get_rank()]
    mask = [SOME, NONE][dist.get_rank()]
    module = Tagger()
    run_backward(DistributedDataParallel(module), mask, torch.tensor(factor) if as_tensor else factor)
    for gradient, expected in zip(gradients(module), expected_of_two(1.5), strict=True):
        torch.testing.assert_close(gradient, expected)


def in_shards(as_tensor: bool) -> None:
    factor: Any = [1.5, 0.0][dist.get_rank()]
    factor = torch.tensor(factor) if as_tensor else factor
    module = Tagger()
    engine = make_engine(module, sgd(module.parameters()))
    loss = module(TOKENS, [SOME, NONE][dist.get_rank()]) * factor
    with without_weightless(module.parameters(), factor):
        backward(engine, loss)
    engine.reducer.finish(engine.buckets)
    assert_shards_hold(engine, module, [*expected_of_two(1.5)])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("train", [under_ddp, in_shards])
def test_a_rank_without_weight_brings_zeros_into_the_mean(
    pool: RankPool, train: Callable[[bool], None], as_tensor: bool
) -> None:
    pool.run(2, train, as_tensor)
