"""How parameters are cut into the ranks' shards: what a checkpoint has to know, under every strategy that cuts."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class Cut(NamedTuple):
    """How a parameter and its state are cut. All numbers count elements in storage order.

    Attributes:
        key: The same for all parameters that are cut as one.
        bounds: Shard i of what is cut as one has the elements ``[bounds[i], bounds[i + 1])``.
        offset: Where the parameter begins in what is cut as one.
        numel: How many elements the whole parameter has.
        shape: Shape of the whole parameter.
        strides: Strides with which the whole parameter's elements lie in storage order.
        own: The elements whose state this rank keeps, maybe none. If this rank keeps no state of the parameter, None.
        of_parameter: Elements of the parameter that this rank writes, 1-D.
        of_state: Elements of a state entry that this rank writes, 1-D. If the state lacks that entry, None.
    """

    key: Hashable
    bounds: Sequence[int]
    offset: int
    numel: int
    shape: Sequence[int]
    strides: Sequence[int]
    own: slice | None
    of_parameter: Callable[[slice], Tensor]
    of_state: Callable[[Optimizer, str, slice], Tensor | None]
