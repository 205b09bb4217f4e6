"""Which elements of a parameter each rank holds when FSDP2 has sharded it, for checkpoints that all ranks write."""

import functools
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.core.cuts import Cut
from lightning_parstrat.distributed.gradients.local_tensors import local


def cuts_in_rows(parameters: Iterable[Tensor]) -> dict[Tensor, Cut]:
    """How sharded parameters are cut along their first dimension over all ranks. Others are left out. Not collective.

    The parts are equal, except for the last ones, which may be shorter or empty. As elements lie row by row, each part
    is one run of them.
    """
    return {one: _cut(one) for one in parameters if isinstance(one, DTensor)}


def _cut(parameter: DTensor) -> Cut:
    ranks, rows, numel = parameter.device_mesh.size(), parameter.shape[0], parameter.numel()
    # As torch cuts. Beyond the last row there are no elements.
    length = -(-rows // ranks) * (numel // rows)
    bounds = range(0, length * ranks + 1, length)
    begin = min(dist.get_rank() * length, numel)
    own = slice(begin, begin + local(parameter).numel())

    def here(tensor: Tensor, elements: slice) -> Tensor:
        return local(tensor.detach()).reshape(-1)[elements.start - begin : elements.stop - begin]

    def of_state(optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        value = optimizer.state.get(parameter, {}).get(entry)
        return None if value is None else here(value, elements)

    of_parameter = functools.partial(here, parameter)
    return Cut(bounds, bounds, 0, numel, parameter.shape, parameter.stride(), own, of_parameter, of_state)
