"""The state of a sharded optimizer, to and from torch's own ``state_dict``: described, collected, and sliced.

Each rank describes its parts to rank 0: which elements of which parameters, and the entries of their state. Then it
sends its shards of the state, tensor by tensor, from host memory. A device never holds more than a shard. Loading takes
each rank's part of an unsharded state.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import broadcast_object, gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.engine.cuts import Run
from lightning_parstrat.distributed.torch_compat import without_step_hooks

MASTER_WEIGHTS = "master_weights"
"""The key of master weights in a state dict, by position as in ``"state"``. Other strategies ignore it."""

ELEMENTWISE_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""torch's optimizers whose update of an element depends on that element alone. Exact classes: a subclass may differ."""


StateDict = dict[Any, Any]


class Shards(NamedTuple):
    """Where the state of an optimizer's parameters is.

    Attributes:
        slots: The places of sharded parameters. Every rank has the state of all others.
        ranks: The ranks that together hold one copy of the state, in the order of their shards, rank 0 first.
        control: Collectives of all ranks. They work on host memory.
    """

    slots: Mapping[Tensor, ParameterSlot]
    ranks: Sequence[int]
    control: Collectives


class PartOfState(NamedTuple):
    """The part of one parameter's state that one rank holds.

    Attributes:
        position: The parameter's position in the optimizer.
        elements: Which of the parameter's elements there are, in storage order.
        dtypes: The dtype of each tensor that is cut as the parameter is.
        others: All other entries, with their values.
    """

    position: int
    elements: slice
    dtypes: dict[str, torch.dtype]
    others: dict[str, Any]


def grouped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order in which its state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


StandIn = Callable[[int, str, ParameterSlot, torch.dtype], Tensor]
"""Makes the replacement of a tensor. It gets a parameter's position in the optimizer, and an entry of its state."""


def gather_state_dict(
    optimizer: Optimizer, shards: Shards, on_all: bool = False, stand_in: StandIn | None = None
) -> StateDict:
    """The optimizer's unsharded state in torch's own format, its tensors in host memory.

    Collective. Each rank describes what it holds, and then sends its shards of the state, one by one. At the end, rank
    0's host holds the unsharded state. A device never holds more than before.

    Args:
        optimizer: A sharded optimizer.
        shards: Where its state is.
        on_all: Whether rank 0 sends the unsharded state to all others.
        stand_in: If given, it makes the tensors of the result. Then only values that are no part of a shard are sent,
            such as counts of steps.

    Returns:
        The unsharded state on rank 0, or on all. Other ranks get the parameter groups, with an empty state.
    """
    control, parameters = shards.control, grouped_parameters(optimizer)
    own = _own_parts(optimizer, shards) if control.rank in shards.ranks else []
    described: list[list[PartOfState]] = gather_object(own, control.group)
    by_position: dict[int, StateDict] = {}
    for position, _, dtypes, others in (part for of_rank in described for part in of_rank):
        state, slot = by_position.setdefault(position, {}), shards.slots[parameters[position]]
        # If ranks differ, the entries that any of them keeps.
        state.update({key: copy.deepcopy(one) for key, one in others.items() if key not in state})
        make = stand_in or _zeros
        state.update({key: make(position, key, slot, dtype) for key, dtype in dtypes.items() if key not in state})
    if stand_in is None:
        _send_parts(optimizer, shards, own, by_position)
        for source, parts in enumerate(described[1:], 1):
            _receive_parts(shards, source, parts, parameters, by_position)
    if on_all:
        by_position = broadcast_object(by_position, control.group)
    by_parameter: dict[Tensor, StateDict] = {parameters[position]: state for position, state in by_position.items()}
    if on_all or control.rank == 0:
        # Every rank has the same state for replicated parameters.
        replicated = [p for p in parameters if p not in shards.slots and p in optimizer.state]
        by_parameter.update({parameter: on_host(optimizer.state[parameter]) for parameter in replicated})
    return _packed(optimizer, by_parameter)


@torch.no_grad()
def own_state_dict(optimizer: Optimizer, slots: Mapping[Tensor, ParameterSlot], state_dict: StateDict) -> StateDict:
    """This rank's part of an unsharded state, for groups that hold shards. Master weights are taken over at once.

    Args:
        optimizer: A sharded optimizer. Its groups hold the full parameters.
        slots: The places of its sharded parameters.
        state_dict: Unsharded tensors in torch's own format, from any strategy and world size.

    Raises:
        ValueError: The groups do not match the optimizer's.
    """
    saved_groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            "The loaded optimizer state does not match the optimizer: it has parameter groups of sizes"
            f" {saved_sizes}, the optimizer has {sizes}."
        )
    of_parameters = {identifier for saved in saved_groups for identifier in saved["params"]}
    state = {key: value for key, value in state_dict["state"].items() if key not in of_parameters}
    groups, masters = [], state_dict.get(MASTER_WEIGHTS, {})
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        kept = []
        for parameter, identifier in zip(group["params"], saved["params"], strict=True):
            slot, entries = slots.get(parameter), state_dict["state"].get(identifier)
            if slot is not None and slot.shard is None:
                continue
            kept.append(identifier)
            if entries is not None and slot is None:
                state[identifier] = replace_leaves(entries, torch.clone)
            elif entries is not None and slot is not None:
                state[identifier] = {key: shard_value(value, slot) for key, value in entries.items()}
            if slot is not None and slot.shard is not None and slot.has_master_weights and identifier in masters:
                # If the parameter has another value at the next step, the step uses that value.
                slot.shard.copy_(shard_value(masters[identifier], slot))
        groups.append({**saved, "params": kept})
    return {**state_dict, "state": state, "param_groups": groups}


def check_shapes(optimizer: Optimizer, state_dict: StateDict, names: Mapping[Tensor, str]) -> None:
    """Raises an error for state of other parameters, if the shapes differ. Not collective.

    Args:
        optimizer: Sharded or not. If it is not element-wise, its state may have any shapes.
        state_dict: The state to load, in torch's own format. Tensors may be on the meta device.
        names: The names of the parameters.

    Raises:
        ValueError: A tensor has another shape than its parameter.
    """
    identifiers = [identifier for group in state_dict["param_groups"] for identifier in group["params"]]
    is_elementwise = type(optimizer) in ELEMENTWISE_OPTIMIZERS
    # If their numbers differ, loading raises an error.
    for identifier, parameter in zip(identifiers, grouped_parameters(optimizer), strict=False):
        for key, value in state_dict["state"].get(identifier, {}).items() if is_elementwise else ():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"The checkpoint has {key!r} of shape {tuple(value.shape)} for"
                    f" {names.get(parameter, identifier)!r}, which has shape {tuple(parameter.shape)}."
                    f" `configure_optimizers` must give {type(optimizer).__name__} the same parameters, in the same"
                    " order, as when it was saved."
                )


def _packed(optimizer: Optimizer, states: dict[Tensor, StateDict]) -> StateDict:
    """Torch's own ``state_dict`` of whole states by parameter, whose hooks run. The groups show the parameters."""
    parameters, own = grouped_parameters(optimizer), optimizer.state
    position = {parameter: number for number, parameter in reversed([*enumerate(parameters)])}
    # Beside the state, not in it: torch's optimizers take a parameter with any state as stepped.
    masters = {position[one]: state.pop(MASTER_WEIGHTS) for one, state in states.items() if MASTER_WEIGHTS in state}
    others = {key: value for key, value in own.items() if not isinstance(key, Tensor)}
    optimizer.state = defaultdict(dict, {one: states[one] for one in parameters if states.get(one)} | others)
    try:
        packed = Optimizer.state_dict(optimizer)
    finally:
        optimizer.state = own
    return packed | ({MASTER_WEIGHTS: masters} if masters else {})


def _own_parts(optimizer: Optimizer, shards: Shards) -> list[PartOfState]:
    """The parts of the state that this rank holds."""
    parts = []
    for position, parameter in enumerate(grouped_parameters(optimizer)):
        slot = shards.slots.get(parameter)
        if slot is None or slot.shard is None:
            continue
        entries = optimizer.state.get(slot.shard, {})
        tensors = {key: one for key, one in entries.items() if isinstance(one, Tensor)}
        cut = {key: one.dtype for key, one in tensors.items() if one.shape == slot.shard.shape}
        others = {key: on_host(one) for key, one in entries.items() if key not in cut}
        masters = {MASTER_WEIGHTS: slot.shard.dtype} if slot.has_master_weights else {}
        parts.append(PartOfState(position, slot.shard_slice.elements, masters | cut, others))
    return parts


def _send_parts(
    optimizer: Optimizer, shards: Shards, own: Sequence[PartOfState], state: Mapping[int, StateDict]
) -> None:
    """Sends this rank's tensors to rank 0, one by one. Rank 0 copies its own into ``state``."""
    parameters, control = grouped_parameters(optimizer), shards.control
    for position, _, dtypes, _ in own:
        slot = shards.slots[parameters[position]]
        for key in dtypes:
            value: Any = slot.shard if key == MASTER_WEIGHTS else optimizer.state[parameters[position]][key]
            if control.rank == 0:
                slot.part_of(state[position][key]).copy_(value.detach())
                continue
            uncut = value.numel() == slot.place.numel
            flat = slot.storage_order(value.detach()) if uncut else value.detach()
            control.group.send([flat.contiguous().cpu()], 0, 0).wait()


def _receive_parts(
    shards: Shards,
    source: int,
    parts: Sequence[PartOfState],
    parameters: Sequence[Tensor],
    state: Mapping[int, StateDict],
) -> None:
    """Receives another rank's tensors, each at its place in ``state``."""
    for position, elements, dtypes, _ in parts:
        for key in dtypes:
            place = shards.slots[parameters[position]].storage_order(state[position][key])[elements]
            shards.control.group.recv([place], source, 0).wait()


def _zeros(_: int, __: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
    # As before a first step: a rank may lack an entry that other ranks have.
    return torch.empty_strided(slot.parameter.shape, slot.strides, dtype=dtype).zero_()


def on_host(value: Any) -> Any:
    """A value with its tensors in host memory."""
    return replace_leaves(value, lambda tensor: tensor.detach().cpu())


class StateByShard(defaultdict[Any, Any]):
    """``optimizer.state`` while the optimizer is sharded: keyed by this rank's shards.

    You can use a parameter as a key, too, to read, change, reset or remove this rank's state for it. Entries
    with the parameter's shape elsewhere have the shape of the shard's part here. If this rank owns nothing of a
    parameter, there is no state for it. Not collective.

    Args:
        slots: The slot of each parameter, and so its shard. Later additions are seen.
        state: State by shard.
    """

    def __init__(self, slots: Mapping[Tensor, ParameterSlot], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._slots = slots

    def _slot(self, key: Any) -> ParameterSlot | None:
        return self._slots.get(key) if isinstance(key, Tensor) else None

    def _key(self, key: Any) -> Any:
        slot = self._slot(key)
        return key if slot is None or slot.shard is None else slot.shard

    def _is_elsewhere(self, key: Any) -> bool:
        """Whether this rank owns nothing of a parameter."""
        slot = self._slot(key)
        return slot is not None and slot.shard is None

    @override
    def __missing__(self, key: Any) -> Any:
        if self._is_elsewhere(key):
            # A state made for it must not stay.
            return {}
        # Steps use shards as keys, which are found at once.
        return super().__missing__(key) if self._slot(key) is None else self[self._key(key)]

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slot(key)
        if slot is None:
            super().__setitem__(key, value)
        elif slot.shard is not None:
            super().__setitem__(slot.shard, {name: shard_value(entry, slot) for name, entry in value.items()})

    @override
    def __delitem__(self, key: Any) -> None:
        if not self._is_elsewhere(key):
            super().__delitem__(self._key(key))

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        return {} if self._is_elsewhere(key) and not default else super().pop(self._key(key), *default)

    @override
    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    # That of `dict` does not call `__setitem__`.
    update = MutableMapping.update

    @override
    def copy(self) -> dict[Any, Any]:  # type: ignore[override]
        return dict(self)

    @override
    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class StateLeftOut(defaultdict[Any, Any]):
    """``optimizer.state`` in a copy of a sharded optimizer. Reading it raises an error until a state is loaded."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "This optimizer is a copy of a sharded one, without its state: each rank has a part of that. Call"
            " `state_dict()` of the original on all ranks, and `load_state_dict()` of the copy with what it returns."
        )

    @override
    def __reduce__(self) -> Any:
        return type(self), ()

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    # Not `get`: torch's optimizers call it when a copy is made of this copy.
    pop = setdefault = update = keys = values = items = _refuse  # type: ignore[assignment]


def shard_existing_state(state: Mapping[Any, Any], slots: Mapping[Tensor, ParameterSlot]) -> StateByShard:
    """This rank's shards of state from before its parameter is sharded (Adagrad makes state at once)."""
    if isinstance(state, StateByShard) and not any(key in slots for key in state):
        return state
    sharded = StateByShard(slots, {})
    for key, entries in state.items():
        sharded[key] = entries
    return sharded


def shard_value(value: Any, slot: ParameterSlot) -> Any:
    """This rank's part of one entry of a parameter's state. Entries without the parameter's shape are replicated."""
    if isinstance(value, Run) and slot.shard is not None:
        part = value.elements.as_strided(slot.shard.shape, slot.shard.stride())
    elif not isinstance(value, Tensor) or slot.shard is None or value.shape != slot.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    else:
        # A copy, so that the other ranks' parts can be freed. A checkpoint may be mapped into memory, not read.
        part = slot.part_of(value).clone()
    # State that an optimizer made in the parameter's dtype is converted to the master weights' dtype.
    return part.to(slot.bucket.shard_dtype) if part.dtype == slot.parameter.dtype else part


def state_bytes_per_parameter_byte(optimizer: Optimizer) -> float | None:
    """How much state an element-wise optimizer keeps. A twin of it steps a small parameter to find out.

    Returns:
        Bytes of state per byte of parameters (AdamW: 2), averaged over groups. If it is unknown, None.
    """
    cls = type(optimizer)
    if cls not in ELEMENTWISE_OPTIMIZERS or not inspect.isfunction(inspect.unwrap(cls.step)):
        # A replacement of torch's function may count its calls.
        return None
    known = inspect.signature(cls).parameters
    state_bytes = parameter_bytes = 0
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(1024))
        probe.grad = torch.zeros_like(probe)
        options = {key: value for key, value in group.items() if key in known and key != "params"}
        try:
            twin = cls([probe], **{**options, "capturable": False} if "capturable" in known else options)
            # Hooks that a user has registered for all optimizers do not apply to this one.
            with without_step_hooks(twin):
                twin.step()
        except Exception:
            # Settings that only work on the user's device, such as a learning rate in a CUDA tensor.
            return None
        entries = [entry for entry in twin.state[probe].values() if isinstance(entry, Tensor)]
        size = sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
        parameter_bytes += size
        state_bytes += size * sum(entry.nbytes for entry in entries if entry.shape == probe.shape) // probe.nbytes
    return state_bytes / parameter_bytes if parameter_bytes else 0.0
