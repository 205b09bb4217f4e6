"""The order in which a backward makes gradients, as rank 0 sees it."""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.distributed.comm.agreement import broadcast_object


class GradientOrder:
    """Records the order of one backward, whose gradients stay in ``param.grad``.

    Args:
        module: Each of its parameters has a hook on rank 0, until :meth:`end`.
        group: The group of all ranks. It works on host memory.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._parameters = list(module.parameters())
        self._group = group
        self._made: dict[int, None] = {}
        self._hooks: list[RemovableHandle] = []

    def listen(self) -> None:
        """Begins to record. The record of an earlier backward is dropped."""
        self.close()
        if dist.get_rank(self._group) == 0:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._note, position))  # type: ignore[no-untyped-call]
                for position, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ]

    def _note(self, position: int, _: Tensor) -> None:
        # Within reentrant checkpoints a gradient comes in parts: the last one counts.
        self._made.pop(position, None)
        self._made[position] = None

    def end(self) -> list[Tensor]:
        """The parameters in the order of their gradients, the same on all ranks.

        Parameters without a gradient come last, in reverse order of registration. Collective: one broadcast.
        """
        made = broadcast_object(list(self._made), self._group)
        self.close()
        rest = sorted(set(range(len(self._parameters))) - set(made), reverse=True)
        return [self._parameters[position] for position in (*made, *rest)]

    def close(self) -> None:
        """Removes the hooks. Not collective."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._made = [], {}
