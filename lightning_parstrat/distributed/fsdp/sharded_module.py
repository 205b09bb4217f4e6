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
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.distributed.comm.agreement import all_have_same
from lightning_parstrat.distributed.comm.collectives import Collectives, real_view
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.fsdp.outputs import BlockCalls
from lightning_parstrat.distributed.fsdp.reduce_scatter import ExchangedReduceScatter
from lightning_parstrat.distributed.fsdp.refused_gradients import no_gradients_of
from lightning_parstrat.distributed.fsdp.sharding import check_sharding, module_sharding, note_exception, shard
from lightning_parstrat.distributed.fsdp.state import let_whole_states_be_loaded
from lightning_parstrat.distributed.fsdp.tensor_layers import TensorLayers
from lightning_parstrat.distributed.fsdp.units import rounded_by_autocast
from lightning_parstrat.distributed.fsdp.whole import register_steps, unregister_steps
from lightning_parstrat.distributed.fsdp.writes import Writes, refusal
from lightning_parstrat.distributed.gradients.loss_weights import watch_gradients
from lightning_parstrat.distributed.torch_compat import (
    call_before_gathers,
    current_graph_task_id,
    fsdp_params_of,
    gather_after_writes,
    gather_in,
    gathered_by_fsdp,
    lend_hooks,
    multiply_all,
    names_ignored_by_ddp,
    reduce_again,
    reduce_unused_too,
    version_of,
)


class DifferentModulesError(NoCollectivesError):
    """The ranks have run different modules in a step, or their backwards have. Raised on all of them."""


def _different(when: str) -> DifferentModulesError:
    return DifferentModulesError(
        f"The ranks have called different modules in {when}, or in another order, or a loss is made of what different"
        " ones returned. All ranks must use the same modules, because each module gathers its parameters from all"
        " ranks. Call an unused module as well, and add its result multiplied by 0. Or leave such modules to the root:"
        " name the others in `auto_wrap_policy`."
    )


class NestedBackwardError(NoCollectivesError):
    """Another backward has run within that of a training step's loss, or beside it."""


class Leaf(NamedTuple):
    """A parameter, and the leaf of the graph for which a backward computes its gradient.

    Attributes:
        tensor: The leaf: the gathered tensor of a sharded parameter, or the parameter itself.
        parameter: The parameter that optimizers step.
    """

    tensor: Tensor
    parameter: Tensor


class _Place(NamedTuple):
    """A module's registered parameters, and the name of one of them."""

    registered: dict[str, Any]
    name: str


def _owners(module: nn.Module) -> dict[Tensor, list[_Place]]:
    """Where each parameter is registered. A tied one has several places."""
    found = defaultdict[Tensor, list[_Place]](list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            found[parameter].append(_Place(vars(owner)["_parameters"], name))
    return found


def _refuse_replaced(own: Iterable[tuple[_Place, set[Tensor]]], unit: str) -> None:
    for place, known in own:
        if place.registered.get(place.name) not in known:
            raise RuntimeError(
                f"{place.name!r} in {unit} is another tensor than the parameter that was sharded. A sharded module"
                " computes with what it gathers, and would ignore that tensor. Tie and assign parameters in `__init__`"
                " or in `configure_model`. `torch.func.functional_call` replaces parameters, too: leave such a block"
                " to the root. Name the others in `auto_wrap_policy`, or set a larger `min_num_params`."
            )


class ShardedModule:
    """Shards a module in place, and follows its forwards and backwards in one training. The constructor is collective.

    Args:
        module: See :func:`~lightning_parstrat.distributed.fsdp.sharding.shard`. Or an earlier training has sharded it.
        group: The process group of all ranks.
        collectives: Carry gradients, between the ranks that hold the same parts of tensor-parallel layers.
        device: The device on which the module is to train.
        messages: Combine over ranks which parameters were used. Every backward that sends has one message.
        policy: How to shard, gather and reduce. Gradients in fp64 are summed in that.
        by_child: Whether training calls children of the root instead of one of its steps, as in manual
            optimization. Then the root itself has no parameters that are gathered.
        autocasts: Whether autocast rounds to bf16.

    Raises:
        ValueError: The module cannot be sharded. Or the group sends from host memory, and the device is another.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        collectives: Collectives,
        device: torch.device,
        messages: Callable[[], ControlMessages],
        policy: FullShardingPolicy,
        *,
        by_child: bool,
        autocasts: bool,
    ) -> None:
        self.module = module
        self._group = group
        self._messages = messages
        self._policy, self._by_child = policy, by_child
        is_new = module_sharding(module) is None
        if is_new:
            shard(module, group, collectives, device, policy, by_child)
        sharding = check_sharding(module, collectives.shard_groups, policy.tensor_parallel_size)
        self.units = [part for part in self._parts if part is not module]
        self.clock: Callable[[], Callable[[], None]] | None = None
        """Called before each gather of a forward. It returns a function that is called after the gather."""
        self.unit_called = ""
        """The name of the unit that this rank has called last. Between steps, empty."""
        self._note_reduced: Callable[[Tensor], None] | None = None
        self._zeroed: set[Tensor] = set()
        self._forget_backwards()
        self._is_closed = False
        self._run_through: set[int] = set()
        self._is_stuck = False
        self._evaluated: list[int] = []
        self._evaluation_digest = 0
        self._before_gradients: Callable[[], None] | None = None
        self._gathers_apart = device.type == "cuda"
        self._gathered_in: tuple[str, str] | None = None
        self._versions = [0] * len(self.units)
        # An earlier training may have had another precision.
        self._choose_param_dtypes(autocasts)
        self._choose_reduce_scatter(collectives, device)
        # It gathers every part once, as the leaves of graphs exist from then on.
        self.writes = Writes(module, device)
        found: dict[Any, Any] = dict(itertools.chain(*map(gathered_by_fsdp, self._parts)))
        self.leaves = [Leaf(found.get(parameter, parameter), parameter) for parameter in module.parameters()]
        self.parameters = {leaf.parameter for leaf in self.leaves}
        self._gathered = {leaf.parameter: leaf.tensor for leaf in self.leaves if leaf.tensor is not leaf.parameter}
        if is_new:
            let_whole_states_be_loaded(module)
        self._hooks = [*self._register_hooks()]
        for number, unit in enumerate(self.units):
            keep = functools.partial(self._run_through.add, number)
            self._hooks += BlockCalls(unit, policy.reshard_after_forward, keep).register()
        self._cut: TensorLayers | None = None
        if sharding.planned:
            self._cut = TensorLayers(module, sharding.planned, device)
        if not by_child:
            register_steps(module)
        self._follow_gathers()

    def _follow_gathers(self) -> None:
        module = self.module
        for part in self._parts:
            # They get a gradient that DDP would not leave, unless another rank has used them.
            reduce_unused_too(part, self._zeroed.add)
        names = {part: name for name, part in module.named_modules()}
        owners = _owners(module)

        def own(part: nn.Module) -> list[tuple[_Place, set[Tensor]]]:
            return [(place, {shard, one}) for shard, one in gathered_by_fsdp(part) for place in owners.get(shard, ())]

        for number, unit in enumerate(self.units):
            # Before a gather: while this rank waits, other ranks can see its unit.
            note_forward = functools.partial(self._note_forward, number, names[unit], own(unit))
            call_before_gathers(unit, note_forward, functools.partial(self._note_backward, number, names[unit]))
        root = cast(FSDPModule, module)
        after_writes = functools.partial(gather_after_writes, module) if self._gathers_apart else lambda: None
        call_before_gathers(module, functools.partial(self._note_root, own(module)), after_writes)
        # The rest of a training step may use the root's parameters after a backward of the user's own.
        root.set_reshard_after_backward(False, recurse=False)
        # An exception may have ended an earlier training while gradients accumulated.
        root.set_requires_gradient_sync(True)

    def _choose_param_dtypes(self, autocasts: bool) -> None:
        self.reshard()
        narrow: set[Tensor] = set()
        if self._policy.param_dtype == "bf16":
            narrow = {parameter for parameter in self.module.parameters() if parameter.dtype == torch.float32}
        elif self._policy.param_dtype == "auto" and autocasts:
            # The root's are whole during a step, and your step may read them.
            narrow = set().union(*map(rounded_by_autocast, self.units))
        for part in self._parts:
            for parameter, fsdp_param in fsdp_params_of(part):
                gather_in(fsdp_param, torch.bfloat16 if parameter in narrow else None)

    def _choose_reduce_scatter(self, collectives: Collectives, device: torch.device) -> None:
        if collectives.world_size == 1:
            return
        collectives.connect(device)
        # Sums are in fp32, whatever travels.
        travel = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}
        if self._policy.comm_dtype == "bf16":
            travel[torch.float32] = torch.bfloat16
        if self._policy.comm_dtype == "fp32" or collectives.widens:
            travel = {}
        for part in self._parts:
            own = next((shard.dtype for shard, _ in fsdp_params_of(part)), torch.float32)
            # For all parts: an earlier training of the module may have had another setting.
            chosen = ExchangedReduceScatter(collectives, travel.get(own), self._before_reduction)
            part.set_custom_reduce_scatter(chosen)
            if collectives.shard_count == 1:
                part.set_all_reduce_hook(chosen.sum_over_copies)

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        names = names_ignored_by_ddp(self.module)
        ignored = {parameter for name, parameter in self.module.named_parameters() if name in names}
        for number, leaf in enumerate(self.leaves):
            # Gradients of parameters that are gathered in fewer bits are as wide as the parameter itself.
            leaf.tensor.grad_dtype = leaf.parameter.dtype
            is_numeric = leaf.tensor.is_floating_point() or leaf.tensor.is_complex()
            if is_numeric and leaf.parameter not in ignored:
                trainable = leaf.tensor.requires_grad
                # A frozen parameter may be trained later.
                leaf.tensor.requires_grad_(True)
                note = functools.partial(self._note_gradient, number)
                yield leaf.tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                if leaf.tensor is not leaf.parameter:
                    yield lend_hooks(leaf.parameter, leaf.tensor)
                leaf.tensor.requires_grad_(trainable)

    @property
    def unchecked(self) -> list[str]:
        """Names of modules with tensor-parallel layers whose code is not checked."""
        return [] if self._cut is None else self._cut.unchecked

    @property
    def _parts(self) -> list[Any]:
        # None while the whole parameters are shown.
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def reshard_before_backward(self) -> None:
        """Frees what is still gathered between forward and backward. Then no hook sees gathered parameters."""
        for part in self._parts:
            part.reshard()

    def _gather_after_writes(self, number: int, phase: str, name: str) -> None:
        """Makes a unit's gather wait for writes to shards within the step. FSDP2 only waits for those before it.

        On a GPU, gathers run on a separate stream, beside what is computed. Waiting ends that overlap. The first
        gather of a forward, of a backward and of a container of units waits. Others wait after a write that is seen.
        A write through ``data`` between two units of a container is not seen.
        """
        version = sum(version_of(shard) for shard, _ in fsdp_params_of(self.units[number]))
        place = (phase, name.rpartition(".")[0])
        if place != self._gathered_in or version != self._versions[number]:
            gather_after_writes(self.units[number])
        self._gathered_in, self._versions[number] = place, version

    def _begin_gather(self) -> Callable[[], None] | None:
        return None if self.clock is None else self.clock()

    def _note_root(self, own: list[tuple[_Place, set[Tensor]]]) -> Callable[[], None] | None:
        _refuse_replaced(own, "the root")
        self.writes.freeze_alike(self.module)
        return self._begin_gather()

    def _note_forward(self, number: int, name: str, own: list[tuple[_Place, set[Tensor]]]) -> Callable[[], None] | None:
        _refuse_replaced(own, repr(name))
        self.writes.freeze_alike(self.units[number])
        if self._gathers_apart:
            self._gather_after_writes(number, "forward", name)
        if self._is_closed:
            return None
        self.unit_called = name
        if self._before_gradients is None:
            self._order.append(number)
            return self._begin_gather()
        if torch.is_grad_enabled():
            self._before_gradients()
        self._evaluated.append(number)
        return None

    def _note_backward(self, number: int, name: str) -> None:
        if self._gathers_apart:
            self._gather_after_writes(number, "backward", name)
        if self._is_closed:
            return
        # Once for all that a call has returned: how much of the output is used may differ.
        if self._order[-1:] != [~number]:
            self._order.append(~number)
        # Grad mode is enabled in a backward that makes a graph of itself.
        if torch.is_grad_enabled():
            self._run_through.add(number)

    def _note_gradient(self, number: int, _: Tensor) -> None:
        if self._before_gradients is None:
            self._used.add(number)
            self._graph_tasks.add(current_graph_task_id())

    def _before_reduction(self, gradients: Tensor) -> None:
        if self._before_gradients is not None:
            self._before_gradients()
        if self._note_reduced is not None:
            self._note_reduced(gradients)

    def reshard(self) -> None:
        """Frees gathered parameters. The module's parameters are then those that optimizers step. Not collective.

        Call it before a training step: graphs of the step before no longer exist.
        """
        if self._run_through:
            self.free_after_backward()
            self._run_through.clear()
        self.unit_called = ""
        self._gathered_in = None
        for part in self._parts:
            part.reshard()
            # An exception may have ended a forward or a backward. Parts that are no roots have no state, and raise.
            with suppress(AttributeError, RuntimeError):
                part.reset_iter_state()
        if self._gathers_apart:
            self._versions = [sum(version_of(shard) for shard, _ in fsdp_params_of(unit)) for unit in self.units]

    def check_writes(self) -> None:
        """Frees gathered parameters, and checks what was written to parameters until now. Not collective.

        Raises:
            RefusedWriteError: This rank has written what cannot be kept.
        """
        self.reshard()
        self.writes.check()

    def refusing_gradients(self, failed: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Within it, autograd raises an error if it is to compute gradients of shards. See :func:`no_gradients_of`."""
        return no_gradients_of(self._gathered, failed)

    # Evaluations.

    @contextmanager
    def evaluation_step(self, before_gradients: Callable[[], None]) -> Iterator[None]:
        """Within it, gathers are noted for :meth:`follow_evaluation_step`. Not collective.

        Args:
            before_gradients: Called before a forward or a backward with gradients, which no rank can follow.
        """
        self._evaluated = []
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
            RefusedWriteError: This rank has written what cannot be kept.
        """
        if not self._evaluation_digest:
            return
        self.check_writes()
        called, self._evaluation_digest = self._evaluation_digest, 0
        if not all_have_same(called, control):
            raise _different("an evaluation")

    # Training steps.

    def begin_backward(self, loss: Tensor, accumulates: bool) -> None:
        """Call before every backward whose gradients :meth:`end_backward` is to complete.

        If it runs through gradients, it is collective: all ranks gather the parameters from which they were computed.

        Args:
            loss: The tensor on which backward is called.
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
        if self._backwards == 1 and not self._by_child:
            # Of a backward of the user's own within a step. Under DDP, `zero_grad` before this one drops it.
            for tensor in self._gathered.values():
                tensor.grad = None
        if self._cut is not None:
            self._cut.note_loss(loss)
        keeps_whole = accumulates and not self._policy.shard_gradients and dist.get_world_size(self._group) > 1
        cast(FSDPModule, self.module).set_requires_gradient_sync(not keeps_whole)
        for number in sorted(self._run_through):
            self.units[number].set_reshard_after_backward(False, recurse=False)
            self.units[number].unshard()

    def watch(self, note: Callable[[Tensor], None]) -> Callable[[], None]:
        """Passes the gradients of the next backward to a function: those of a unit together, before they are reduced.

        Returns:
            A function that ends it.
        """
        # Gradients that stay whole between micro-batches are reduced together with those of other micro-batches.
        by_unit = self._policy.shard_gradients and dist.get_world_size(self._group) > 1
        self._note_reduced = note if by_unit else None
        leaves = [one.tensor for one in self.leaves if not by_unit or one.tensor is one.parameter]
        end_leaves = watch_gradients(leaves, note)

        def end() -> None:
            self._note_reduced = None
            end_leaves()

        return end

    def free_after_backward(self) -> None:
        """Frees what FSDP2 leaves gathered after a backward. Not collective."""
        for number in self._run_through:
            self.units[number].set_reshard_after_backward(True, recurse=False)
        for part in self._parts:
            part.reshard()

    def end_backward(self, factor: Callable[[], float]) -> None:
        """Completes the gradients of the backwards since the last call. Collective if there were any: one message.

        Args:
            factor: The factor for the gradients' mean over ranks. It is called when the message has been launched.

        Raises:
            DifferentModulesError: Ranks have run different units, or in another order, in forward or in backward.
            NestedBackwardError: More backwards have run than were announced, which FSDP2 reduces wrongly.
            RefusedWriteError: Some rank has written what cannot be kept. Raised on all ranks.
        """
        if not self._backwards:
            return
        if len(self._graph_tasks) > self._backwards:
            raise NestedBackwardError(
                "Several backwards have run for the loss of a training step, after which FSDP2's gradients are wrong."
                " In a `backward` of the module, add losses up, and run one. Activation checkpointing runs some with"
                " use_reentrant=True: pass use_reentrant=False."
            )
        if self._may_have_dropped:
            self._used.difference_update([n for n, one in enumerate(self.leaves) if one.parameter.grad is None])
        used = [number in self._used for number in range(len(self.leaves))]
        # Gradients that came when FSDP2 had left the unit: of tensors computed from its parameters, not of its output.
        left_over = [any(one.grad is not None for _, one in gathered_by_fsdp(part)) for part in self._parts]
        # In another order, ranks would add up gradients of different units.
        order, refused = digest(self._order), self.writes.refused()
        combined = self._messages().launch(bytes([*used, *left_over, refused is not None]), order).wait()
        if combined.flags[-1]:
            raise refusal(refused)
        if not combined.is_alike:
            raise _different("a training step")
        for part, is_left in zip(self._parts, combined.flags[len(used) : -1], strict=True):
            if is_left:
                reduce_again(part)
        for leaf, was_used in zip(self.leaves, combined.flags, strict=False):
            if leaf.parameter in self._zeroed and not was_used:
                # As if it had not taken part: optimizers step parameters that have a gradient.
                leaf.parameter.grad = None
        reached = [leaf for leaf, was_used in zip(self.leaves, combined.flags, strict=False) if was_used]
        if self._cut is not None:
            self._cut.compare_gradients({leaf.parameter for leaf in reached}, self._messages().control)
        self._average_whole([leaf.parameter for leaf in reached if leaf.tensor is leaf.parameter])
        scale = factor()
        gradients = [local(leaf.parameter.grad) for leaf in self.leaves if leaf.parameter.grad is not None]
        if gradients and scale != 1.0:
            multiply_all(gradients, scale)
        self._forget_backwards()

    def abandon_backward(self, goes_on: bool = False) -> None:
        """Drops a backward that an exception has ended, with its gradients that were not reduced. Not collective.

        Args:
            goes_on: Whether the module's ``backward`` may catch it. What was announced then still counts.
        """
        self.reshard()
        for tensor in self._gathered.values():
            tensor.grad = None
        for part in self._parts:
            for _, fsdp_param in fsdp_params_of(part):
                fsdp_param.unsharded_accumulated_grad = None
        self._graph_tasks.clear()
        self._may_have_dropped = True
        if not goes_on:
            self._forget_backwards()
        self._is_stuck = not hasattr(self.module, "reset_iter_state")

    def _forget_backwards(self) -> None:
        self._used: set[int] = set()
        # Units that were called, and the complements of those whose output a backward has reached.
        self._order: list[int] = []
        self._graph_tasks: set[int] = set()
        self._backwards = 0
        self._may_have_dropped = False
        """Whether the program may have dropped gradients of backwards that have run."""
        self._zeroed.clear()

    def complete(self) -> None:
        """Completes gradients of backwards that were not announced. Call before each step. Collective if there are any.

        FSDP2 has reduced those of shards. Those of whole parameters are local until then.
        """
        if self._graph_tasks and not self._backwards:
            self._backwards, self._may_have_dropped = len(self._graph_tasks), True
            self.end_backward(lambda: 1.0)

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

    def close(self) -> None:
        """Ends a training. The module stays sharded. Not collective.

        An unfinished step of an exception is dropped. Otherwise another training would use its gradients.
        """
        was_in_backward = self._is_stuck or any(number < 0 for number in self._order)
        self.abandon_backward()
        is_in_forward = not self.parameters.issuperset(self.module.parameters())
        if (was_in_backward or is_in_forward) and not hasattr(self.module, "reset_iter_state"):
            note_exception(self.module)
        # FSDP2 keeps its calls of this object.
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        if self._cut is not None:
            self._cut.close()
        unregister_steps(self.module)
