"""How parameters are cut into the ranks' shards: what a checkpoint has to know of that, whoever has cut them."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class Cut(NamedTuple):
    """How a parameter is cut, and with it the state that lies like it; all in elements in storage order.

    Attributes:
        key: The same for all parameters that are cut as one.
        bounds: Shard i of what is cut as one has the elements ``[bounds[i], bounds[i + 1])``.
        offset: Where the parameter begins in that.
        numel: How many elements the parameter has as a whole.
        shape: Of the whole parameter.
        strides: Those with which the whole parameter's elements lie in storage order.
        own: The elements whose state this rank keeps, maybe none; None where it keeps no state of the parameter.
        of_parameter: Elements of the parameter that this rank writes, 1-D.
        of_state: Elements of an entry of its state that this rank writes, 1-D; None where it has no such entry.
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
