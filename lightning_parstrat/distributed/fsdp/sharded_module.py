"""A module sharded by torch's FSDP2. Its gradients are those that DDP would leave: only used parameters have one.

FSDP2 reduces the gradients that each rank has used. Ranks that have used different parameters would wait for each
other. Here, each rank sends zeros for parameters that it has not used. A parameter that no rank has used then gets no
gradient, so optimizers do not change it. Parameters that FSDP2 cannot shard are kept whole on every rank, and averaged
when backward ends.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.digests import digest
from lightning_parstrat.distributed.comm.agreement import all_have_same, any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError
from lightning_parstrat.distributed.fsdp.graphs_through_gradients import GraphsThroughGradients, Leaf, without_gradient
from lightning_parstrat.distributed.fsdp.held_parameters import refuse_uses
from lightning_parstrat.distributed.fsdp.kept_writes import keep_writes, refuse_assigned
from lightning_parstrat.distributed.fsdp.meta import agree_on_parts, make_on_device
from lightning_parstrat.distributed.fsdp.reduce_scatter import ExchangedReduceScatter
from lightning_parstrat.distributed.fsdp.state import shard_like
from lightning_parstrat.distributed.fsdp.units import find_units, rounded_by_autocast, whole_parameters
from lightning_parstrat.distributed.fsdp.whole import let_be_copied
from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import (
    current_graph_task_id,
    fsdp_params_of,
    gather_in,
    gathered_by_fsdp,
    has_hooks,
    is_gathered_in_a_chosen_dtype,
    lend_hooks,
    multiply_all,
    names_ignored_by_ddp,
    reduce_unused_too,
    replays_captured_graphs,
    take_over_attributes,
)

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that are called instead of ``forward``."""


class DifferentModulesError(NoCollectivesError):
    """The ranks have run different modules in a step, or their backwards have. Raised on all of them."""


class NestedBackwardError(NoCollectivesError):
    """A backward has run within another one."""


class ShardedModule:
    """Shards a module in place, and follows its backwards. The constructor is collective.

    Each unit's parameters get memory and rank 0's values, and are sharded, before the next unit's are. So a module on
    the meta device is never on a device as a whole.

    Args:
        module: On the host, on the device or on the meta device, which may differ by rank. Its class becomes a subclass
            of FSDP2's.
        collectives: Carry gradients. FSDP2 gathers parameters by their process group.
        device: The device on which the module is to train.
        messages: Combine over ranks which parameters were used. Every backward that sends has one message.
        wrap: See :func:`~lightning_parstrat.distributed.fsdp.units.find_units`.
        min_num_params: As ``wrap``.
        by_child: Whether training calls children of the root instead of one of :data:`STEPS`, as in manual
            optimization. Then the root itself has no parameters that are gathered.
        reshard_after_forward: Whether units free their parameters between forward and backward.
        gather_dtype: The dtype in which parameters are gathered and used. None for their own. Autocast decides the
            dtype of the computation, as under DDP.
        gathers_as_autocast: Whether ``gather_dtype`` applies only to parameters that autocast would round anyway.
        reduce_dtype: The dtype in which gradients are sent. None for their own. They are summed in fp32, or in fp64 if
            that is their own.

    Raises:
        ValueError: A parameter that rank 0 has on the meta device cannot be made. Or ``wrap`` names no class of a
            module, or a part of the module replays a captured graph. Or the group sends from host memory, and the
            device is another.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        device: torch.device,
        messages: Callable[[], ControlMessages],
        *,
        wrap: Sequence[str] = (),
        min_num_params: int = 0,
        by_child: bool = False,
        reshard_after_forward: bool = True,
        gather_dtype: torch.dtype | None = None,
        gathers_as_autocast: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if replays_captured_graphs(module):
            raise ValueError(
                "A part of the module replays a CUDA graph that was captured before the training, and would go on"
                " reading parameters as they were then, whole. zero3_custom frees those: leave out"
                " `torch.cuda.make_graphed_callables`, or train by `ddp`, or by `zero1_custom` with the graph captured"
                " in `on_train_start`."
            )
        self.module = module
        self.group = collectives.group
        self._collectives = collectives
        self._messages = messages
        self._device = device
        self._reshards_after_forward = reshard_after_forward
        if not is_sharded_module(module):
            self._shard(wrap, min_num_params, by_child, reshard_after_forward)
        self.units = [part for part in self._parts if part is not module]
        for part in self._parts:
            reduce_unused_too(part)
        self._choose_gather_dtypes(gather_dtype, gathers_as_autocast)
        keep_writes(module, self._parts)
        self._choose_reduce_scatter(reduce_dtype)
        self._whole = [p for p in module.parameters() if not isinstance(p, DTensor)]
        ignored = names_ignored_by_ddp(module)
        trains = [p for name, p in module.named_parameters() if name not in ignored and not isinstance(p, DTensor)]
        self._averaged = [p for p in trains if p.is_floating_point() or p.is_complex()]
        self.leaves = self._find_leaves()
        named: Iterable[tuple[str, Tensor]] = module.named_parameters()
        self._storages = [(name, p, p.untyped_storage()) for name, p in named if isinstance(p, DTensor)]
        self._graphs = GraphsThroughGradients(module, self.units, self.leaves)
        self._lent: dict[Tensor, RemovableHandle] = {}
        self._used: set[int] = set()
        self._backwards = 0
        self._is_stuck = False
        self._graph_tasks: set[int] = set()
        self._called: list[int] = []
        self._evaluated: list[int] = []
        self._evaluation_digest = 0
        self.unit_called = ""
        """The name of the unit that this rank has called last. Between steps, empty."""
        self._before_gradients: Callable[[], None] | None = None
        self._without_gradient: set[int] | None = None
        self._hooks = [*self._register_hooks(), *self._graphs.hooks]
        if not by_child:
            for step in STEPS:
                register_fsdp_forward_method(module, step)

    def _shard(self, wrap: Sequence[str], min_num_params: int, by_child: bool, reshard_after_forward: bool) -> None:
        module = self.module
        units = find_units(module, wrap, min_num_params, by_child)
        whole = whole_parameters(module, units)
        if by_child:
            inside = {parameter for unit in units for parameter in unit.parameters()}
            whole |= {p for p in module.parameters() if p not in inside and not isinstance(p, DTensor)}
        to_reset = agree_on_parts(module, whole, self.group, self._device)
        before = dict(module.named_parameters())
        mesh = DeviceMesh.from_group(self.group, self._device.type)

        def shard_part(part: nn.Module, **kwargs: Any) -> None:
            make_on_device(part, whole, to_reset, self.group, self._device)
            policy = MixedPrecisionPolicy(reduce_dtype=_summed_in(part, whole), cast_forward_inputs=False)
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=cast(Any, whole), **kwargs)
            for _, fsdp_param in fsdp_params_of(part):
                gather_in(fsdp_param, None)

        for unit in units:
            shard_part(unit, reshard_after_forward=reshard_after_forward)
        own = set(vars(module))
        # By default, the root's parameters stay gathered from forward to backward, which follow each other at once.
        shard_part(module)
        let_be_copied(self._parts, {*STEPS, *vars(module)} - own)
        for name, parameter in module.named_parameters():
            if parameter is not before[name]:
                take_over_attributes(before[name], parameter)
                refuse_uses(before[name], module, name)

    def _choose_gather_dtypes(self, gather_dtype: torch.dtype | None, gathers_as_autocast: bool) -> None:
        # Chosen again for each training: an earlier one may have had another precision.
        self._free()
        rounded = rounded_by_autocast(self.module)
        for part in self._parts:
            for parameter, fsdp_param in fsdp_params_of(part):
                is_narrow = parameter in rounded if gathers_as_autocast else parameter.dtype == torch.float32
                if is_gathered_in_a_chosen_dtype(fsdp_param):
                    gather_in(fsdp_param, gather_dtype if is_narrow else None)

    def _choose_reduce_scatter(self, reduce_dtype: torch.dtype | None) -> None:
        collectives = self._collectives
        if collectives.world_size == 1:
            return
        collectives.connect(self._device)
        for part in self._parts:
            own = next((shard.dtype for shard, _ in fsdp_params_of(part)), None)
            travels_in = reduce_dtype if own == torch.float32 or reduce_dtype == torch.float32 else own
            if travels_in not in (torch.bfloat16, torch.float16) or collectives.widens:
                travels_in = None
            # For all parts: an earlier training of the module may have had another setting.
            part.set_custom_reduce_scatter(ExchangedReduceScatter(collectives, travels_in))

    @property
    def _parts(self) -> list[Any]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def reshard_root_after_forward(self) -> None:
        """Frees the root's parameters between forward and backward, too. Then no hook sees gathered parameters."""
        cast(FSDPModule, self.module).set_reshard_after_forward(True, recurse=False)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def whole_elements(self) -> int:
        """Number of elements that every rank has."""
        return sum(parameter.numel() for parameter in self._whole)

    @property
    def has_begun(self) -> bool:
        """Whether a backward has begun whose gradients are to be completed."""
        return self._without_gradient is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that optimizers step, even while other tensors are gathered."""
        return [leaf.parameter for leaf in self.leaves]

    def _find_leaves(self) -> list[Leaf]:
        """Gathers every unit once, as the leaves of graphs exist from then on. Collective."""
        self._free()
        found: dict[Any, Any] = {p: p for p in self.module.parameters() if not isinstance(p, DTensor)}
        for part in self._parts:
            part.unshard()
            found.update(gathered_by_fsdp(part))
            part.reshard()
        for parameter, leaf in found.items():
            # Gradients of parameters that are gathered in fewer bits are as wide as the parameter itself.
            leaf.grad_dtype = parameter.dtype
        return [Leaf(found[parameter], parameter) for parameter in self.module.parameters()]

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        for leaf, hook in self._hooks_of_leaves():
            yield leaf.register_post_accumulate_grad_hook(hook)
        names = {part: name for name, part in self.module.named_modules()}
        for number, unit in enumerate(self.units):
            # Before the hook that gathers: while this rank waits, other ranks can see its unit.
            note = functools.partial(self._note_forward, number, names[unit])
            yield cast(Any, unit).register_forward_pre_hook(note, prepend=True)

    def _hooks_of_leaves(self) -> Iterator[tuple[Any, Callable[[Tensor], None]]]:
        for number, leaf in enumerate(self.leaves):
            if not (leaf.tensor.is_floating_point() or leaf.tensor.is_complex()):
                continue
            trainable = leaf.tensor.requires_grad
            # A frozen parameter may be trained later.
            leaf.tensor.requires_grad_(True)
            yield leaf.tensor, functools.partial(self._note_gradient, number)
            leaf.tensor.requires_grad_(trainable)

    def _note_gradient(self, number: int, _: Tensor) -> None:
        if self._before_gradients is not None:
            self._before_gradients()
            return
        self._used.add(number)
        self._graph_tasks.add(current_graph_task_id())

    def _note_forward(self, number: int, name: str, *_: Any) -> None:
        self.unit_called = name
        if self._before_gradients is None:
            self._called.append(number)
            return
        if torch.is_grad_enabled():
            self._before_gradients()
        self._evaluated.append(number)

    def reshard(self) -> None:
        """Frees gathered parameters. The module's parameters are then those that optimizers step. Not collective."""
        self._graphs.forget()
        self._free()

    def assigned(self) -> str | None:
        """The name of a parameter whose ``data`` was set, if there is one. Not collective.

        torch accepts ``parameter.data = value`` of a shard, and continues with the old values. Such an assignment
        changes only the storage object of the parameter.
        """
        return next((name for name, one, storage in self._storages if one.untyped_storage() is not storage), None)

    def _free(self) -> None:
        self.unit_called = ""
        refused: list[Exception] = []
        for part in self._parts:
            # Writes that cannot be kept raise. All parts are freed before.
            try:
                part.reshard()
            except (RuntimeError, ValueError) as error:
                refused.append(error)
        for part in self._parts if hasattr(self.module, "reset_iter_state") else ():
            # An exception may have ended a forward or a backward. Only roots have a state to reset.
            try:
                part.reset_iter_state()
            except (AttributeError, RuntimeError) as error:
                refused += [] if "root FSDP module" in str(error) or isinstance(error, AttributeError) else [error]
        if refused:
            raise refused[0]

    @contextmanager
    def evaluation_step(self, before_gradients: Callable[[], None]) -> Iterator[None]:
        """Within it, gathers are noted for :meth:`follow_evaluation_step`. Not collective.

        Args:
            before_gradients: Called before a forward or a backward with gradients, which no rank can follow.
        """
        self._evaluated.clear()
        self._before_gradients = before_gradients
        try:
            yield
        finally:
            self._before_gradients = None
            self._evaluation_digest = digest((self._evaluation_digest, self._evaluated))
            # Without a backward, nothing else would free the parameters. Code between steps would see gathered ones.
            self.reshard()

    def follow_evaluation_step(self) -> None:
        """Repeats the gathers of the last step without gradients, in its order, for ranks that have one more.

        Collective: it replaces their step on a rank that has none.
        """
        root = cast(FSDPModule, self.module)
        root.unshard()
        for number in self._evaluated:
            self.units[number].unshard()
            if self._reshards_after_forward:
                self.units[number].reshard()
        self._evaluation_digest = digest((self._evaluation_digest, self._evaluated))
        self.reshard()

    def check_no_data_assigned(self, control: Collectives) -> None:
        """Checks whether code between steps has set ``data``, which torch ignores.

        Collective: one all-reduce of 16 bytes.

        Raises:
            RuntimeError: ``data`` of a shard was set on some rank. Raised on all ranks.
        """
        name = self.assigned()
        if any_rank(name is not None, control):
            refuse_assigned(name)

    def end_evaluation(self, control: Collectives) -> None:
        """Compares the evaluation steps since the last call. If there were any, collective: two messages of 16 bytes.

        Args:
            control: Works on host memory.

        Raises:
            DifferentModulesError: Ranks have called different units, or in another order. Raised on all ranks.
            RuntimeError: ``data`` of a shard was set on some rank. Raised on all ranks.
        """
        if not self._evaluation_digest:
            return
        self.check_no_data_assigned(control)
        called, self._evaluation_digest = self._evaluation_digest, 0
        if not all_have_same(called, control):
            raise DifferentModulesError(
                "The ranks called different modules in an evaluation, or in another order. Its results are wrong: a"
                " module's parameters are gathered from all ranks, which must call the same modules. Call a module on"
                " all ranks or on none; or leave such modules to the root by `wrap`, which names the others."
            )

    def accumulate_whole(self, accumulates: bool) -> None:
        """Whether gradients of the next backwards stay unreduced, and whole on every rank."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(not accumulates)

    def begin_backward(self) -> None:
        """Call before every backward whose gradients :meth:`end_backward` is to complete.

        If it runs through gradients, it is collective: all ranks gather the parameters from which they were computed.
        """
        if self._is_stuck:
            raise RuntimeError(
                "An exception has ended an earlier backward. FSDP2 of torch 2.12 and older cannot go on after that:"
                " take torch 2.13 or newer, or train by `zero1_custom`."
            )
        self._backwards += 1
        for leaf in self.leaves:
            # Before a backward, look for users' hooks on the parameters that it may reach.
            if leaf.tensor is not leaf.parameter and leaf.tensor not in self._lent and has_hooks(leaf.parameter):
                self._lent[leaf.tensor] = lend_hooks(leaf.parameter, leaf.tensor)
        if self._without_gradient is None:
            # Tasks of a backward that was not announced.
            self._graph_tasks.clear()
            self._without_gradient = without_gradient(self.leaves) | self._graphs.had_no_gradient
        self._graphs.begin_backward()

    def end_backward(self, factor: Callable[[], float]) -> None:
        """Completes the gradients of the backwards since the last call. Collective: one control message.

        Args:
            factor: The factor for the gradients' mean over ranks. It is called when the message has been launched.

        Raises:
            DifferentModulesError: Ranks have run different units, or in another order, in forward or in backward.
            NestedBackwardError: A backward has run within a backward, which FSDP2 reduces wrongly.
            RuntimeError: ``data`` of a shard was set on some rank before the step. Raised on all ranks.
        """
        if len(self._graph_tasks) > self._backwards:
            raise NestedBackwardError(
                "A backward has run within a training step's backward, after which FSDP2's gradients are wrong."
                " Activation checkpointing does so with use_reentrant=True: pass use_reentrant=False."
            )
        used = [number in self._used for number in range(len(self.leaves))]
        left_over = [leaf.tensor is not leaf.parameter and leaf.tensor.grad is not None for leaf in self.leaves]
        # In another order, ranks would add up gradients of different units.
        order, assigned = digest((self._called, self._graphs.reached)), self.assigned()
        combined = self._messages().launch(bytes([*used, *left_over, assigned is not None]), order).wait()
        if combined.flags[-1]:
            refuse_assigned(assigned)
        if not combined.is_alike:
            raise DifferentModulesError(
                "The ranks have called different modules in a training step, or in another order, or the loss is made"
                " of what different ones have returned. Each gathers its parameters from all ranks and sends gradients"
                " to all, so all must use the same: call a module that a rank has no use for, too, and add its result"
                " multiplied by 0; or leave such modules to the root by `wrap`, which names the others."
            )
        for number in self._without_gradient or ():
            if not combined.flags[number]:
                # As if it had not taken part: optimizers step parameters that have a gradient.
                self.leaves[number].parameter.grad = None
        self._average_whole(combined.flags)
        self._reduce_left_over(combined.flags[len(self.leaves) : -1])
        scale = factor()
        gradients = self._local_gradients() if scale != 1.0 else []
        if gradients:
            multiply_all(gradients, scale)
        self._forget_backwards()

    def abandon_backward(self) -> None:
        """Drops a backward that an exception has ended, with its gradients that were not reduced. Not collective."""
        # The user must see the exception that has ended the backward, not one of this call.
        with suppress(RuntimeError, ValueError):
            self.reshard()
        for leaf in self.leaves:
            if leaf.tensor is not leaf.parameter:
                leaf.tensor.grad = None
        for part in self._parts:
            for _, fsdp_param in fsdp_params_of(part):
                fsdp_param.unsharded_accumulated_grad = None
        self._forget_backwards()
        self._is_stuck = not hasattr(self.module, "reset_iter_state")

    def _forget_backwards(self) -> None:
        self._used.clear()
        self._called.clear()
        self._graphs.reached.clear()
        self._graph_tasks.clear()
        self._backwards = 0
        self._without_gradient = None

    @torch.no_grad()
    def _average_whole(self, used: Sequence[int]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        numbers = {leaf.parameter: number for number, leaf in enumerate(self.leaves)}
        for parameter in self._averaged:
            if used[numbers[parameter]] and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype[parameter.dtype].append(parameter.grad)
        size = dist.get_world_size(self.group)
        for gradients in by_dtype.values() if size > 1 else ():
            # Usually few and small.
            together = _wide(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            dist.all_reduce(real_view(together), group=self.group)
            together /= size
            means = torch.split(together, [gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def _reduce_left_over(self, left_over: Sequence[int]) -> None:
        """Reduces gradients that FSDP2 has not reduced.

        Their units' output had no gradient, but tensors computed from it had.
        """
        for leaf, is_left in zip(self.leaves, left_over, strict=True):
            if is_left:
                gradient, parameter = leaf.tensor.grad, leaf.parameter
                leaf.tensor.grad = None
                mean = torch.zeros_like(leaf.tensor) if gradient is None else gradient
                mean = _wide(mean.to(parameter.dtype))
                dist.all_reduce(mean, group=self.group)
                own = shard_like(mean.div_(dist.get_world_size(self.group)).to(parameter.dtype), parameter)
                if parameter.grad is None:
                    parameter.grad = own
                else:
                    local(parameter.grad).add_(local(own))

    def _local_gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def close(self) -> None:
        """Removes the additions to the module, which stays sharded. Not collective.

        An unfinished step of an exception is dropped. Otherwise another training would use its gradients.
        """
        self.abandon_backward()
        for hook in (*self._hooks, *self._lent.values()):
            hook.remove()
        for step in STEPS:
            with suppress(KeyError):
                del vars(self.module)[step]


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in a dtype in which gradients are summed: 16 bits become fp32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_sharded_module(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded the module."""
    return isinstance(module, FSDPModule)


def _summed_in(part: nn.Module, whole: set[Tensor]) -> torch.dtype | None:
    """The dtype in which FSDP2 is to sum the gradients of a module's own shards. None for their own dtype."""
    dtypes = {p.dtype for p in part.parameters() if p not in whole and not isinstance(p, DTensor)}
    return None if torch.float64 in dtypes else torch.float32
