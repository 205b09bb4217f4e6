"""``parameter.data = value`` of a sharded parameter, which torch takes and forgets, is what it is of a whole one."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import exchange_shard, kept_by_fsdp
from lightning_parstrat.distributed.zero3.state import shard_like

_KEEPERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Who gathers a parameter, and so must know where its shard lies, by its id: torch moves no parameter to another device
that something refers to weakly."""


def let_data_be_assigned(modules: Iterable[nn.Module]) -> None:
    """Has an assignment to ``data`` of the modules' parameters exchange their shards. Not collective.

    What was there before is left as it is, as of whole parameters: who has kept ``parameter.data`` may put it back.
    Other DTensors' ``data`` is what it was.

    Args:
        modules: Sharded by FSDP2.
    """
    for module in modules:
        for parameter, keeper in kept_by_fsdp(module):
            _KEEPERS[id(parameter)] = keeper
    # Of the class: a subclass would not be among the types that torch's optimizers step in few kernels.
    DTensor.data = property(_data, _assign_data)  # type: ignore[assignment]


def _data(tensor: DTensor) -> Tensor:
    found: Tensor = _OF_TENSORS.__get__(tensor)
    return found


def _assign_data(tensor: DTensor, value: Tensor) -> None:
    keeper = _KEEPERS.get(id(tensor))
    if keeper is None or keeper.sharded_param is not tensor:
        _OF_TENSORS.__set__(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"`data` of a sharded parameter was set to {list(value.shape)} in {value.dtype}, and it is"
            f" {list(tensor.shape)} in {tensor.dtype}. Give it what is of its whole shape, or sharded as it is."
        )
    with torch.no_grad():
        if isinstance(value, DTensor):
            value = value.redistribute(tensor.device_mesh, tensor.placements)
        exchange_shard(tensor, keeper, local(value if isinstance(value, DTensor) else shard_like(value, tensor)))


_OF_TENSORS: Any = Tensor.data
