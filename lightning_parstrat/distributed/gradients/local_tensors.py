"""What this rank holds of tensors that are sharded by torch's DTensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, over the same memory; of one that is whole, itself. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
