"""What lies between a column-wise and a row-wise layer: random numbers of each rank.

Between the two, each rank has a part of the features. So each draws its own random numbers there, for dropout.
Everywhere else all ranks that share layers draw the same.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.distributed.fsdp.tensor_checks import check_each_kind
from lightning_parstrat.distributed.fsdp.tensor_plan import PlannedLayer, TensorPlanError, region_of


class TensorRegions:
    """Follows forwards of a module whose layers are cut, from now on.

    Args:
        module: The module. Its layers are cut.
        planned: The layers.
        device: The device of the module.
    """

    def __init__(self, module: nn.Module, planned: Sequence[PlannedLayer], device: torch.device) -> None:
        self._device = device
        self._shared: list[Tensor] | None = None
        """The states of the generators outside of a region, if a forward is within one."""
        self._begun: list[Tensor] = []
        named = dict(module.named_modules())
        regions = dict.fromkeys(region_of(one, planned, named) for one in planned if one.gives_shards)
        self._hooks: list[RemovableHandle] = []
        for name, layer, _ in planned:
            self._hooks.append(layer.register_forward_pre_hook(self._leave))
            self._hooks.append(layer.register_forward_hook(functools.partial(_refuse_graphs, name)))
        for one in planned:
            if one.gives_shards:
                self._hooks.append(one.layer.register_forward_hook(self._enter))
        for name in regions:
            # It ends there at the latest, and if an exception ends the forward.
            self._hooks.append(named[name].register_forward_hook(self._leave, always_call=True))
        self._hooks += check_each_kind({name: named[name] for name in regions}, planned)

    def remove(self) -> None:
        """Ends it. The layers stay cut."""
        for hook in self._hooks:
            hook.remove()

    # Random numbers.

    def _enter(self, layer: nn.Module, *_: Any) -> None:
        if layer.training and self._shared is None:
            self._shared = self._states()
            # The same in a recomputation, which begins with the same states. A CPU's generator takes 32 bits of a seed.
            states = b"".join(state.numpy().tobytes() for state in self._shared)
            for generator in self._generators():
                generator.manual_seed(zlib.crc32(states, dist.get_rank() + 1))
            self._begun = self._states()

    def _leave(self, *_: Any) -> None:
        if self._shared is None:
            return
        is_drawn = any(not torch.equal(*pair) for pair in zip(self._states(), self._begun, strict=True))
        for generator, state in zip(self._generators(), self._shared, strict=True):
            generator.set_state(state)
            if is_drawn:
                # Otherwise the next region would draw the same.
                torch.rand((), generator=generator, device=generator.device)
        self._shared = None

    def _generators(self) -> list[torch.Generator]:
        on_host = torch.default_generator
        if self._device.type != "cuda":
            return [on_host]
        return [on_host, torch.cuda.default_generators[self._device.index or 0]]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]


def _refuse_graphs(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
    """Refuses gradients of gradients through a cut layer: torch cuts them off without a word."""

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise TensorPlanError(
                f"A loss contains gradients that go through {name!r}, a tensor-parallel layer. torch cannot compute"
                " gradients of these. Leave the layer out of the plan, or compute the loss without gradients."
            )

    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(refuse)  # type: ignore[no-untyped-call]
