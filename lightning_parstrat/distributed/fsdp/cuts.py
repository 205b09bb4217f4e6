"""Which elements of a parameter each rank holds when FSDP2 has sharded it."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.engine.cuts import Cut
from lightning_parstrat.distributed.gradients.local_tensors import local


def cuts_in_rows(parameters: Iterable[Tensor]) -> dict[Tensor, Cut]:
    """How sharded parameters are cut along their first dimension over all ranks. Others are left out. Not collective.

    The parts are equal, except for the last ones, which may be shorter or empty. As elements lie row by row, each part
    is one run of them.
    """
    return {one: _cut(one) for one in parameters if isinstance(one, DTensor)}


def _cut(parameter: DTensor) -> Cut:
    # As torch cuts. Beyond the last row there are no elements.
    rows, numel = parameter.shape[0], parameter.numel()
    length = -(-rows // parameter.device_mesh.size()) * (numel // rows)
    begin = min(dist.get_rank() * length, numel)
    own = slice(begin, begin + local(parameter).numel())
    return Cut(tuple(parameter.shape), parameter.stride(), own, own, parameter)
