"""``parameter.data = value`` of sharded parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_parstrat.distributed.zero3.assigned_data import let_data_be_assigned
from tests.pool import RankPool

ROWS = 5
"""What no number of ranks below divides."""


def sharded_module() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, ROWS), nn.Linear(ROWS, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module, mesh=mesh)
    let_data_be_assigned([module])
    return module, mesh


WHOLE = torch.arange(3.0 * ROWS).view(ROWS, 3)
VALUES: dict[str, Callable[[Any], Tensor]] = {
    "whole": lambda mesh: WHOLE.clone(),
    "whole, not contiguous": lambda mesh: WHOLE.t().clone().t(),
    "sharded alike": lambda mesh: distribute_tensor(WHOLE, mesh, [Shard(0)]),
    "on all ranks": lambda mesh: distribute_tensor(WHOLE, mesh, [Replicate()]),
}


def assigned(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parameter, what the module computes with it and what that is by hand; and what was there before."""
    module, mesh = sharded_module()
    weight: Any = module[0].weight
    before, kept = weight.full_tensor().clone(), weight.data
    # Once gathered, so that a copy of what is no more would be seen.
    module(torch.ones(1, 3))
    module.reshard()
    weight.data = VALUES[kind](mesh)
    other: Any = module[1]
    first = nn.functional.linear(torch.ones(1, 3), WHOLE, module[0].bias.full_tensor())
    by_hand = nn.functional.linear(first, other.weight.full_tensor(), other.bias.full_tensor())
    output = module(torch.ones(1, 3)).detach()
    module.reshard()
    found = weight.full_tensor().clone()
    weight.data = kept
    return found.detach(), output - by_hand.detach(), before.detach(), weight.full_tensor().detach()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", VALUES)
def test_what_is_assigned_is_computed_with_and_what_was_there_can_be_put_back(
    pool: RankPool, kind: str, world_size: int
) -> None:
    for found, apart, before, put_back in pool.run(world_size, assigned, kind):
        assert torch.equal(found, WHOLE) and torch.equal(put_back, before)
        assert apart.abs().max() <= 1e-4


def traded() -> bool:
    module, _ = sharded_module()
    first: Any = module[0].bias
    second = distribute_tensor(torch.arange(1.0 * ROWS), first.device_mesh, [Shard(0)])
    values = first.full_tensor().clone()
    other: Any = nn.Parameter(second)
    # Of what nobody gathers it is torch's own, without an effect.
    other.data = first.data
    first.data = second
    second.mul_(2.0)
    return torch.equal(other.full_tensor(), 2.0 * torch.arange(1.0 * ROWS)) and not torch.equal(
        values, first.full_tensor()
    )


def test_data_of_other_tensors_is_what_it_was(pool: RankPool) -> None:
    assert all(pool.run(2, traded))


def errors() -> list[str]:
    module, _ = sharded_module()
    weight: Any = module[0].weight
    said = []
    for value in (torch.zeros(ROWS), torch.zeros(ROWS, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="was set to") as caught:
            weight.data = value
        said.append(str(caught.value))
    module.unshard()
    with pytest.raises(RuntimeError, match="between steps") as gathered:
        weight.data = WHOLE.clone()
    module.reshard()
    assert isinstance(weight, DTensor) and module[0].weight is weight
    return [*said, str(gathered.value)]


def test_what_cannot_be_assigned(pool: RankPool) -> None:
    for shape, dtype, gathered in pool.run(2, errors):
        assert "[5] in torch.float32" in shape and "[5, 3] in torch.float32" in shape
        assert "torch.float64" in dtype and "'weight'" in gathered


def moved() -> bool:
    """Whether it still holds for a module whose parameters have been made anew."""
    module, _ = sharded_module()
    module.double()
    weight: Any = module[0].weight
    weight.data = WHOLE.double()
    return torch.equal(weight.full_tensor(), WHOLE.double())


def test_a_module_that_was_converted(pool: RankPool) -> None:
    assert all(pool.run(2, moved))
