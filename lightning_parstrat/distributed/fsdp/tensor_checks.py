"""Checks that a tensor-parallel plan fits a module's code, which would otherwise train wrong without a word.

Code may read the number of heads of all ranks. So one module of each kind is called once with cut layers and once with
whole ones. And a layer between cut ones may be missing in the plan. So gradients of whole layers are compared between
the ranks that share the others.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.activation_checkpointing import buffers_kept
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.cuts import whole as full
from lightning_parstrat.distributed.fsdp.tensor_plan import HEADS, PlannedLayer, TensorPlanError
from lightning_parstrat.distributed.fsdp.whole import plain

_TOLERANCE = 1e-3
"""Of a result in fp32, relative to its largest element."""

_DIFFERENCE = 1e-2
"""Of the norm of a gradient."""

_ROUNDING = 1e-5
"""Of the largest norm of a gradient. Smaller gradients may be nothing but roundings."""

_COMPARED_STEPS = 100
"""The most steps in which a gradient is waited for that is larger."""


def check_each_kind(regions: Mapping[str, nn.Module], planned: Sequence[PlannedLayer]) -> Iterator[RemovableHandle]:
    """Makes one module of each kind check itself at its first call."""
    kinds: set[Any] = set()
    for name, part in regions.items():
        own = [one for one in planned if one.name.startswith(f"{name}.")]
        heads = (getattr(part, attribute, None) for attribute in HEADS)
        kind = (type(part), *heads, *((one.name.removeprefix(name), type(one.style)) for one in own))
        if kind not in kinds and all(one.is_whole_outside for one in own):
            kinds.add(kind)
            yield _check_at_first_call(part, name, [one.layer for one in own if one.takes_shards])


def _check_at_first_call(part: nn.Module, name: str, row_wise: Sequence[nn.Module]) -> RemovableHandle:
    def check(part: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        _check(part, name, row_wise, args, kwargs)

    handle = part.register_forward_pre_hook(check, with_kwargs=True)
    return handle


_Called = tuple[Any, list[Tensor]]
"""What a module returned, and what its row-wise layers were given."""


@torch.no_grad()
def _check(part: nn.Module, name: str, row_wise: Sequence[nn.Module], args: Any, kwargs: Any) -> None:
    """Calls a module with its layers cut and with whole layers. Collective. It sends the module's parameters once.

    What cannot be called twice, or draws random numbers in evaluation, is not checked.

    Raises:
        TensorPlanError: The results differ.
    """
    training = [inner for inner in part.modules() if inner.training]
    inner_units = [inner for inner in part.modules() if isinstance(inner, FSDPModule) and inner is not part]
    devices = {leaf.tensor.device for leaf in leaves((args, kwargs)) if leaf.tensor.is_cuda}
    for unit in inner_units:
        unit.unshard()
    own = [(owner, *pair) for owner in part.modules() for pair in list(owner.named_parameters(recurse=False))]
    try:
        inputs = replace_leaves((args, kwargs), lambda tensor: _wide(tensor.detach()))
        part.eval()
        with torch.autocast(own[0][2].device.type, enabled=False), torch.random.fork_rng(devices):
            before = _generator_states(devices)
            with buffers_kept(list(part.buffers())), plain(part, keeps_cut=True):
                cut = _called_with(part, own, _wide, inputs, row_wise)
            draws = not all(map(torch.equal, _generator_states(devices), before))
            with buffers_kept(list(part.buffers())), plain(part):
                whole = _called_with(part, own, lambda one: _wide(full(one)), inputs, row_wise)
    except Exception:
        # If the cut layers cannot be called, training raises the error.
        return
    finally:
        for inner in training:
            inner.training = True
        for unit in inner_units:
            unit.reshard()
    mesh = next(one.device_mesh for _, _, one in own if _is_cut(one))
    if not draws and not _fits(cut, whole, mesh):
        raise TensorPlanError(
            f"With the layers of its tensor-parallel plan cut, {name!r} computes something else than with whole"
            f" layers. Its `forward` may read a number that is of all ranks, as in `view(batch, length,"
            f" self.num_heads, -1)`. Each rank has a part of the heads: write `view(batch, length, -1,"
            f" self.head_dim)`. Or leave its layers out of the plan."
        )


def _fits(cut: _Called, whole: _Called, mesh: DeviceMesh) -> bool:
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    (output, given), (whole_output, whole_given) = cut, whole
    parts = [one.tensor_split(size, -1)[rank] for one in whole_given]
    if len(parts) != len(given):
        return False
    # What a layer was given may be a DTensor of all, or of this rank's part.
    own = [local(one) if one.shape != part.shape else one for one, part in zip(given, parts, strict=True)]
    if any(map(_differ, own, parts)):
        return False
    pairs = zip(leaves(output), leaves(whole_output), strict=False)
    # Others are of this rank's heads, such as the weights of attention.
    return not any(_differ(full(one.tensor), two.tensor) for one, two in pairs if one.tensor.shape == two.tensor.shape)


def _called_with(
    part: nn.Module,
    own: Sequence[tuple[nn.Module, str, Tensor]],
    convert: Callable[[Tensor], Tensor],
    inputs: Any,
    row_wise: Sequence[nn.Module],
) -> _Called:
    given: list[Tensor] = []
    hooks = [one.register_forward_pre_hook(lambda _, args: given.append(args[0]), prepend=True) for one in row_wise]
    try:
        for owner, name, parameter in own:
            setattr(owner, name, nn.Parameter(convert(parameter.detach()), False))
        args, kwargs = copy.deepcopy(inputs)
        # Of the class: an object may count its calls.
        return type(part).forward(part, *args, **kwargs), given
    finally:
        for hook in hooks:
            hook.remove()
        for owner, name, parameter in own:
            setattr(owner, name, parameter)


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.numel():
        return one.shape != other.shape
    largest = float(other.float().nan_to_num(0.0, 0.0, 0.0).abs().max())
    # Both may have NaN in a place, such as a row that a mask hides.
    alike = torch.isclose(one.float(), other.float(), rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
    return not bool(alike.all())


def _generator_states(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _is_cut(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks that share layers have different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return "tensor" in (parameter.device_mesh.mesh_dim_names or ()) and parameter.placements[-1].is_shard()


class GradientCheck:
    """Compares gradients of whole layers between ranks that share the others: each once, in a training's first steps.

    Args:
        parameters: By name, the parameters of a module with cut layers.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._left = {name: one for name, one in parameters.items() if not _is_cut(one)}
        self._group = next(one.device_mesh for one in parameters.values() if _is_cut(one)).get_group("tensor")
        self._steps = _COMPARED_STEPS

    @torch.no_grad()
    def compare(self, used: set[Tensor], control: Collectives) -> None:
        """Compares gradients that are larger than roundings. Collective, if there are any left. Call it once a step.

        Args:
            used: Parameters that some rank has used in this step, the same on all ranks.
            control: Works on host memory.

        Raises:
            TensorPlanError: Gradients differ. Raised on all ranks.
        """
        found = {name: one for name, one in self._left.items() if one in used}
        if not found or not self._steps:
            return
        self._steps -= 1
        norms = [torch.zeros(()) if one.grad is None else local(one.grad).float().norm() for one in found.values()]
        device = next(iter(found.values())).device
        most, least = torch.stack([norm.to(device) for norm in norms]).repeat(2, 1)
        for extreme, op in ((most, dist.ReduceOp.MAX), (least, dist.ReduceOp.MIN)):
            dist.all_reduce(extreme, op=op, group=self._group)
        is_large = most > _ROUNDING * most.max()
        is_empty = torch.tensor([local(one).numel() == 0 for one in found.values()])
        # All ranks must compare the same in the next step, and ranks have other shards.
        flags = torch.stack([is_large & (most - least > _DIFFERENCE * most), ~is_large]).cpu()
        flags = (flags & ~is_empty).to(torch.uint8)
        control.all_reduce(flags, op=dist.ReduceOp.MAX).wait()
        differs, is_open = flags.tolist()
        differing = [name for name, is_different in zip(found, differs, strict=True) if is_different]
        if differing:
            raise TensorPlanError(
                "The ranks that share tensor-parallel layers have different gradients of"
                f" {listed(differing)}, which the plan leaves whole. Either it is used between layers that"
                " are cut: leave these out of the plan, or put it in by a style of torch.distributed.tensor.parallel."
                " Or the whole of a tensor is dropped out between cut layers: do that before or after them."
            )
        for name, stays in zip(found, is_open, strict=True):
            if not stays:
                del self._left[name]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
