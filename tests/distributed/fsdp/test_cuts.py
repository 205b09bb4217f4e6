"""What a rank holds of a parameter that is cut in rows, as torch cuts it: more rows than ranks, as many, fewer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.fsdp.cuts import cuts_in_rows
from tests import devices
from tests.pool import RankPool

SHAPES = [(1,), (1, 3), (2, 5), (3,), (4, 2, 3), (5, 2), (7,), (8, 3), (9, 1)]


def holder(shape: tuple[int, ...]) -> nn.Module:
    mesh = DeviceMesh.from_group(process_groups().gradients, devices.kind())
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=devices.device()).view(shape)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return module


def look(shape: tuple[int, ...]) -> tuple[slice, slice, list[float], list[float]]:
    """What a rank holds by ``own``, and by the bounds; its elements of a parameter and of an optimizer's state."""
    module = holder(shape)
    weight = module.weight
    assert isinstance(weight, DTensor)
    ((cut_one, cut),) = cuts_in_rows([weight, torch.ones(3)]).items()
    assert cut_one is weight
    assert cut.own is not None and tuple(cut.shape) == shape and cut.numel == weight.numel()
    rank = dist.get_rank()
    by_bounds = slice(min(cut.bounds[rank], cut.numel), min(cut.bounds[rank + 1], cut.numel))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.state[weight] = {"twice": weight.detach() * 2}
    state = cut.of_state(optimizer, "twice", cut.own)
    assert state is not None and cut.of_state(optimizer, "absent", cut.own) is None
    return cut.own, by_bounds, cut.of_parameter(cut.own).tolist(), state.tolist()


def look_at_all() -> list[tuple[slice, slice, list[float], list[float]]]:
    return [look(shape) for shape in SHAPES]


# Processes of their own: what torch remembers of a mesh would outlive its groups, and reach later tests.
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_one_run_of_elements(own_pool: RankPool, ranks: int) -> None:
    by_rank = own_pool.run(ranks, look_at_all)
    for number, shape in enumerate(SHAPES):
        end = 0
        for own, by_bounds, elements, state in (of_rank[number] for of_rank in by_rank):
            assert own == by_bounds and own.start == end
            end = own.stop
            assert elements == [float(element) for element in range(own.start, own.stop)]
            assert state == [2 * element for element in elements]
        assert end == torch.Size(shape).numel()
