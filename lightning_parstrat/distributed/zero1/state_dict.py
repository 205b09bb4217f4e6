"""Sharded optimizer state to and from the ordinary torch ``state_dict``.

Gathering goes over host memory, so that a device never holds more than a shard of it; loading takes each rank's part of
an unsharded state. Both directions keep torch's own format, which knows nothing of ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import broadcast_object
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.watch import met
from lightning_parstrat.distributed.torch_compat import run_hooks_after_state_dict, run_hooks_before_state_dict
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer_sharding import ELEMENTWISE_OPTIMIZERS, sharding_of
from lightning_parstrat.distributed.zero1.state_messages import collect
from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS, ToldState, on_host, states_by_bucket, tell

State = dict[str, Any]
StateDict = dict[Any, Any]


class OwnPart(NamedTuple):
    """This rank's part of an entry of which there was no unsharded tensor, 1-D in storage order."""

    elements: Tensor


StandIn = Callable[[int, str, ParameterSlot, torch.dtype], Tensor]
"""Makes what stands for a tensor, of the parameter at a position in the optimizer and of an entry of its state."""


def gather_state_dict(optimizer: Optimizer, destination: int | None = 0, stand_in: StandIn | None = None) -> StateDict:
    """The optimizer's unsharded state in torch's own format, its tensors in host memory.

    Collective. Ranks compare what there is by one small reduction; then each sends its shard of the state, a message a
    bucket. The destination's host holds the unsharded state at the end, and a few of these messages until then. A
    device never holds more than it does anyway.

    Args:
        optimizer: A sharded optimizer.
        destination: The rank that gets it; None for every rank, which sends the unsharded state to all of them.
        stand_in: Where given, nothing is sent but what is no part of a shard (counts of steps), and what this makes
            stands in the place of the tensors.

    Returns:
        The unsharded state on the destination; on other ranks the parameter groups, with an empty state.
    """
    sharding = sharding_of(optimizer)
    run_hooks_before_state_dict(optimizer)
    control = make_collectives(sharding.control_group, torch.device("cpu"))
    parameters = grouped_parameters(optimizer)
    positions = {sharding.slots[p]: position for position, p in enumerate(parameters) if p in sharding.slots}
    to = 0 if destination is None else destination
    ranks = sharding.ranks_of_a_copy
    told = tell(optimizer, states_by_bucket(positions), ranks, control, to)
    gathered: dict[ParameterSlot, StateDict] = {}
    if stand_in is None:
        gathered = collect(optimizer, told, ranks, control, to)
    elif control.rank == to:
        gathered = _with_stand_ins(told, positions, stand_in)
    by_position = {positions[slot]: state for slot, state in gathered.items()}
    if destination is None:
        by_position = broadcast_object(by_position, control.group)
    by_parameter: dict[Tensor, StateDict] = {parameters[position]: state for position, state in by_position.items()}
    if destination is None or control.rank == destination:
        # Every rank has the same state for what every rank steps.
        replicated = [p for p in parameters if p not in sharding.slots and p in optimizer.state]
        by_parameter.update({parameter: on_host(optimizer.state[parameter]) for parameter in replicated})
    return run_hooks_after_state_dict(optimizer, _pack(optimizer, by_parameter))


def replicated_state_dict(optimizer: Optimizer) -> StateDict:
    """The optimizer's unsharded state on every rank, in torch's own format and on the host.

    Collective: nothing is sent before all ranks have called it, and a rank that waits for others says so.

    Args:
        optimizer: A sharded optimizer.
    """
    sharding = sharding_of(optimizer)
    buckets = ", ".join(str(bucket.index) for bucket in sharding.buckets[:1])
    advice = "Call it on all ranks, and save what it returns on rank 0."
    with met("`optimizer.state_dict()`", sharding.control_group, advice, of=f"buckets from {buckets}"):
        return gather_state_dict(optimizer, destination=None)


def load_sharded(optimizer: Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
    """Loads the unsharded state, of which this rank keeps its shards.

    Not collective, but for parameters that joined the groups since the last step, which are bucketed first.

    Args:
        optimizer: A sharded optimizer.
        state_dict: In torch's own format, unsharded tensors, from any strategy and world size.
        load: The original ``load_state_dict``, bound to the optimizer.

    Raises:
        ValueError: The groups do not match the optimizer's.
    """
    sharding = sharding_of(optimizer)
    saved_groups = state_dict["param_groups"]
    if sharding.attached and sharding.has_added_parameters(optimizer):
        sharding.adopt_added_parameters()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            "The loaded optimizer state does not match the optimizer: it has parameter groups of sizes"
            f" {saved_sizes}, the optimizer has {sizes}."
        )
    of_parameters = {identifier for saved in saved_groups for identifier in saved["params"]}
    state = {key: value for key, value in state_dict["state"].items() if key not in of_parameters}
    groups = []
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        kept = []
        for parameter, identifier in zip(group["params"], saved["params"], strict=True):
            slot = sharding.slots.get(parameter)
            if slot is not None and slot.shard is None:
                continue
            kept.append(identifier)
            entries = state_dict["state"].get(identifier)
            if entries is not None:
                part = (
                    replace_leaves(entries, torch.clone)
                    if slot is None
                    else {key: shard_value(value, slot) for key, value in entries.items()}
                )
                state[identifier] = part
            if slot is not None:
                _load_master_weights(slot, state_dict.get(MASTER_WEIGHTS, {}).get(identifier))
        groups.append({**saved, "params": kept})
    with sharding.showing_shards(optimizer):
        load({**state_dict, "state": state, "param_groups": groups})
    optimizer.state = StateByShard(sharding.slots, optimizer.state)


def check_shapes(optimizer: Optimizer, state_dict: StateDict, names: Mapping[Tensor, str]) -> None:
    """Refuses state that is of other parameters, where that can be told. Not collective.

    Args:
        optimizer: Sharded or not.
        state_dict: What it is to load, in torch's own format; tensors may be on the meta device.
        names: What the parameters are called.

    Raises:
        ValueError: A tensor has another shape than its parameter, in the state of an optimizer whose tensors all have.
    """
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        return
    identifiers = [identifier for group in state_dict["param_groups"] for identifier in group["params"]]
    parameters = grouped_parameters(optimizer)
    if len(identifiers) != len(parameters):
        # Loading says so.
        return
    for identifier, parameter in zip(identifiers, parameters, strict=True):
        for key, value in state_dict["state"].get(identifier, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"The checkpoint has {key!r} of shape {tuple(value.shape)} for"
                    f" {names.get(parameter, identifier)!r}, which has shape {tuple(parameter.shape)}. The parameters"
                    f" that `configure_optimizers` gives {type(optimizer).__name__} must be those, in the"
                    " order, of when it was saved."
                )


@torch.no_grad()
def _load_master_weights(slot: ParameterSlot, unsharded: Tensor | OwnPart | None) -> None:
    """Takes over this rank's part; where the parameter has another value by then, the next step takes that."""
    if slot.shard is None or unsharded is None:
        return
    part = shard_value(unsharded, slot)
    if slot.has_master_weights:
        slot.shard.copy_(part)


def _with_stand_ins(
    told: Sequence[ToldState], positions: Mapping[ParameterSlot, int], stand_in: StandIn
) -> dict[ParameterSlot, StateDict]:
    return {
        slot: {
            key: one.value if one.dtype is None else stand_in(positions[slot], key, slot, one.dtype)
            for key, one in entries.items()
        }
        for state in told
        for slot, entries in state.by_slot().items()
    }


def _pack(optimizer: Optimizer, states: dict[Tensor, StateDict]) -> StateDict:
    """Torch's own packing: positions instead of parameters."""
    parameters = grouped_parameters(optimizer)
    position: dict[Tensor, int] = {}
    for index, parameter in enumerate(parameters):
        position.setdefault(parameter, index)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [position[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    packed: StateDict = {position[parameter]: states[parameter] for parameter in parameters if parameter in states}
    # Beside the state, not in it: to torch's optimizers a parameter whose state is not empty has stepped.
    masters = {index: state.pop(MASTER_WEIGHTS) for index, state in packed.items() if MASTER_WEIGHTS in state}
    packed = {index: state for index, state in packed.items() if state}
    packed.update({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    return {"state": packed, "param_groups": groups, **({MASTER_WEIGHTS: masters} if masters else {})}


def grouped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order in which its state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class StateByShard(defaultdict[Any, Any]):
    """What ``optimizer.state`` is while the optimizer is sharded: keyed by this rank's shards.

    A parameter may be used as a key, too, to read, change, reset or remove the state that this rank has for it: what
    elsewhere has the parameter's shape is the shard's part of it here. Where this rank owns nothing of a parameter,
    there is no state for it. Not collective.

    Args:
        slots: Which shard stands for which parameter; what is added to it later is seen.
        state: By shard.
    """

    def __init__(self, slots: Mapping[Tensor, ParameterSlot], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._slots = slots

    def _key(self, key: Any) -> Any:
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        return key if slot is None or slot.shard is None else slot.shard

    @override
    def __missing__(self, key: Any) -> Any:
        # Steps ask by shards, which are found at once.
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        if slot is None:
            return super().__missing__(key)
        # A state that is made for a parameter of which nothing is owned here must not stay.
        return {} if slot.shard is None else self[slot.shard]

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        if slot is None:
            super().__setitem__(key, value)
        elif slot.shard is not None:
            super().__setitem__(slot.shard, {name: shard_value(entry, slot) for name, entry in value.items()})

    @override
    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._key(key))

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._key(key), *default)


def shard_existing_state(state: Mapping[Any, Any], slots: Mapping[Tensor, ParameterSlot]) -> StateByShard:
    """This rank's shards of state that is there before its parameter is sharded (Adagrad makes it at once)."""
    if isinstance(state, StateByShard) and not any(key in slots for key in state):
        return state
    sharded = StateByShard(slots, {})
    for key, entries in state.items():
        sharded[key] = entries
    return sharded


def shard_value(value: Any, slot: ParameterSlot) -> Any:
    """This rank's part of one entry of a parameter's state; what has not the parameter's shape is replicated."""
    if isinstance(value, OwnPart) and slot.shard is not None:
        part = value.elements.as_strided(slot.shard.shape, slot.shard.stride())
    elif not isinstance(value, Tensor) or slot.shard is None or value.shape != slot.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    else:
        # A copy, so that what is not this rank's goes: a checkpoint may be mapped into memory, not read.
        part = slot.part_of(value).clone()
    # State that an optimizer made in the parameter's own dtype goes on in the master weights'.
    return part.to(slot.bucket.shard_dtype) if part.dtype == slot.parameter.dtype else part
