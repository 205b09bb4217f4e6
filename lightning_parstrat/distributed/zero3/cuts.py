"""Which elements of a parameter each rank holds when FSDP2 has sharded it, for checkpoints that all ranks write."""

from collections.abc import Hashable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_parstrat.distributed.gradients.local_tensors import local


class CutInRows:
    """A parameter that is cut along its first dimension: in equal parts, but for the last ones, which may be empty.

    As its elements lie row by row, each part is one run of them.

    Args:
        parameter: Over all ranks, in their order; of the whole one's shape.
    """

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        self.shape: Sequence[int] = parameter.shape
        self.strides: Sequence[int] = parameter.stride()
        self.offset, self.numel = 0, parameter.numel()
        ranks, rows = parameter.device_mesh.size(), parameter.shape[0]
        # As torch cuts; what is beyond the last row is no element.
        length = -(-rows // ranks) * (self.numel // rows)
        self.bounds: Sequence[int] = range(0, length * ranks + 1, length)
        self.key: Hashable = self.bounds
        begin = min(dist.get_rank() * length, self.numel)
        self.own: slice | None = slice(begin, begin + local(parameter).numel())

    def of_parameter(self, elements: slice) -> Tensor:
        """Elements that this rank holds, 1-D."""
        return self._here(self._parameter, elements)

    def of_state(self, optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        """Elements of an entry of its state that this rank holds, 1-D; None where it has no such entry."""
        value = optimizer.state.get(self._parameter, {}).get(entry)
        return None if value is None else self._here(value, elements)

    def _here(self, tensor: Tensor, elements: slice) -> Tensor:
        begin = 0 if self.own is None else self.own.start
        return local(tensor.detach()).reshape(-1)[elements.start - begin : elements.stop - begin]


def cuts_in_rows(parameters: Iterable[Tensor]) -> dict[Tensor, CutInRows]:
    """How parameters are cut that are cut in rows over all ranks; others are left out. Not collective."""
    return {one: CutInRows(one) for one in parameters if isinstance(one, DTensor) and _is_cut_in_rows(one)}


def check_cut_in_rows(module: nn.Module) -> None:
    """Refuses parameters that are not cut in rows over all ranks, as checkpoints describe them. Not collective.

    Raises:
        ValueError: A user has sharded one otherwise than this package does.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not _is_cut_in_rows(parameter):
            raise ValueError(
                f"checkpoint_format='sharded' writes parameters that are cut along their first dimension over all"
                f" ranks, and {name!r} was cut otherwise before training ({parameter.placements} over"
                f" {parameter.device_mesh}). Leave its sharding to zero3_custom, or use checkpoint_format='full'."
            )


def _is_cut_in_rows(parameter: DTensor) -> bool:
    mesh = parameter.device_mesh
    over_all = mesh.mesh.tolist() == list(range(dist.get_world_size()))
    return over_all and tuple(parameter.placements) == (Shard(0),) and parameter.to_local().is_contiguous()
