"""What a rank holds of a parameter that is cut in rows, as torch cuts it: more rows than ranks, as many, fewer."""

import pytest
import torch
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


def look(shape: tuple[int, ...]) -> tuple[slice, list[float]]:
    """The elements that a rank has of a parameter, by their cut, and their values."""
    weight = holder(shape).weight
    assert isinstance(weight, DTensor)
    ((cut_one, cut),) = cuts_in_rows([weight, torch.ones(3)]).items()
    assert cut_one is weight is cut.key and cut.shape == shape and cut.written == cut.own
    return cut.own, weight.to_local().flatten().tolist()


def look_at_all() -> list[tuple[slice, list[float]]]:
    return [look(shape) for shape in SHAPES]


# Processes of their own: what torch remembers of a mesh would outlive its groups, and reach later tests.
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_one_run_of_elements(own_pool: RankPool, ranks: int) -> None:
    by_rank = own_pool.run(ranks, look_at_all)
    for number, shape in enumerate(SHAPES):
        end = 0
        for own, elements in (of_rank[number] for of_rank in by_rank):
            assert own.start == end and elements == [float(element) for element in range(own.start, own.stop)]
            end = own.stop
        assert end == torch.Size(shape).numel()
