"""A module sharded by torch's FSDP2. Its gradients are those that DDP would leave: only used parameters have one.

FSDP2 reduces the gradients that each rank has used. Ranks that have used different parameters would wait for each
other. Here, each rank sends zeros for parameters that it has not used. A parameter that no rank has used then gets no
gradient, so optimizers do not change it. Parameters that FSDP2 cannot shard are kept whole on every rank, and averaged
when backward ends.

FSDP2 gathers a unit's parameters when a backward reaches the unit's output, and frees them when it has left the unit.
If a loss contains gradients, such as a gradient penalty, its backward needs the parameters behind them from its
beginning to its end. They are gathered for that long.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.comm.agreement import all_have_same
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError
from lightning_parstrat.distributed.fsdp.kept_writes import RefusedWriteError, keep_writes, refuse_assigned
from lightning_parstrat.distributed.fsdp.reduce_scatter import ExchangedReduceScatter
from lightning_parstrat.distributed.fsdp.sharding import is_sharded_module, shard
from lightning_parstrat.distributed.fsdp.state import let_whole_states_be_loaded
from lightning_parstrat.distributed.fsdp.units import rounded_by_autocast
from lightning_parstrat.distributed.fsdp.whole import STEPS
from lightning_parstrat.distributed.gradients.local_tensors import local
from lightning_parstrat.distributed.torch_compat import (
    current_graph_task_id,
    fsdp_params_of,
    gather_in,
    gathered_by_fsdp,
    has_hooks,
    lend_hooks,
    multiply_all,
    names_ignored_by_ddp,
    reduce_again,
    reduce_unused_too,
    replays_captured_graphs,
)


class DifferentModulesError(NoCollectivesError):
    """The ranks have run different modules in a step, or their backwards have. Raised on all of them."""


class NestedBackwardError(NoCollectivesError):
    """A backward has run within another one."""


class Leaf(NamedTuple):
    """A parameter, and the leaf of the graph for which a backward computes its gradient.

    Attributes:
        tensor: The leaf: the gathered tensor of a sharded parameter, or the parameter itself.
        parameter: The parameter that optimizers step.
    """

    tensor: Tensor
    parameter: Tensor


class ShardedModule:
    """Shards a module in place, and follows its forwards and backwards in one training. The constructor is collective.

    Args:
        module: See :func:`~lightning_parstrat.distributed.fsdp.sharding.shard`. Or an earlier training has sharded it.
        collectives: Carry gradients. FSDP2 gathers parameters by their process group.
        device: The device on which the module is to train.
        messages: Combine over ranks which parameters were used. Every backward that sends has one message.
        policy: How to shard, gather and reduce. Gradients in fp64 are summed in that.
        by_child: Whether training calls children of the root instead of one of :data:`STEPS`, as in manual
            optimization. Then the root itself has no parameters that are gathered.
        autocasts: Whether autocast rounds to bf16.

    Raises:
        ValueError: The module cannot be sharded. Or a part of it replays a captured graph. Or the group sends from host
            memory, and the device is another.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        device: torch.device,
        messages: Callable[[], ControlMessages],
        policy: FullShardingPolicy,
        *,
        by_child: bool,
        autocasts: bool,
    ) -> None:
        if replays_captured_graphs(module):
            raise ValueError(
                "A part of the module replays a CUDA graph that was captured before the training, and reads memory that"
                " zero3_custom frees. Leave out `torch.cuda.make_graphed_callables`, or train by `ddp`, or by"
                " `zero1_custom` with the graph captured in `on_train_start`."
            )
        self.module = module
        self._group = collectives.group
        self._messages = messages
        self._policy = policy
        is_new = not is_sharded_module(module)
        if is_new:
            shard(module, self._group, device, policy, by_child)
        self.units = [part for part in self._parts if part is not module]
        self.unit_called = ""
        """The name of the unit that this rank has called last. Between steps, empty."""
        self._zeroed: set[Tensor] = set()
        self._forget_backwards()
        self._run_through: set[int] = set()
        self._is_stuck = self._keeps_whole = False
        self._evaluated: list[int] = []
        self._evaluation_digest = 0
        self._before_gradients: Callable[[], None] | None = None
        # An earlier training may have had another precision.
        self._choose_param_dtypes(autocasts)
        self._choose_reduce_scatter(collectives, device)
        self.leaves = self._find_leaves()
        if is_new:
            let_whole_states_be_loaded(module)
        self._gathered = [[gathered for _, gathered in gathered_by_fsdp(part)] for part in self._parts]
        named: list[tuple[str, Tensor]] = list(module.named_parameters())
        self._storages = [(name, p, p.untyped_storage()) for name, p in named if isinstance(p, DTensor)]
        ignored = names_ignored_by_ddp(module)
        self._averaged = [
            (number, p)
            for number, (name, p) in enumerate(named)
            if name not in ignored and not isinstance(p, DTensor) and (p.is_floating_point() or p.is_complex())
        ]
        self._hooks = [*self._register_hooks()]
        self._lent: dict[Tensor, RemovableHandle] = {}
        if not by_child:
            for step in STEPS:
                register_fsdp_forward_method(module, step)
        for part in self._parts:
            # They get a gradient that DDP would not leave, unless another rank has used them.
            reduce_unused_too(part, self._zeroed.add)
        root = cast(FSDPModule, module)
        # The rest of a training step may use the root's parameters after a backward of the user's own.
        root.set_reshard_after_backward(False, recurse=False)
        # An exception may have ended an earlier training while gradients accumulated.
        root.set_requires_gradient_sync(True)

    def _choose_param_dtypes(self, autocasts: bool) -> None:
        self._free()
        narrow: set[Tensor] = set()
        if self._policy.param_dtype == "bf16":
            narrow = {parameter for parameter in self.module.parameters() if parameter.dtype == torch.float32}
        elif self._policy.param_dtype == "auto" and autocasts:
            narrow = rounded_by_autocast(self.module)
        for part in self._parts:
            for parameter, fsdp_param in fsdp_params_of(part):
                gather_in(fsdp_param, torch.bfloat16 if parameter in narrow else None)

    def _choose_reduce_scatter(self, collectives: Collectives, device: torch.device) -> None:
        if collectives.world_size == 1:
            return
        collectives.connect(device)
        dtypes: dict[object, torch.dtype | None] = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
        comm_dtype = dtypes[self._policy.comm_dtype]
        for part in self._parts:
            own = next((shard.dtype for shard, _ in fsdp_params_of(part)), None)
            travels_in = comm_dtype if own == torch.float32 or comm_dtype == torch.float32 else own
            if travels_in not in (torch.bfloat16, torch.float16) or collectives.widens:
                travels_in = None
            # For all parts: an earlier training of the module may have had another setting.
            part.set_custom_reduce_scatter(ExchangedReduceScatter(collectives, travels_in))

    def _find_leaves(self) -> list[Leaf]:
        """Gathers every unit once, as the leaves of graphs exist from then on. Collective."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        found: dict[Any, Any] = {parameter: parameter for parameter in names if not isinstance(parameter, DTensor)}
        for part in self._parts:
            part.unshard()
            found.update(gathered_by_fsdp(part))
            keep_writes(part, names)
            part.reshard()
        for parameter, leaf in found.items():
            # Gradients of parameters that are gathered in fewer bits are as wide as the parameter itself.
            leaf.grad_dtype = parameter.dtype
        return [Leaf(found[parameter], parameter) for parameter in names]

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        for number, leaf in enumerate(self.leaves):
            if leaf.tensor.is_floating_point() or leaf.tensor.is_complex():
                trainable = leaf.tensor.requires_grad
                # A frozen parameter may be trained later.
                leaf.tensor.requires_grad_(True)
                note = functools.partial(self._note_gradient, number)
                yield leaf.tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                leaf.tensor.requires_grad_(trainable)
        names = {part: name for name, part in self.module.named_modules()}
        for number, unit in enumerate(self.units):
            # Before the hook that gathers: while this rank waits, other ranks can see its unit.
            before = functools.partial(self._note_forward, number, names[unit])
            yield unit.register_forward_pre_hook(before, prepend=True)
            yield unit.register_forward_hook(functools.partial(self._note_output, number))

    @property
    def _parts(self) -> list[Any]:
        # None while the whole parameters are shown.
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that optimizers step, even while other tensors are gathered."""
        return [leaf.parameter for leaf in self.leaves]

    @property
    def has_begun(self) -> bool:
        """Whether a backward has begun whose gradients are to be completed."""
        return self._backwards > 0

    def reshard_root_after_forward(self) -> None:
        """Frees the root's parameters between forward and backward, too. Then no hook sees gathered parameters."""
        cast(FSDPModule, self.module).set_reshard_after_forward(True, recurse=False)

    def _note_forward(self, number: int, name: str, *_: Any) -> None:
        self.unit_called = name
        if self._before_gradients is None:
            self._order.append(number)
            return
        if torch.is_grad_enabled():
            self._before_gradients()
        self._evaluated.append(number)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_output(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in leaves(output):
                if leaf.tensor.requires_grad:
                    note = functools.partial(self._note_backward, number)
                    leaf.tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_backward(self, number: int, _gradient: Tensor) -> None:
        # Once for all that a call has returned: how much of the output is used may differ.
        if self._order[-1:] != [~number]:
            self._order.append(~number)
        # Grad mode is enabled in a backward that makes a graph of itself.
        if torch.is_grad_enabled():
            self._run_through.add(number)

    def _note_gradient(self, number: int, _: Tensor) -> None:
        if self._before_gradients is not None:
            self._before_gradients()
            return
        self._used.add(number)
        self._graph_tasks.add(current_graph_task_id())

    def reshard(self) -> None:
        """Frees gathered parameters. The module's parameters are then those that optimizers step. Not collective.

        Call it before a training step: graphs of the step before no longer exist.
        """
        if self._run_through:
            self.free_after_backward()
            self._run_through.clear()
        self._free()

    def _free(self) -> None:
        self.unit_called = ""
        refused: list[Exception] = []
        for part in self._parts:
            # Writes that cannot be kept raise. All parts are freed before.
            try:
                part.reshard()
            except RefusedWriteError as error:
                refused.append(error)
        for part in self._parts if hasattr(self.module, "reset_iter_state") else ():
            # An exception may have ended a forward or a backward. Parts that are no roots have no state, and raise.
            try:
                part.reset_iter_state()
            except RefusedWriteError as error:
                refused.append(error)
            except (AttributeError, RuntimeError):
                continue
        if refused:
            raise refused[0]

    # Evaluations.

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
            self._end_evaluation_step()

    def follow_evaluation_step(self) -> None:
        """Repeats the gathers of the last step without gradients, in its order, for ranks that have one more.

        Collective: it replaces their step on a rank that has none.
        """
        cast(FSDPModule, self.module).unshard()
        for number in self._evaluated:
            self.units[number].unshard()
            if self._policy.reshard_after_forward:
                self.units[number].reshard()
        self._end_evaluation_step()

    def _end_evaluation_step(self) -> None:
        self._evaluation_digest = digest((self._evaluation_digest, self._evaluated))
        # Without a backward, nothing else would free the parameters. Code between steps would see gathered ones.
        self.reshard()

    def end_evaluation(self, control: Collectives) -> None:
        """Compares the evaluation steps since the last call. If there were any, collective: a message of 16 bytes.

        Args:
            control: Works on host memory.

        Raises:
            DifferentModulesError: Ranks have called different units, or in another order. Raised on all ranks.
            RefusedWriteError: ``data`` of a shard was set on this rank.
        """
        if not self._evaluation_digest:
            return
        self.check_no_data_assigned()
        called, self._evaluation_digest = self._evaluation_digest, 0
        if not all_have_same(called, control):
            raise DifferentModulesError(
                "The ranks called different modules in an evaluation, or in another order. Its results are wrong: a"
                " module's parameters are gathered from all ranks, which must call the same modules. Call a module on"
                " all ranks or on none; or leave such modules to the root: name the others in `auto_wrap_policy`."
            )

    # Training steps.

    def begin_backward(self, accumulates: bool) -> None:
        """Call before every backward whose gradients :meth:`end_backward` is to complete.

        If it runs through gradients, it is collective: all ranks gather the parameters from which they were computed.

        Args:
            accumulates: Whether a later backward ends the window. Gradients accumulate in shards, or stay unreduced
                and whole on every rank, as the policy says.
        """
        if self._is_stuck:
            raise RuntimeError(
                "An exception has ended an earlier backward. FSDP2 of torch 2.12 and older cannot continue then:"
                " take torch 2.13 or newer, or train by `zero1_custom`."
            )
        if not self._backwards:
            # Tasks of a backward that was not announced.
            self._graph_tasks.clear()
        self._backwards += 1
        keeps_whole = accumulates and not self._policy.shard_gradients and dist.get_world_size(self._group) > 1
        if keeps_whole != self._keeps_whole:
            self._keeps_whole = keeps_whole
            cast(FSDPModule, self.module).set_requires_gradient_sync(not keeps_whole)
        for leaf in self.leaves:
            # Before a backward, look for users' hooks on the parameters that it may reach.
            if leaf.tensor is not leaf.parameter and leaf.tensor not in self._lent and has_hooks(leaf.parameter):
                self._lent[leaf.tensor] = lend_hooks(leaf.parameter, leaf.tensor)
        for number in sorted(self._run_through):
            self.units[number].set_reshard_after_backward(False, recurse=False)
            self.units[number].unshard()

    def free_after_backward(self) -> None:
        """Frees what FSDP2 leaves gathered after a backward. Not collective."""
        for number in self._run_through:
            self.units[number].set_reshard_after_backward(True, recurse=False)
            self.units[number].reshard()
        cast(FSDPModule, self.module).reshard()

    def end_backward(self, factor: Callable[[], float]) -> None:
        """Completes the gradients of the backwards since the last call. Collective: one control message.

        Args:
            factor: The factor for the gradients' mean over ranks. It is called when the message has been launched.

        Raises:
            DifferentModulesError: Ranks have run different units, or in another order, in forward or in backward.
            NestedBackwardError: A backward has run within a backward, which FSDP2 reduces wrongly.
            RefusedWriteError: ``data`` of a shard was set on some rank before the step. Raised on all ranks.
        """
        if len(self._graph_tasks) > self._backwards:
            raise NestedBackwardError(
                "A backward has run within a training step's backward, after which FSDP2's gradients are wrong."
                " Activation checkpointing does so with use_reentrant=True: pass use_reentrant=False."
            )
        used = [number in self._used for number in range(len(self.leaves))]
        # Gradients that came when FSDP2 had left the unit: of tensors computed from its parameters, not of its output.
        left_over = [any(one.grad is not None for one in gathered) for gathered in self._gathered]
        # In another order, ranks would add up gradients of different units.
        order, assigned = digest(self._order), self._assigned()
        combined = self._messages().launch(bytes([*used, *left_over, assigned is not None]), order).wait()
        if combined.flags[-1]:
            refuse_assigned(assigned)
        if not combined.is_alike:
            raise DifferentModulesError(
                "The ranks have called different modules in a training step, or in another order, or the loss is made"
                " of what different ones returned. All ranks must use the same modules, because each module gathers"
                " its parameters from all ranks. Call an unused module as well, and add its result multiplied by 0. Or"
                " leave such modules to the root: name the others in `auto_wrap_policy`."
            )
        for part, is_left in zip(self._parts, combined.flags[len(used) : -1], strict=True):
            if is_left:
                reduce_again(part)
        for leaf, was_used in zip(self.leaves, combined.flags, strict=False):
            if leaf.parameter in self._zeroed and not was_used:
                # As if it had not taken part: optimizers step parameters that have a gradient.
                leaf.parameter.grad = None
        self._average_whole([parameter for number, parameter in self._averaged if combined.flags[number]])
        scale = factor()
        gradients = [local(one.grad) for one in self.parameters if one.grad is not None] if scale != 1.0 else []
        if gradients:
            multiply_all(gradients, scale)
        self._forget_backwards()

    def abandon_backward(self) -> None:
        """Drops a backward that an exception has ended, with its gradients that were not reduced. Not collective."""
        # The user must see the exception that has ended the backward, not one of this call.
        with suppress(RefusedWriteError):
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
        self._used: set[int] = set()
        # Units that were called, and the complements of those whose output a backward has reached.
        self._order: list[int] = []
        self._graph_tasks: set[int] = set()
        self._backwards = 0
        self._zeroed.clear()

    @torch.no_grad()
    def _average_whole(self, parameters: Iterable[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype[parameter.dtype].append(parameter.grad)
        for gradients in by_dtype.values():
            # Usually few and small.
            together = torch.cat([gradient.reshape(-1) for gradient in gradients])
            # 16 bits are summed in fp32.
            together = together.float() if together.dtype in (torch.float16, torch.bfloat16) else together
            dist.all_reduce(real_view(together), group=self._group)
            together /= dist.get_world_size(self._group)
            means = torch.split(together, [gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))

    def _assigned(self) -> str | None:
        """The name of a parameter whose ``data`` was set, if there is one.

        torch accepts ``parameter.data = value`` of a shard, and continues with the old values. Such an assignment
        changes only the storage object of the parameter.
        """
        return next((name for name, one, storage in self._storages if one.untyped_storage() is not storage), None)

    def check_no_data_assigned(self) -> None:
        """Checks whether code between steps has set ``data``, which torch ignores. Not collective.

        Raises:
            RefusedWriteError: ``data`` of a shard was set on this rank.
        """
        name = self._assigned()
        if name is not None:
            refuse_assigned(name)

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
