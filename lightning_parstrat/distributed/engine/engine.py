"""ZeRO-1 for a module and its optimizers: buckets, reducer, gatherer and sharded optimizers, put together.

Every rank keeps all parameters, and reduces gradients to the shard that it owns. It holds optimizer state for that
shard alone, steps the shard, and gathers the other ranks' shards. Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", section 5.1 (optimizer state partitioning), with gradients reduce-scattered
as in section 5.2.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_parstrat.core.layout import Partition, parts_of
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.distributed.comm.agreement import (
    any_rank,
    any_rank_for_each,
    broadcast_object,
    topology_of_ranks,
)
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import met
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors, refuse_captured_graphs
from lightning_parstrat.distributed.comm.process_groups import ProcessGroups
from lightning_parstrat.distributed.comm.work import Streams
from lightning_parstrat.distributed.engine.buckets import ParameterBucket, ParameterSlot
from lightning_parstrat.distributed.engine.compiled_code import CompiledCode
from lightning_parstrat.distributed.engine.gatherer import ParameterGatherer
from lightning_parstrat.distributed.engine.planning import UNNAMED, BucketPlanner, owners_of
from lightning_parstrat.distributed.engine.reducer import GradientReducer, GradientScale
from lightning_parstrat.distributed.engine.shardability import (
    ShardingDecision,
    check_parameters,
    decide_sharding,
)
from lightning_parstrat.distributed.engine.shown_gradients import full_gradients
from lightning_parstrat.distributed.engine.state import grouped_parameters, shard_existing_state
from lightning_parstrat.distributed.engine.stepping import OptimizerSharding, shard_optimizer, unshard
from lightning_parstrat.distributed.torch_compat import has_memory, is_compiled, is_compiled_as_a_whole


class ShardedDataParallel:
    """Shards the state of ``optimizers`` over all ranks, or over those of each shard group.

    The constructor is collective: the ranks compare their plans. The module and the optimizers keep their identity. The
    parameters' storage moves into buckets (peak: one bucket more). The optimizers get other methods. :meth:`close`
    gives the parameters ordinary storage again.

    Everything that cannot be sharded trains as under DDP. Examples are optimizers that do not step each parameter
    alone, and parameters that share memory with others. Parameters in no optimizer are another one: their gradients are
    averaged and shown on every rank.

    Args:
        module: The module. Its parameters are the same on all ranks (see :func:`broadcast_module`).
        optimizers: The module's optimizers.
        policy: How to bucket and partition.
        groups: The process groups.
        node: See :func:`topology_of_ranks`.
        order: Names of parameters in the order in which an earlier training of the module has sent gradients. If it is
            empty, buckets may follow the first backward.
        messages: Carry flags of gradients. By default, separate messages.

    Raises:
        ValueError: Something cannot be sharded. The message contains the reason and what to do.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        policy: ShardingPolicy,
        groups: ProcessGroups,
        node: Hashable = 0,
        order: Sequence[str] = (),
        messages: ControlMessages | None = None,
    ) -> None:
        self.module = module
        self.policy = policy
        self.optimizers = list(optimizers)
        # Optimizers of an earlier training of this object are still sharded, by buckets that no longer exist.
        earlier = [unshard(optimizer) for optimizer in self.optimizers]
        parameters = [parameter for optimizer in self.optimizers for parameter in grouped_parameters(optimizer)]
        check_parameters(module, parameters)
        refuse_captured_graphs(module)
        device = parameters[0].device if parameters else torch.device("cpu")
        messages = messages or ControlMessages(make_collectives(groups.control, torch.device("cpu")))
        control = messages.control
        self.topology = topology_of_ranks(node, control)
        shard_groups = ShardGroups.chosen(policy.shard_group, self.topology)
        gradients = make_collectives(groups.gradients, device, self.topology, shard_groups)
        if gradients.widens:
            # Otherwise gradients would be rounded, and then sent in fp32 all the same.
            policy = self.policy = replace(policy, comm_dtype=None)
        self.reducer = GradientReducer(gradients, messages, policy.bound_in_flight(device.type), Streams(device))
        self.gatherer = ParameterGatherer(
            make_collectives(groups.parameters, device, self.topology, shard_groups), Streams(device)
        )
        self.gatherer.overlaps = policy.overlap_param_gather and not is_compiled_as_a_whole(module)
        self._order = order
        self._groups = groups
        self._known: list[set[Tensor]] = []
        """Each optimizer's parameters when buckets were made last."""
        self.decisions = _agree(control, [decide_sharding(o, policy.partition) for o in self.optimizers])
        dtypes = {one.dtype for number in self._partitions for one in grouped_parameters(self.optimizers[number])}
        if policy.master_weights is True and not any(map(policy.master_dtype, dtypes)):
            raise ValueError(
                "master_weights=True was asked for, but no parameter that is sharded has 16 bits. Train with"
                " precision='bf16-true' or '16-true', or leave master_weights='auto'."
            )
        self.shardings = {
            number: OptimizerSharding(self.optimizers[number], self.reducer, self.gatherer, self.adopt_added_parameters)
            for number in self._partitions
        }
        """The shardings of optimizers, by the optimizers' positions."""
        for sharding in self.shardings.values():
            shard_optimizer(sharding)
        moving = [one for one in parameters if has_memory(one) and one.numel()]
        left: dict[Tensor, Any] = {one: StorageWeakRef(one.untyped_storage()) for one in moving}  # type: ignore[no-untyped-call]
        self._bucket_parameters()
        names, moved = self._names(), left.keys() & self.slots.keys()
        self.held_elsewhere = [names.get(one, UNNAMED) for one in moving if one in moved and not left[one].expired()]
        """Parameters whose earlier memory something else holds. It does not change any more."""
        self.reducer.collectives.connect(device)
        self.gatherer.collectives.connect(device, reduces=False)
        for optimizer, state_dict in zip(self.optimizers, earlier, strict=True):
            if state_dict is not None:
                optimizer.load_state_dict(state_dict)
        self._compiled_code = CompiledCode(module, self.gatherer)
        # Releases the memory that parameters have left. While nothing is in flight, that makes no rank wait.
        torch.cuda.empty_cache()

    @property
    def buckets(self) -> list[ParameterBucket]:
        """The buckets of sharded parameters, in the order of their reductions."""
        return [bucket for bucket in self.reducer.buckets if isinstance(bucket, ParameterBucket)]

    @property
    def slots(self) -> dict[Tensor, ParameterSlot]:
        """The place of each sharded parameter."""
        return {slot.parameter: slot for bucket in self.buckets for slot in bucket.slots}

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Within it, ``param.grad`` shows the mean gradients, to read or to change. Collective."""
        with ExitStack() as shown:
            with met("`full_gradients()`", self.reducer.control.group, "Enter it on all ranks."):
                self.reducer.finish(self.buckets)
                if not self.reducer.exposes_gradients:
                    shown.enter_context(full_gradients(self.buckets, self.reducer.collectives))
            yield

    @property
    def plan(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order of reductions."""
        names = self._names()
        return [[names.get(slot.parameter, UNNAMED) for slot in bucket.slots] for bucket in self.buckets]

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def follow_first_backward(self) -> None:
        """Lets buckets follow the order of gradients in the next backward. No effect if an order is given.

        In that backward, gradients stay in ``param.grad``, and are sent when it has ended.
        """
        if not self._order and len(self.buckets) > 1 and self.reducer.collectives.world_size > 1:
            self.reducer.recorded = {}

    def prepare_backward(self, loss: Tensor, scale: GradientScale | None = None) -> None:
        """Call before the backward of ``loss``, on all ranks. Parameters newly added to an optimizer get buckets.

        Args:
            loss: The tensor on which backward is called.
            scale: See :meth:`GradientReducer.prepare_backward`.
        """
        self.adopt_added_parameters()
        # Backward reads parameters in C++, without waiting for them.
        self.gatherer.finish()
        if self.reducer.recorded is None:
            self.reducer.prepare_backward(loss, scale)
        else:
            # The record of an earlier backward, which has failed, is dropped.
            self.reducer.recorded.clear()

    def end_backward(self, scale: GradientScale | None = None) -> None:
        """Call after a backward that :meth:`prepare_backward` has announced, on all ranks."""
        recorded, self.reducer.recorded = self.reducer.recorded, None
        if recorded is not None:
            self._follow([slot.parameter for slot in recorded])
        is_sent = recorded is None and self.reducer.end_backward()
        if self.reducer.synchronize and not is_sent:
            # After a record, or if the program has zeroed gradients within the strategy's backward.
            self.reduce_local_gradients(scale)

    def _follow(self, made: Sequence[Tensor]) -> None:
        """Rebuilds the buckets, if gradients become ready in another order than buckets are sent in. Collective.

        Rank 0 decides for all. Compiled code keeps its buckets. So does an optimizer with state: the state would have
        to move. Gradients must be in ``param.grad``. Peak memory is one bucket more.

        Args:
            made: Parameters in the order in which this rank has made gradients.
        """
        names, control = self._names(), self.reducer.control
        order = broadcast_object([names[parameter] for parameter in made if parameter in names], control.group)
        fits = self._planner(order).fits(self.buckets)
        # A rank that owns no parameter of an optimizer has no state of it, either. SGD may have master weights alone.
        is_bound = is_compiled(self.module) or any(one.state for one in self.optimizers)
        is_bound = is_bound or any(bucket.has_own_master for bucket in self.buckets)
        if fits or any_rank(is_bound, control):
            return
        storages = self._storages()
        self._order = order
        for bucket in self.buckets:
            bucket.move_out(storages)
        self.reducer.dissolve_buckets(self.reducer.buckets)
        self._bucket_parameters()

    def adopt_added_parameters(self) -> list[ParameterBucket]:
        """Gives rank 0's values and buckets to parameters that were added to an optimizer. Collective if there are any.

        Call it before each forward and backward, on all ranks. Parameters may be added by any way, at any time.

        Returns:
            The new buckets.

        Raises:
            ValueError: A parameter cannot be bucketed.
        """
        grouped = [grouped_parameters(optimizer) for optimizer in self.optimizers]
        if all(known.issuperset(own) for known, own in zip(self._known, grouped, strict=True)):
            return []
        parameters, before = list(itertools.chain.from_iterable(grouped)), self.buckets
        check_parameters(self.module, parameters)
        trained = set().union(*self._known)
        with met("`optimizer.add_param_group()`", self.reducer.control.group, "Add the same group on all ranks."):
            # Each rank may have made them by its own random numbers. By `data`, because a graph may have saved them.
            added = [one.data for one in parameters if one not in trained and has_memory(one)]
            broadcast_tensors(added, self._groups.gradients)
            self._bucket_parameters()
        return [bucket for bucket in self.buckets if bucket not in before]

    def reduce_local_gradients(self, scale: GradientScale | None = None) -> None:
        """Sends gradients in ``param.grad`` that no announced backward has reduced. Collective.

        Args:
            scale: See :meth:`GradientReducer.prepare_backward`.
        """
        self.reducer.reduce_left_over(self.reducer.buckets, scale)

    def expose_gradients(self, wanted: bool) -> bool:
        """If any rank wants reduced gradients in ``param.grad``, shows them from now on. Collective.

        Returns:
            Whether they will be shown. The answer is the same on all ranks, even if a callback is on one rank only.
        """
        self.reducer.exposes_gradients = any_rank(wanted, self.reducer.control)
        return self.reducer.exposes_gradients

    def accumulate_in_shards(self, wanted: bool) -> bool:
        """If all ranks want it, reduces the gradients of every micro-batch from now on. Collective.

        Exposed gradients stay whole all the same. Call it between accumulation windows.

        Returns:
            Whether micro-batches are reduced. The answer is the same on all ranks.
        """
        kept_whole = any_rank(not wanted, self.reducer.control) or self.reducer.exposes_gradients
        self.reducer.shards_accumulation = not kept_whole
        return self.reducer.shards_accumulation

    @property
    def bytes_sent(self) -> int:
        """The messages of this rank so far, for gradients and parameters together."""
        return self.reducer.collectives.bytes_sent + self.gatherer.collectives.bytes_sent

    def close(self, failed: bool = False) -> None:
        """Removes the hooks and gives the parameters ordinary storage again.

        After an exception (``failed``), which may be one rank's alone, it is not collective. Parameters then stay in
        their memory: there may be no room for copies. The optimizers stay sharded. Their ``state_dict()`` still gathers
        the state, so a checkpoint can be saved after training.
        """
        self._compiled_code.close()
        if failed:
            self.gatherer.abandon()
            self.reducer.abandon()
        else:
            self.gatherer.finish()
            self.reducer.close()
        # All at once: two parameters may have traded data across buckets.
        storages = set() if failed else self._storages()
        for bucket in self.buckets:
            bucket.move_out(storages)
        for sharding in self.shardings.values():
            sharding.attached = False

    def _storages(self) -> set[int]:
        return {address for bucket in self.buckets for address in bucket.storages}

    def _bucket_parameters(self) -> None:
        """Creates buckets for all parameters that are in none yet. Collective."""
        self.gatherer.finish()
        placed = self.slots
        owners = owners_of(self.module, self.optimizers, self._partitions, placed)
        # A parameter that was in no optimizer may be in one now. Its gradient must not be sent twice.
        self.reducer.dissolve_buckets([b for b in self.reducer.buckets if b.is_replicated])
        new = {parameter: numbers for parameter, numbers in owners.items() if parameter not in placed}
        first = 1 + max((bucket.index for bucket in self.reducer.buckets), default=-1)
        for bucket in self._planner(self._order).buckets(new, self._partitions, first):
            self.reducer.add_bucket(bucket)
        for number, sharding in self.shardings.items():
            sharding.look_up(self.buckets)
            if self._partitions[number] == "parameter":
                _check_uncut(sharding)
            sharding.optimizer.state = shard_existing_state(sharding.optimizer.state, sharding.slots)
        self._known = [set(grouped_parameters(optimizer)) for optimizer in self.optimizers]

    def _planner(self, order: Sequence[str]) -> BucketPlanner:
        control, gradients = self.reducer.control, self.reducer.collectives
        return BucketPlanner(self.module, self.policy, control, gradients, order)

    @property
    def _partitions(self) -> dict[int, Partition]:
        return {n: one.partition for n, one in enumerate(self.decisions) if one.partition is not None}


def _check_uncut(sharding: OptimizerSharding) -> None:
    for parameter, slot in sharding.slots.items():
        place = slot.place
        if len(list(parts_of(slot.bucket.layout.bounds, place.offset, place.offset + place.numel))) > 1:
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} was added to {type(sharding.optimizer).__name__}, which"
                " steps whole parameters, but an optimizer that had it before has cut it into shards. Give it to both"
                " before the training, or set partition='parameter'."
            )


def _agree(control: Collectives, decisions: list[ShardingDecision]) -> list[ShardingDecision]:
    """If any rank would replicate an optimizer, all do: the trial may round differently. Collective."""
    if not decisions:
        return []
    replicated = any_rank_for_each([decision.partition is None for decision in decisions], control)
    return [
        ShardingDecision(None, decision.reason or "it is not on another rank") if flag else decision
        for decision, flag in zip(decisions, replicated, strict=True)
    ]
