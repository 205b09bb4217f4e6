"""Norms and clipping of gradients in shards and on every rank, against torch's on the whole."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.gradients.clipping import (
    clip_gradients_by_value,
    gradient_norm,
    scale_to_norm,
    step_gradients,
)
from tests.distributed.engines import backward, make_engine, sgd
from tests.pool import RankPool

NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
SHAPES = ((7, 5), (3,), (), (4, 4), (2, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
UNUSED = 1
"""The index of a parameter that has no gradient."""


def network(shapes: Sequence[tuple[int, ...]] = SHAPES, dtypes: Sequence[torch.dtype] = DTYPES[:1]) -> nn.ParameterList:
    return nn.ParameterList(torch.ones(shape, dtype=dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes))


def gradients_on(module: nn.ParameterList, rank: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in module]
    return [None if index == UNUSED else gradient for index, gradient in enumerate(drawn)]


def loss_of(module: nn.ParameterList) -> Tensor:
    """Has the gradients of this rank."""
    pairs = zip(module, gradients_on(module, dist.get_rank()), strict=True)
    return torch.stack([(p.conj() * g).sum().real.double() for p, g in pairs if g is not None]).sum()


def whole(module: nn.ParameterList) -> list[nn.Parameter]:
    """Parameters in double precision with the mean over ranks for gradients, of those that have any."""
    ranks = range(dist.get_world_size())
    wide = [torch.complex128 if p.is_complex() else torch.float64 for p in module]
    by_rank = [gradients_on(module, rank) for rank in ranks]
    found = []
    for dtype, gradients in zip(wide, zip(*by_rank, strict=True), strict=True):
        if gradients[0] is not None:
            found.append(nn.Parameter(torch.zeros_like(gradients[0], dtype=dtype)))
            found[-1].grad = torch.stack([gradient.to(dtype) for gradient in gradients]).mean(0)
    return found


class Trained(NamedTuple):
    """After a backward. Gradients of ``optimizers`` are those of all of ``module``."""

    module: nn.ParameterList
    optimizers: list[Optimizer]
    engine: ShardedDataParallel | None

    @property
    def small_reductions(self) -> int:
        if self.engine is None:
            return 0
        reducer = self.engine.reducer
        return reducer.collectives.traffic.small_reductions + reducer.control.traffic.small_reductions

    def gradients(self) -> list[Tensor]:
        """Whole ones. Collective."""
        with nullcontext() if self.engine is None else self.engine.full_gradients():
            return [parameter.grad.clone() for parameter in self.module if parameter.grad is not None]


def in_shards(*parts: slice, module: nn.ParameterList | None = None, **policy: Any) -> Trained:
    """An optimizer for each part of the parameters."""
    module = network() if module is None else module
    optimizers = [sgd(list(module)[part]) for part in parts]
    engine = make_engine(module, *optimizers, **policy)
    backward(engine, loss_of(module))
    return Trained(module, optimizers, engine)


def on_every_rank(*parts: slice) -> Trained:
    module = network()
    mean = iter(whole(module))
    for index, parameter in enumerate(module):
        parameter.grad = None if index == UNUSED else next(mean).grad.to(parameter.dtype)
    return Trained(module, [sgd(list(module)[part]) for part in parts], None)


def exposed() -> Trained:
    module = network()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer)
    engine.expose_gradients(True)
    backward(engine, loss_of(module))
    return Trained(module, [optimizer], engine)


def groups_of_half() -> int:
    return max(dist.get_world_size() // 2, 1)


def in_shards_and_on_every_rank(**policy: Any) -> Trained:
    """The engine averages what is in none of its optimizers, and leaves it in ``param.grad``."""
    module = network()
    optimizers = [sgd(list(module)[:2]), sgd(list(module)[2:])]
    engine = make_engine(module, optimizers[0], **policy)
    backward(engine, loss_of(module))
    return Trained(module, optimizers, engine)


ALL = slice(None)
IN_SHARDS: dict[str, Callable[[], Trained]] = {
    "shards": lambda: in_shards(ALL),
    "one bucket": lambda: in_shards(ALL, bucket_cap_mb=1.0),
    "shards of whole parameters": lambda: in_shards(ALL, partition="parameter"),
    "two optimizers": lambda: in_shards(slice(3), slice(3, None)),
    "a parameter in two": lambda: in_shards(slice(4), slice(2, None)),
    "in shards and not": in_shards_and_on_every_rank,
    "fewer elements than ranks": lambda: in_shards(ALL, module=network([(1,)])),
    "nothing for some": lambda: in_shards(ALL, module=network([(2,), (3,), (0,)])),
    "several dtypes": lambda: in_shards(ALL, module=network(dtypes=DTYPES)),
    "shard groups": lambda: in_shards(ALL, shard_group=groups_of_half()),
    "shard groups of whole parameters": lambda: in_shards(ALL, partition="parameter", shard_group=groups_of_half()),
    "shard groups, in shards and not": lambda: in_shards_and_on_every_rank(shard_group=groups_of_half()),
    "several dtypes, no master weights": lambda: in_shards(ALL, module=network(dtypes=DTYPES), master_weights=False),
}
ON_EVERY_RANK: dict[str, Callable[[], Trained]] = {
    "plain": lambda: on_every_rank(ALL),
    "two plain": lambda: on_every_rank(slice(3), slice(3, None)),
    "a parameter in two plain": lambda: on_every_rank(slice(4), slice(2, None)),
    "exposed": exposed,
}
ARRANGEMENTS = {**IN_SHARDS, **ON_EVERY_RANK}


def assert_gradients(trained: Trained, expected: list[nn.Parameter], tolerance: float = 1e-5) -> None:
    for gradient, parameter in zip(trained.gradients(), expected, strict=True):
        rounded = 1e-2 if gradient.dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(gradient.to(parameter.dtype), parameter.grad, rtol=rounded, atol=1e-6)


def clips_as_torch(arrangement: str) -> list[float]:
    """The norms on this rank."""
    norms = []
    for norm_type in NORM_TYPES:
        trained = ARRANGEMENTS[arrangement]()
        expected = whole(trained.module)
        before = trained.small_reductions
        gradients = step_gradients(trained.optimizers)
        norm = gradient_norm(gradients, norm_type)
        reductions = trained.small_reductions - before
        assert reductions == int(arrangement in IN_SHARDS and dist.get_world_size() > 1)

        assert norm.ndim == 0 and not norm.requires_grad
        # torch's maximum norm refuses tensors without elements.
        with_elements = [parameter for parameter in expected if parameter.numel()]
        max_norm = 0.6 * float(norm)
        reference = nn.utils.clip_grad_norm_(with_elements, max_norm, norm_type)
        # The mean over ranks is rounded to bfloat16 if shards are.
        tolerance = 1e-3 if "no master" in arrangement else 1e-5
        torch.testing.assert_close(norm.double(), reference, rtol=tolerance, atol=0)
        coefficient = scale_to_norm(gradients, norm, max_norm)
        assert float(coefficient) == pytest.approx(0.6, rel=1e-4)
        # Complex numbers have no order.
        if "dtypes" not in arrangement:
            clip_gradients_by_value(gradients, 0.3)
            nn.utils.clip_grad_value_(expected, 0.3)
        assert trained.small_reductions == before + reductions
        assert_gradients(trained, expected, tolerance)
        norms.append(float(norm))
    return norms


def check_not_finite(arrangement: str) -> None:
    """A gradient of one rank that is not finite shows on all, and scales all gradients to NaN or 0, as in torch."""
    for norm_type, value in product(NORM_TYPES, (math.nan, -math.inf)):
        trained = ARRANGEMENTS[arrangement]()
        gradients = step_gradients(trained.optimizers)
        # On the last rank that counts any.
        counted = [one for one in gradients.counted if one.numel()]
        owners = torch.tensor([dist.get_rank() if counted else -1])
        dist.all_reduce(owners, op=dist.ReduceOp.MAX)
        if arrangement in ON_EVERY_RANK or owners.item() == dist.get_rank():
            counted[-1].view(-1)[-1] = value
        norm = gradient_norm(gradients, norm_type)
        assert norm.isnan() if math.isnan(value) else norm == math.inf
        coefficient = scale_to_norm(gradients, norm, 1.0)
        assert coefficient.isnan() if math.isnan(value) else coefficient == 0.0


def norms_of_all(arrangements: Sequence[str]) -> dict[str, list[float]]:
    for name in arrangements:
        check_not_finite(name)
    return {name: clips_as_torch(name) for name in arrangements}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_wherever_gradients_are_they_are_clipped_as_torch_clips_the_whole(pool: RankPool, world_size: int) -> None:
    groups = [name for name in IN_SHARDS if "groups" in name]
    others = [name for name in IN_SHARDS if "groups" not in name]
    arrangements = {1: ["shards"], 2: ["shards", *ON_EVERY_RANK], 3: [*others, "shard groups"], 4: groups}[world_size]
    by_rank = pool.run(world_size, norms_of_all, arrangements)
    for norms in by_rank:
        # To the last bit: parameters that ranks clip by different factors would differ.
        assert all(norms[name] == by_rank[0][name] for name in arrangements if name in IN_SHARDS)
