"""Whose gradients were not finite: every rank looks at its own before they are summed, and all learn of all."""

from collections.abc import Iterable, Set
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives


class NonfiniteGradientError(RuntimeError):
    """Gradients became NaN or infinite on some rank; raised on all of them."""


class _Seen(NamedTuple):
    parameter: Tensor
    largest: Tensor


class Leaf(NamedTuple):
    """A parameter, and the leaf of the graph that a backward computes its gradient for: mostly the parameter itself.

    Attributes:
        name: The parameter's.
        tensor: The leaf.
        parameter: What optimizers step.
    """

    name: str
    tensor: Tensor
    parameter: Tensor


class NonfiniteTracker:
    """Remembers of every parameter whether its gradients on this rank were finite, until told to forget.

    After the sum over ranks it can no longer be told where a NaN came from. Costs one more pass over the gradients in
    every backward, a few bytes per parameter, and no waiting.

    Args:
        leaves: Those to look at; hooks are registered on all that are floating or complex.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._seen: dict[str, _Seen] = {}
        self._hooks: list[RemovableHandle] = []
        for name, leaf, parameter in leaves:
            trainable = leaf.requires_grad
            if not trainable and not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            # A frozen parameter may be trained later.
            leaf.requires_grad_(True)
            hook = partial(self._look, name, parameter)
            self._hooks.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            leaf.requires_grad_(trainable)

    def remove(self) -> None:
        """Stops looking."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()

    def forget(self, parameters: Set[Tensor]) -> None:
        """Forgets what was seen of ``parameters``, whose gradients have been used or dropped."""
        self._seen = {name: seen for name, seen in self._seen.items() if seen.parameter not in parameters}

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients on this rank are not finite. Waits on the host."""
        return [name for name, seen in self._seen.items() if not torch.isfinite(seen.largest).item()]

    @torch.no_grad()
    def _look(self, name: str, parameter: Tensor, leaf: Tensor) -> None:
        if leaf.grad is not None:
            # A maximum of absolute values neither overflows nor cancels.
            gradient = leaf.grad.coalesce().values() if leaf.grad.is_sparse else leaf.grad
            largest = torch.linalg.vector_norm(gradient, float("inf")) if gradient.numel() else gradient.sum()
            earlier = self._seen.get(name)
            # Of two gradients that are added, one may be gone by now; a maximum keeps NaN.
            self._seen[name] = _Seen(parameter, largest if earlier is None else earlier.largest.maximum(largest))


def raise_nonfinite(names: list[str], where: str, control: Collectives) -> None:
    """Raises the same error on all ranks. Collective.

    Args:
        names: The parameters whose gradients on this rank are not finite.
        where: The step, for the message.
        control: Carries the names.

    Raises:
        NonfiniteGradientError: Always.
    """
    gathered: list[list[str]] = all_gather_object(names, control.group)
    lines = [f"rank {rank}: {listed(found)}" for rank, found in enumerate(gathered) if found]
    if not lines:
        lines = ["in no rank's own backward: their sum over ranks overflowed, or a hook has made them so"]
    raise NonfiniteGradientError(
        f"Gradients are not finite {where}:\n  " + "\n  ".join(lines) + "\nParameters and optimizer state are as"
        " before this step. nonfinite_grads='skip' leaves such steps out, 'propagate' does as `ddp`."
    )
