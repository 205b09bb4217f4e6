"""This rank's part of tensors that torch's DTensor has sharded."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, over the same memory. A whole tensor is returned unchanged. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
