"""If a loss contains gradients, such as a gradient penalty, the parameters behind them are gathered again.

FSDP2 gathers a unit's parameters when a backward reaches the unit's output, and frees them when it has left the unit. A
backward through gradients needs them earlier, and until its end.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.torch_compat import call_after_backward


class Leaf(NamedTuple):
    """A parameter, and the leaf of the graph for which a backward computes its gradient.

    Attributes:
        tensor: The leaf: the gathered tensor of a sharded parameter, or the parameter itself.
        parameter: The parameter that optimizers step.
    """

    tensor: Tensor
    parameter: Tensor


class GraphsThroughGradients:
    """Follows backwards that are not announced, such as those of ``torch.autograd.grad`` within a training step.

    Args:
        module: The root, sharded by FSDP2. Nothing is gathered.
        units: The sharded units within the root.
        parameters: All parameters of the module.
    """

    def __init__(self, module: nn.Module, units: Sequence[Any], parameters: Sequence[Leaf]) -> None:
        self._root = cast(FSDPModule, module)
        self._units = units
        self._parameters = parameters
        self._of_root = _place_outside(module, units)
        self._run_through: set[int] = set()
        self._kept: list[Any] = []
        self._is_announced = False
        self._follows = False
        self._regathers = False
        self.had_no_gradient: set[int] = set()
        """Numbers of the parameters that had no gradient before FSDP2 has given them zeros."""
        self.reached: list[int] = []
        """Numbers of the units whose output backwards have reached, in their order."""
        hooks = (functools.partial(self._note_output, number) for number in range(len(units)))
        self.hooks = [unit.register_forward_hook(hook) for unit, hook in zip(units, hooks, strict=True)]
        """Remove them when the training ends."""

    def forget(self) -> None:
        """Call before a training step: graphs of the step before no longer exist. Not collective."""
        self._free()
        self._run_through.clear()
        self.had_no_gradient = set()
        self._is_announced = self._follows = False

    def begin_backward(self) -> None:
        """Call before an announced backward. If it runs through gradients, units are gathered, and it is collective."""
        self._is_announced = True
        self._kept = [self._units[number] for number in sorted(self._run_through)]
        for unit in self._kept:
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()

    def _free(self) -> None:
        for unit in self._kept:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        self._kept = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_output(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in leaves(output):
                if leaf.tensor.requires_grad:
                    note = functools.partial(self._note_backward, number)
                    leaf.tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_backward(self, number: int, _gradient: Tensor) -> None:
        # Once for all that a call has returned: how much of the output is used may differ.
        if self.reached[-1:] != [number]:
            self.reached.append(number)
        if not self._follows:
            self._follows = True
            # FSDP2's own callback comes before: its hook of the output was registered first.
            call_after_backward(self._end_backward)
            if not self._is_announced:
                self.had_no_gradient |= without_gradient(self._parameters)
                self._regathers = self._of_root is not None and not isinstance(getattr(*self._of_root), DTensor)
        # Grad mode is enabled in a backward that makes a graph of itself.
        if torch.is_grad_enabled():
            self._run_through.add(number)

    def _end_backward(self) -> None:
        self._free()
        if self._regathers:
            # FSDP2 took this for the last backward, and has freed parameters that the rest of the training step may
            # use.
            self._root.unshard()
        self._is_announced = self._follows = self._regathers = False


def without_gradient(parameters: Iterable[Leaf]) -> set[int]:
    """The positions of parameters without a gradient. Not collective."""
    return {number for number, leaf in enumerate(parameters) if leaf.parameter.grad is None}


def _place_outside(module: nn.Module, units: Sequence[nn.Module]) -> tuple[nn.Module, str] | None:
    """The place of a sharded parameter of the root itself. If the root has none, None."""
    inside = {parameter for unit in units for parameter in unit.parameters()}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter not in inside:
                return owner, name
    return None
