"""Deep copies of sharded modules, which FSDP2 refuses: they keep weights, in shards, for averages and the like."""

import copy
from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def let_be_copied(modules: Iterable[nn.Module], added: Iterable[str]) -> None:
    """Has ``copy.deepcopy`` of modules give ones of their own class that hold shards, as the originals do.

    A copy has no hooks and gathers nothing: it cannot be called. Neither this nor copying is collective.

    Args:
        modules: Sharded by FSDP2.
        added: Names of attributes that they have for being sharded, which copies have not.
    """
    hooks = {name for name in vars(nn.Module()) if "hook" in name}
    left_out = hooks | set(added)

    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        plain = next(cls for cls in type(self).__mro__ if not issubclass(cls, FSDPModule))
        twin = cast(nn.Module, plain.__new__(plain))
        memo[id(self)] = twin
        for parameter in self.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and id(gradient) not in memo:
                # One that lies behind others in a buffer torch would copy by memory that a DTensor has not.
                memo[id(gradient)] = gradient.clone()
        # What the class itself leaves out of a pickle is no part of a copy, either: a module's Trainer.
        state = cast(Any, self.__reduce_ex__(4))[2]
        nn.Module.__init__(twin)
        vars(twin).update(copy.deepcopy({name: state[name] for name in state.keys() - left_out}, memo))
        return twin

    for cls in {type(module) for module in modules}:
        cls.__deepcopy__ = copied  # type: ignore[attr-defined]
