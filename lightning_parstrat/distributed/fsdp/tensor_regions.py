"""What lies between a column-wise and a row-wise layer: random numbers of each rank, and a check of the plan.

Between the two, each rank has a part of the features. So each draws its own random numbers there, for dropout.
Everywhere else all ranks that share layers draw the same.

A plan may fit a module's layers and not its code, which may read the number of heads of all ranks. The module would
then train wrong without a word. So each kind of module is called once with cut layers and once with whole ones.
"""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.agreement import any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.fsdp.tensor_plan import PlannedLayer, TensorPlanError
from lightning_parstrat.distributed.fsdp.whole import plain

_TOLERANCE = 1e-3
"""Of a result in fp32, relative to its largest element."""

_DIFFERENCE = 1e-2
"""Of the norm of a gradient. Equal computations on equal data differ by roundings at most."""


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
        self._hooks: list[RemovableHandle] = []
        regions: dict[str, nn.Module] = {}
        for one in planned:
            if one.gives_shards:
                self._hooks.append(one.layer.register_forward_hook(self._enter))
                name = _region_of(one, planned)
                regions |= {name: named[name]} if name else {}
            elif one.takes_shards:
                self._hooks.append(one.layer.register_forward_pre_hook(self._leave))
        for part in regions.values():
            # It ends there at the latest, and if an exception ends the forward.
            self._hooks.append(part.register_forward_hook(self._leave, always_call=True))
        self._hooks += _check_each_kind(regions, planned)

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
        return [on_host, torch.cuda.default_generators[self._device.index or 0]] if self._on_gpu else [on_host]

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]


def _region_of(planned: PlannedLayer, others: Sequence[PlannedLayer]) -> str:
    """The name of the smallest module with a layer that sums what this one gives. Empty for the outermost."""
    name = planned.name
    while "." in name:
        name = name.rpartition(".")[0]
        if any(one.takes_shards and one.name.startswith(f"{name}.") for one in others):
            return name
    return ""


def _check_each_kind(regions: Mapping[str, nn.Module], planned: Sequence[PlannedLayer]) -> Iterator[RemovableHandle]:
    """Makes one module of each kind check itself at its first call."""
    kinds: set[Any] = set()
    for name, part in regions.items():
        own = [one for one in planned if one.name.startswith(f"{name}.")]
        kind = (type(part), *((one.name.removeprefix(name), type(one.style)) for one in own))
        has_units = any(isinstance(inner, FSDPModule) for inner in part.modules() if inner is not part)
        if kind not in kinds and not has_units and all(one.is_whole_outside for one in own):
            kinds.add(kind)
            yield _check_at_first_call(part, name)


def _check_at_first_call(part: nn.Module, name: str) -> RemovableHandle:
    def check(part: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        _check(part, name, args, kwargs)

    handle = part.register_forward_pre_hook(check, with_kwargs=True)
    return handle


@torch.no_grad()
def _check(part: nn.Module, name: str, args: Any, kwargs: Any) -> None:
    """Calls a module with its layers cut and with whole layers. Collective. It sends the module's parameters once.

    Raises:
        TensorPlanError: The results differ.
    """
    training = [inner for inner in part.modules() if inner.training]
    own = [(owner, *pair) for owner in part.modules() for pair in list(owner.named_parameters(recurse=False))]
    try:
        inputs = replace_leaves((args, kwargs), lambda tensor: _wide(tensor.detach()))
        part.eval()
        with torch.autocast(own[0][2].device.type, enabled=False):
            cut = _called_with(part, own, _wide, inputs)
            with plain(part):
                whole = _called_with(part, own, lambda one: _wide(_full(one)), inputs)
    except TensorPlanError:
        raise
    except Exception:
        # What cannot be called once more is not checked. If the cut layers cannot be called, training raises the error.
        return
    finally:
        for inner in training:
            inner.training = True
    for one, other in zip(leaves(cut), leaves(whole), strict=True):
        if _differ(_full(one.tensor), other.tensor):
            raise TensorPlanError(
                f"With the layers of its tensor-parallel plan cut, {name!r} returns something else than with whole"
                f" layers. Its `forward` may read a number that is of all ranks, as in `view(batch, length,"
                f" self.num_heads, -1)`. Each rank has a part of the heads: write `view(batch, length, -1,"
                f" self.head_dim)`. Or leave its layers out of the plan."
            )


def _called_with(
    part: nn.Module, own: Sequence[tuple[nn.Module, str, Tensor]], convert: Callable[[Tensor], Tensor], inputs: Any
) -> Any:
    try:
        for owner, name, parameter in own:
            setattr(owner, name, nn.Parameter(convert(parameter.detach()), False))
        args, kwargs = copy.deepcopy(inputs)
        return part.forward(*args, **kwargs)
    finally:
        for owner, name, parameter in own:
            setattr(owner, name, parameter)


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.numel():
        return one.shape != other.shape
    return bool((one - other).abs().max() > _TOLERANCE * other.abs().max())


@torch.no_grad()
def check_gradients(parameters: Mapping[str, Tensor], control: Collectives) -> None:
    """Compares gradients of whole layers between the ranks that share the others: they must be the same. Collective.

    They differ if a layer between cut ones is not in the plan. Each rank then has the gradient of its part alone.

    Args:
        parameters: By name, the parameters of a module with cut layers. They have gradients.
        control: Works on host memory.

    Raises:
        TensorPlanError: Gradients differ. Raised on all ranks.
    """
    mesh = next(one.device_mesh for one in parameters.values() if isinstance(one, DTensor) and one.device_mesh.ndim > 1)
    whole = {name: one for name, one in parameters.items() if one.grad is not None and not _is_cut(one)}
    norms = [local(one.grad).double().norm() for one in whole.values() if one.grad is not None]
    most, least = torch.stack(norms or [torch.zeros((), dtype=torch.float64)]).float().repeat(2, 1)
    for extreme, op in ((most, dist.ReduceOp.MAX), (least, dist.ReduceOp.MIN)):
        dist.all_reduce(extreme, op=op, group=mesh.get_group("tensor"))
    differs = (most - least > _DIFFERENCE * most).tolist()
    differing = [name for name, is_different in zip(whole, differs, strict=False) if is_different]
    if any_rank(bool(differing), control):
        raise TensorPlanError(
            f"The ranks that share tensor-parallel layers have different gradients of {listed(differing) or 'a layer'},"
            " which the plan leaves whole. It is used between layers that are cut, so each rank has the gradient of a"
            " part. Leave the layers around it out of the plan, or put it in by a style of"
            " torch.distributed.tensor.parallel."
        )


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(map(Placement.is_shard, parameter.placements[1:]))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
