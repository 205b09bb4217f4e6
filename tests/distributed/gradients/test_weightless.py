"""A backward whose weight is 0 adds zeros to gradients, also where its loss is NaN."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parstrat.distributed.gradients.loss_weights import weightless, without_weightless
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
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


class Kernels(TorchDispatchMode):
    """Counts operators that may keep a NaN from a sum, in backward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("where", "masked_fill_", "mul_"):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def weighed_backward(engine: ShardedDataParallel, module: nn.Module, mask: Tensor, factor: float) -> set[str]:
    """As a strategy runs it with a weight that only the device knows; the names of what is filtered when packed."""
    on_device = torch.tensor(factor)
    loss = module(TOKENS, mask) * on_device
    packed = engine.prepare_backward(loss, None, weightless(on_device))
    with without_weightless([one for one in module.parameters() if one not in packed], on_device):
        loss.backward()
    return {name for name, parameter in module.named_parameters() if parameter in packed and parameter.requires_grad}


EVERYTHING = {"embedding.weight", "shared.weight", "shared.bias"}


def filtered_by_bucket(world_size: int, exposes: bool) -> None:
    """The last rank has no weight: what it has is filtered by one kernel for each bucket, and not one a parameter."""
    last = dist.get_rank() == world_size - 1
    module = Tagger()
    engine = make_engine(module, sgd(module.parameters()), bucket_cap_mb=1)
    engine.expose_gradients(exposes)
    with Kernels() as kernels:
        packed = weighed_backward(engine, module, NONE if last else SOME, 0.0 if last else 1.5)
        engine.reducer.finish(engine.buckets)
    sent = [bucket for bucket in engine.buckets if bucket.has_gradients]
    assert packed == EVERYTHING and len(sent) == 1
    assert kernels.counted["masked_fill_"] == 1 and not kernels.counted["where"]
    weighs = Tagger()
    (weighs(TOKENS, SOME) * 1.5 * (world_size - 1) / world_size).backward()
    assert_shards_hold(engine, module, gradients(weighs))


@pytest.mark.parametrize("exposes", [False, True], ids=["", "exposed"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_device_alone_knows_is_filtered_by_bucket(pool: RankPool, world_size: int, exposes: bool) -> None:
    pool.run(world_size, filtered_by_bucket, world_size, exposes)


def accumulated(in_shards: bool) -> list[set[str]]:
    """Two micro-batches: on rank 0 the last one has no weight, on rank 1 the first."""
    rank = dist.get_rank()
    module = Tagger()
    engine = make_engine(module, sgd(module.parameters()), bucket_cap_mb=1)
    assert engine.accumulate_in_shards(in_shards) is in_shards
    masks, factors = ([SOME, NONE], [1.5, 0.0]) if rank == 0 else ([NONE, SOME], [0.0, 2.5])
    with engine.no_sync():
        first = weighed_backward(engine, module, masks[0], factors[0])
    last = weighed_backward(engine, module, masks[1], factors[1])
    engine.reducer.finish(engine.buckets)
    weighs = Tagger()
    (weighs(TOKENS, SOME) * (1.5 + 2.5) / 2).backward()
    assert_shards_hold(engine, module, gradients(weighs))
    return [first, last]


@pytest.mark.parametrize("in_shards", [False, True], ids=["on every rank", "in shards"])
def test_what_came_before_stays(pool: RankPool, in_shards: bool) -> None:
    # In `param.grad` it would be dropped with what is filtered when packed.
    expected = [EVERYTHING, EVERYTHING] if in_shards else [set(), set()]
    assert pool.run(2, accumulated, in_shards) == [expected] * 2


def test_a_step_without_weight_moves_parameters_unless_it_is_left_out() -> None:
    """Why the host waits for the weights: zeros are no reason for an optimizer to leave parameters as they are."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert (parameter != before).all() and optimizer.state[parameter]["step"] == 2
