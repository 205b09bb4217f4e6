"""How parameters are cut into the ranks' shards: what a checkpoint has to know of that, whoever has cut them."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


class Cut(Protocol):
    """How a parameter is cut, and with it the state that lies like it; all in elements in storage order."""

    @property
    def key(self) -> Hashable:
        """The same for all parameters that are cut as one."""

    @property
    def bounds(self) -> Sequence[int]:
        """Shard i of what is cut as one has the elements ``[bounds[i], bounds[i + 1])``."""

    @property
    def offset(self) -> int:
        """Where the parameter begins in that."""

    @property
    def numel(self) -> int:
        """How many elements the parameter has as a whole."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole parameter."""

    @property
    def strides(self) -> Sequence[int]:
        """Those with which the whole parameter's elements lie in storage order."""

    @property
    def own(self) -> slice | None:
        """The elements whose state this rank keeps, maybe none; None where it keeps no state of the parameter."""

    def of_parameter(self, elements: slice) -> Tensor:
        """Elements of the parameter that this rank writes, 1-D."""

    def of_state(self, optimizer: Optimizer, entry: str, elements: slice) -> Tensor | None:
        """Elements of an entry of its state that this rank writes, 1-D; None where it has no such entry."""
