"""Forwards and backwards of layers that ranks share: random numbers of each rank, and checks of plan and code.

Between a column-wise and a row-wise layer, each rank has a part of the features. So each draws its own random numbers
there, for dropout. Everywhere else all ranks that share layers draw the same.

Checks find what would otherwise train wrong without a word. Code may read the number of heads of all ranks. So a module
that holds cut layers is called once with these and once with whole ones. A layer between cut ones may be missing in the
plan. So losses, and gradients of whole layers, are compared between the ranks that share the others. And a loss may
take a part of the features. Its graph shows that.
"""

import copy
import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.tensor_trees import leaves, replace_leaves
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.activation_checkpointing import BuffersKept
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.cuts import whole as full
from lightning_parstrat.distributed.fsdp.tensor_plan import PlannedLayer, TensorPlanError, region_of
from lightning_parstrat.distributed.fsdp.whole import plain
from lightning_parstrat.distributed.torch_compat import current_graph_task_id

_TOLERANCE = 1e-3
"""Of a result in fp32, relative to its largest element."""

_DIFFERENCE = 1e-2
"""Of the norm of a gradient."""

_DIFFERENCE_OF_LOSS = 1e-4
"""Of a loss. The ranks compute it from the same numbers."""

_ROUNDING = 1e-5
"""Of the largest norm of a gradient. Smaller gradients may be nothing but roundings."""

_COMPARED_STEPS = 100
"""The steps in which each gradient is compared. It may begin with nothing but roundings."""

_IS_PART = "lightning_parstrat: a part of the features"
"""The key of what is noted at a node of a graph."""


class TensorLayers:
    """Follows a module whose layers are cut, from now on.

    Nothing is compiled until the first step has ended, so that all is checked. Compiled code does not call the hooks
    that are here, unless layers between cut ones have drawn random numbers by then.

    Args:
        module: The module. Its layers are cut.
        planned: The layers.
        device: The device of the module.
    """

    def __init__(self, module: nn.Module, planned: Sequence[PlannedLayer], device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._regions: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """By the seed of each region of this step: the generators' states before it, and at its beginning.

        The seed of a generator's state tells whether a forward is within a region. A recomputation may begin or end in
        the middle of one.
        """
        cut = {parameter for one in planned for parameter in one.layer.parameters()}
        self._whole = {name: parameter for name, parameter in module.named_parameters() if parameter not in cut}
        self._compared: Counter[str] = Counter()
        self._loss = torch.zeros(())
        """The sum of the losses of this step."""
        self._group = next(one.device_mesh for one in cut if isinstance(one, DTensor)).get_group("tensor")
        self._draws = False
        """Whether code between cut layers has drawn random numbers."""
        self._first_step = ExitStack()
        """Until it is closed, nothing is compiled in this process."""
        self._first_step.enter_context(torch.compiler.set_stance("force_eager"))
        self._hooks: list[RemovableHandle] = []
        named = dict(module.named_modules())
        self.unchecked: list[str] = []
        """Names of modules that are not compared with whole layers, as layers in them divide the sequence."""
        self._called: Counter[str] = Counter()
        """How many calls of each module with cut layers run now."""
        for one in planned:
            layout = getattr(one.style, "output_layouts", (None,))[0]
            if isinstance(layout, Shard) and not one.gives_shards:
                check = functools.partial(_check_divides, one.name, layout.dim, dist.get_world_size(self._group))
                self._hooks.append(one.layer.register_forward_pre_hook(check, prepend=True))
            if isinstance(one.style, (ColwiseParallel, RowwiseParallel)):
                self._hooks.append(one.layer.register_forward_pre_hook(self._leave))
            self._hooks.append(one.layer.register_forward_hook(functools.partial(_refuse_graphs, one.name)))
            if one.gives_shards or one.takes_shards:
                self._hooks.append(one.layer.register_forward_hook(functools.partial(_mark, one.gives_shards)))
            if one.gives_shards:
                check = functools.partial(self._check_is_called, one.name, region_of(one, planned, named))
                self._hooks.append(one.layer.register_forward_pre_hook(check))
                self._hooks.append(one.layer.register_forward_hook(self._enter))
        for name in dict.fromkeys(region_of(one, planned, named) for one in planned if one.gives_shards):
            begin, end = (functools.partial(call, name) for call in (self._begin, self._end))
            self._hooks.append(named[name].register_forward_pre_hook(begin, prepend=True))
            # Random numbers of each rank end there at the latest, and if an exception ends the forward.
            self._hooks.append(named[name].register_forward_hook(end, always_call=True))
            own = [one for one in planned if one.name.startswith(f"{name}.")]
            if all(map(_is_whole_outside, own)):
                self._check_at_first_call(named[name], name, [one.layer for one in own if one.takes_shards])
            else:
                self.unchecked.append(name)

    def close(self) -> None:
        """Removes the hooks, and lets code be compiled. Not collective."""
        self._first_step.close()
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._called[name] += 1

    def _end(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._called[name] -= 1
        self._leave()

    def _check_is_called(self, layer: str, region: str, *_: Any) -> None:
        # Activation checkpointing may call a part again, in a backward.
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and not self._called[region] and current_graph_task_id() == -1 and not self._compared:
            raise TensorPlanError(
                f"{layer!r} was called, and {region!r}, which holds it, was not. So it cannot be checked that the code"
                f" of {region!r} fits the tensor-parallel plan. Call the module, not a method of it."
            )

    # Random numbers.

    def _enter(self, layer: nn.Module, *_: Any) -> None:
        if layer.training and (self._draws or not torch.compiler.is_compiling()):
            shared = self._states()
            # The same in a recomputation, which begins with the same states.
            seed = digest(b"".join([str(dist.get_rank()).encode(), *(state.numpy().tobytes() for state in shared)]))
            for generator in self._generators:
                generator.manual_seed(seed)
            self._regions[seed] = shared, self._states()

    def _leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling() and not self._draws:
            return
        seed = self._generators[0].initial_seed()
        if seed not in self._regions:
            return
        shared, begun = self._regions[seed]
        is_drawn = not all(map(torch.equal, self._states(), begun))
        self._draws = self._draws or is_drawn
        for generator, state in zip(self._generators, shared, strict=True):
            generator.set_state(state)
            if is_drawn:
                # Otherwise the next region would draw the same.
                torch.rand((), generator=generator, device=generator.device)
        if not torch.is_grad_enabled():
            # Nothing of it is computed again.
            del self._regions[seed]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    # The first call.

    def _check_at_first_call(self, part: nn.Module, name: str, row_wise: Sequence[nn.Module]) -> None:
        is_checked = False

        def check(part: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal is_checked
            # Once more if the first call was one of an evaluation.
            if part.training:
                handle.remove()
            if part.training or not is_checked:
                is_checked = True
                self._check(part, name, row_wise, (args, kwargs))

        handle = part.register_forward_pre_hook(check, with_kwargs=True)
        self._hooks.append(handle)

    @torch.no_grad()
    def _check(self, part: nn.Module, name: str, row_wise: Sequence[nn.Module], inputs: Any) -> None:
        """Calls a module with its layers cut and with whole layers. Collective. It sends the module's parameters once.

        What cannot be called twice, or draws random numbers in evaluation, is not checked.

        Raises:
            TensorPlanError: The results differ. Or the module can be called with whole layers alone.
        """
        training = [inner for inner in part.modules() if inner.training]
        inner_units = [inner for inner in part.modules() if isinstance(inner, FSDPModule) and inner is not part]
        before, fault = self._states(), None
        for unit in inner_units:
            unit.unshard()
        try:
            part.eval()
            for inner in training:
                # Norms of batches take their statistics over all heads in a training alone.
                inner.training = hasattr(inner, "track_running_stats")
            with torch.autocast(next(part.parameters()).device.type, enabled=False):
                try:
                    cut = _tensors_of(part, inputs, row_wise, True)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    fault = error
                draws = not all(map(torch.equal, self._states(), before))
                whole = _tensors_of(part, inputs, row_wise, False)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # If whole layers cannot be called, either, training raises the error.
            return
        finally:
            for inner in training:
                inner.training = True
            for unit in inner_units:
                unit.reshard()
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)
        # All of them, as whole tensors are collective.
        differ = [] if fault is not None else [self._differ(*pair) for pair in zip(cut, whole, strict=False)]
        if fault is not None or (not draws and (len(cut) != len(whole) or any(differ))):
            raised = "" if fault is None else f" It raises {type(fault).__name__}: {fault}."
            raise TensorPlanError(
                f"With the layers of its tensor-parallel plan cut, {name!r} computes something else than with whole"
                f" layers. Its `forward` may read a number that is of all ranks, as in `view(batch, length,"
                f" self.num_heads, -1)`. Each rank has a part of the heads: write `view(batch, length, -1,"
                f" self.head_dim)`. Or a layer between cut ones is not in the plan: put it in. Or leave its layers out."
                f"{raised}"
            ) from fault

    def _differ(self, one: Tensor, whole: Tensor) -> bool:
        # A tensor of all features, or of this rank's part. Others are of its heads, such as the weights of attention.
        one = full(one).float()
        if one.shape != whole.shape:
            whole = whole.tensor_split(dist.get_world_size(self._group), -1)[dist.get_rank(self._group)]
        if one.shape != whole.shape or not one.numel():
            return False
        largest = float(whole.float().nan_to_num(0.0, 0.0, 0.0).abs().max())
        # Both may have NaN in a place, such as a row that a mask hides.
        return not torch.allclose(one, whole.float(), rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)

    # Gradients.

    def note_loss(self, loss: Tensor) -> None:
        """Adds a loss to those that are compared when the step ends. Not collective.

        Raises:
            TensorPlanError: It takes a part of the features.
        """
        if _takes_part(loss):
            raise TensorPlanError(_PART_IN_LOSS)
        self._loss = self._loss + loss.detach().float().sum()

    @torch.no_grad()
    def compare_gradients(self, used: set[Tensor], control: Collectives) -> None:
        """Compares losses, and gradients of whole layers if these are no roundings. Collective, in the first steps.

        Args:
            used: Parameters that some rank has used in this step, the same on all ranks.
            control: Works on host memory.

        Raises:
            TensorPlanError: They differ. Raised on all ranks.
        """
        self._first_step.close()
        self._regions.clear()
        loss, self._loss = self._loss, torch.zeros(())
        found = {
            name: one for name, one in self._whole.items() if one in used and self._compared[name] < _COMPARED_STEPS
        }
        if not found:
            return
        self._compared.update(found.keys())
        norms, apart = (torch.stack(values) for values in zip(*map(self._norms, found.values()), strict=True))
        loss = loss.to(norms.device)
        most = torch.cat((norms, apart, loss.reshape(1), -loss.reshape(1)))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        norms, apart = most[:-2].chunk(2)
        of_gradients = (norms > _ROUNDING * norms.max()) & (apart > _DIFFERENCE * norms)
        of_loss = most[-2] + most[-1] > _DIFFERENCE_OF_LOSS * most[-2].abs()
        differs = torch.cat((of_gradients, of_loss.reshape(1)))
        # Ranks that share other layers have other shards of these.
        differs = differs.to(torch.uint8).cpu()
        control.all_reduce(differs, op=dist.ReduceOp.MAX).wait()
        *of_norms, is_other_loss = differs.tolist()
        differing = [name for name, is_different in zip(found, of_norms, strict=True) if is_different]
        if is_other_loss and not differing:
            raise TensorPlanError(_PART_IN_LOSS)
        if differing:
            raise TensorPlanError(
                "The ranks that share tensor-parallel layers have different gradients of"
                f" {listed(differing)}, which the plan leaves whole. Either it is used between layers that"
                " are cut: leave these out of the plan. A norm of each head may be put in, as"
                " 'replicated_with_grad_allreduce'."
                " Or the whole of a tensor is dropped out between cut layers: do that before or after them."
            )

    def _norms(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a gradient, and that of its difference to the mean over ranks. Collective."""
        given = parameter.grad
        gradient = torch.zeros_like(local(parameter)).float() if given is None else local(given).float()
        mean = gradient.clone()
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        return gradient.norm(), (gradient - mean).norm()


_PART_IN_LOSS = (
    "A loss takes a part of the features, such as by a hook on a layer that is cut. The ranks that share"
    " tensor-parallel layers would have different losses. Take what the row-wise layer returns, or leave the layer out"
    " of the plan."
)


def _check_divides(name: str, dim: int, ranks: int, layer: nn.Module, args: Any) -> None:
    """Raises if ranks cannot divide the sequence that a layer returns. torch would end the process."""
    if not args:
        return
    # An embedding takes no features, which are the last dimension of what it returns.
    size = args[0].size(dim + 1 if dim < 0 and isinstance(layer, nn.Embedding) else dim)
    if size % ranks:
        raise TensorPlanError(
            f"The tensor-parallel plan divides dimension {dim} of what {name!r} returns, and"
            f" tensor_parallel_size={ranks} does not divide its size {size}. Pad sequences to a multiple."
        )


def _mark(is_part: bool, _: nn.Module, __: Any, output: Any) -> None:
    """Notes at a node of the graph that a rank has a part of the features there, or that parts were summed."""
    if not torch.compiler.is_compiling() and isinstance(output, Tensor) and output.grad_fn is not None:
        cast(Any, output.grad_fn).metadata[_IS_PART] = is_part


def _takes_part(loss: Tensor) -> bool:
    """Whether a loss is computed from a part of the features, and not from a sum of parts.

    What lies behind functions in Python is not seen: they may contain a sum, as in a reentrant checkpoint.
    """
    seen, left = set[Any](), list[Any]([loss.grad_fn])
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_part = node.metadata.get(_IS_PART)
        if is_part:
            return True
        if is_part is None and not isinstance(node, BackwardCFunction):
            left += [one for one, _ in node.next_functions]
    return False


def _is_whole_outside(one: PlannedLayer) -> bool:
    """Whether a module that holds a layer takes and gives whole tensors, unless they come from other such layers."""
    if isinstance(one.style, ColwiseParallel):
        return one.style.input_layouts[0].is_replicate()
    return isinstance(one.style, RowwiseParallel) and one.style.output_layouts[0].is_replicate()


def _tensors_of(part: nn.Module, inputs: Any, row_wise: Sequence[nn.Module], keeps_cut: bool) -> list[Tensor]:
    """The inputs of row-wise layers in a call of a module, and its output, with its layers cut or whole."""
    own = [(owner, *pair) for owner in part.modules() for pair in list(owner.named_parameters(recurse=False))]
    given: list[Tensor] = []
    with plain(part, keeps_cut), BuffersKept(list(part.buffers())):
        hooks = [one.register_forward_pre_hook(lambda _, args: given.append(args[0]), prepend=True) for one in row_wise]
        try:
            for owner, name, parameter in own:
                value = parameter.detach() if keeps_cut else full(parameter.detach())
                setattr(owner, name, nn.Parameter(_wide(value), False))
            args, kwargs = copy.deepcopy(replace_leaves(inputs, lambda tensor: _wide(tensor.detach())))
            # Of the class: an object may count its calls.
            output = type(part).forward(part, *args, **kwargs)
            return [*given, *(leaf.tensor for leaf in leaves(output))]
        finally:
            for hook in hooks:
                hook.remove()
            for owner, name, parameter in own:
                setattr(owner, name, parameter)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _refuse_graphs(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
    """Refuses gradients of gradients through a cut layer: torch cuts them off without a word."""
    if torch.compiler.is_compiling():
        # It has no gradients of gradients.
        return

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise TensorPlanError(
                f"A loss contains gradients that go through {name!r}, a tensor-parallel layer. torch cannot compute"
                " gradients of these. Leave the layer out of the plan, or compute the loss without gradients."
            )

    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(refuse)  # type: ignore[no-untyped-call]
