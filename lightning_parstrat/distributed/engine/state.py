"""The state of a sharded optimizer, to and from torch's own ``state_dict``: described, collected, and sliced.

All ranks know the buckets, and so which elements each rank has. The buckets do not contain the names of the state's
entries, their dtypes, and counts of steps. These are usually alike in a bucket, so ranks compare numbers. If the
numbers differ, ranks describe what they have. Then each rank sends its shard of the state, in one message for each
entry of a bucket. Messages are in host memory, so a device never holds more than a shard. Loading takes each rank's
part of an unsharded state.
"""

import copy
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import broadcast_object, gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import met
from lightning_parstrat.distributed.comm.work import as_work
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.torch_compat import run_hooks_after_state_dict, run_hooks_before_state_dict

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


def _sharding_of(optimizer: Optimizer) -> Any:
    """The ``OptimizerSharding`` that ``stepping.py`` has set. That file imports this one."""
    return vars(optimizer)["_sharding"]


StateDict = dict[Any, Any]


class Entry(NamedTuple):
    """One entry of a shard's state: the dtype of a tensor with the shard's shape, or any other value."""

    dtype: torch.dtype | None
    value: Any


Entries = Mapping[str, Entry]
"""The entries of one parameter, in the optimizer's order."""


class OwnPart(NamedTuple):
    """This rank's part of an entry without an unsharded tensor, 1-D in storage order."""

    elements: Tensor


def grouped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order in which its state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


StandIn = Callable[[int, str, ParameterSlot, torch.dtype], Tensor]
"""Makes the replacement of a tensor. It gets a parameter's position in the optimizer, and an entry of its state."""


def gather_state_dict(optimizer: Optimizer, on_all: bool = False, stand_in: StandIn | None = None) -> StateDict:
    """The optimizer's unsharded state in torch's own format, its tensors in host memory.

    Collective. Ranks compare their entries by one small reduction. Then each rank sends its shard of the state, bucket
    by bucket. At the end, rank 0's host holds the unsharded state. Until then it also holds the messages of one bucket.
    A device never holds more than before.

    Args:
        optimizer: A sharded optimizer.
        on_all: Whether rank 0 sends the unsharded state to all others.
        stand_in: If given, it makes the tensors of the result. Then only values that are no part of a shard are sent,
            such as counts of steps.

    Returns:
        The unsharded state on rank 0, or on all. Other ranks get the parameter groups, with an empty state.
    """
    sharding = _sharding_of(optimizer)
    run_hooks_before_state_dict(optimizer)
    control = sharding.control
    parameters = grouped_parameters(optimizer)
    positions = {sharding.slots[p]: position for position, p in enumerate(parameters) if p in sharding.slots}
    ranks = sharding.ranks_of_a_copy
    buckets = buckets_of(positions)
    describe_buckets(optimizer, buckets, ranks, control)
    gathered: dict[ParameterSlot, StateDict] = {}
    if stand_in is None:
        gathered = collect(optimizer, buckets, ranks, control)
    elif control.rank == 0:
        make = stand_in
        gathered = _unsharded(buckets, lambda slot, key, dtype: make(positions[slot], key, slot, dtype))
    by_position = {positions[slot]: state for slot, state in gathered.items()}
    if on_all:
        by_position = broadcast_object(by_position, control.group)
    by_parameter: dict[Tensor, StateDict] = {parameters[position]: state for position, state in by_position.items()}
    if on_all or control.rank == 0:
        # Every rank has the same state for replicated parameters.
        replicated = [p for p in parameters if p not in sharding.slots and p in optimizer.state]
        by_parameter.update({parameter: on_host(optimizer.state[parameter]) for parameter in replicated})
    return run_hooks_after_state_dict(optimizer, _pack(optimizer, by_parameter))


def replicated_state_dict(optimizer: Optimizer) -> StateDict:
    """The optimizer's unsharded state on every rank, in torch's own format and on the host.

    Collective: nothing is sent before all ranks have called it. A rank that waits for others logs that.

    Args:
        optimizer: A sharded optimizer.
    """
    sharding = _sharding_of(optimizer)
    buckets = ", ".join(str(bucket.index) for bucket in sharding.buckets[:1])
    advice = "Call it on all ranks, and save what it returns on rank 0."
    with met("`optimizer.state_dict()`", sharding.control.group, advice, of=f"buckets from {buckets}"):
        return gather_state_dict(optimizer, on_all=True)


def load_sharded(optimizer: Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
    """Loads the unsharded state, of which this rank keeps its shards.

    Not collective, except for parameters that joined the groups since the last step: they get buckets first.

    Args:
        optimizer: A sharded optimizer.
        state_dict: Unsharded tensors in torch's own format, from any strategy and world size.
        load: The original ``load_state_dict``, bound to the optimizer.

    Raises:
        ValueError: The groups do not match the optimizer's.
    """
    sharding = _sharding_of(optimizer)
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
    """Raises an error for state of other parameters, if the shapes differ. Not collective.

    Args:
        optimizer: Sharded or not.
        state_dict: The state to load, in torch's own format. Tensors may be on the meta device.
        names: The names of the parameters.

    Raises:
        ValueError: A tensor has another shape than its parameter, in the state of an element-wise optimizer.
    """
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        return
    identifiers = [identifier for group in state_dict["param_groups"] for identifier in group["params"]]
    parameters = grouped_parameters(optimizer)
    if len(identifiers) != len(parameters):
        # Loading raises an error for that.
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
    """Takes over this rank's part. If the parameter has another value at the next step, the step uses that value."""
    if slot.shard is None or unsharded is None:
        return
    part = shard_value(unsharded, slot)
    if slot.has_master_weights:
        slot.shard.copy_(part)


def _unsharded(
    buckets: Sequence["BucketState"], make: Callable[[ParameterSlot, str, torch.dtype], Tensor]
) -> dict[ParameterSlot, StateDict]:
    """The state of each parameter, with tensors that ``make`` has made."""
    return {
        slot: {key: one.value if one.dtype is None else make(slot, key, one.dtype) for key, one in entries.items()}
        for bucket in buckets
        for slot, entries in bucket.by_slot().items()
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
    # Beside the state, not in it: torch's optimizers take a parameter with any state as stepped.
    masters = {index: state.pop(MASTER_WEIGHTS) for index, state in packed.items() if MASTER_WEIGHTS in state}
    packed = {index: state for index, state in packed.items() if state}
    packed.update({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    return {"state": packed, "param_groups": groups, **({MASTER_WEIGHTS: masters} if masters else {})}


class _Message(NamedTuple):
    """One entry of the state of a shard's parameters, of one dtype: all parameters' parts, one after the other."""

    key: str
    dtype: torch.dtype
    parts: list[tuple[ParameterSlot, slice]]

    def room(self) -> Tensor:
        """Memory for the message."""
        return torch.empty(sum(one.stop - one.start for _, one in self.parts), dtype=self.dtype)

    def parts_in(self, packed: Tensor) -> Iterator[tuple[ParameterSlot, slice, Tensor]]:
        """The parts, with their places in the message."""
        stop = 0
        for slot, elements in self.parts:
            start, stop = stop, stop + elements.stop - elements.start
            yield slot, elements, packed[start:stop]


class BucketState:
    """The state of one bucket's parameters in an optimizer.

    Args:
        slots: Slots of one bucket, at least one with elements.
    """

    def __init__(self, slots: Iterable[ParameterSlot]) -> None:
        self.slots = sorted((slot for slot in slots if slot.place.numel), key=lambda slot: slot.place.offset)
        self.of_all: Entries | None = None
        """If ranks agree that all parameters have the same entries, those entries."""
        self.by_shard: dict[int, list[Entries]] = {}
        """Otherwise the entries for the parts of each shard, in their order."""
        self._starts = [slot.place.offset for slot in self.slots]

    def parts_of(self, shard: int) -> Iterator[tuple[ParameterSlot, slice]]:
        """The content of a shard: the parameters, and which elements of each, in storage order."""
        bounds = self.slots[0].bucket.layout.bounds
        first = max(bisect_right(self._starts, bounds[shard]) - 1, 0)
        for slot in self.slots[first:]:
            if slot.place.offset >= bounds[shard + 1]:
                return
            elements = slot.elements_of(shard)
            if elements.start < elements.stop:
                yield slot, elements

    def has_parts_in(self, shard: int) -> bool:
        """Whether a shard has a part of any of them."""
        return next(self.parts_of(shard), None) is not None

    def entries_of(self, shard: int) -> Iterator[tuple[ParameterSlot, slice, Entries]]:
        """The same, with the entries of each parameter there."""
        for number, (slot, elements) in enumerate(self.parts_of(shard)):
            yield slot, elements, self.by_shard[shard][number] if self.of_all is None else self.of_all

    def messages_of(self, shard: int) -> list[_Message]:
        """The messages by which the owner of a shard sends its state."""
        found: dict[tuple[str, torch.dtype], _Message] = {}
        for slot, elements, entries in self.entries_of(shard):
            for key, entry in entries.items():
                if entry.dtype is not None:
                    message = found.setdefault((key, entry.dtype), _Message(key, entry.dtype, []))
                    message.parts.append((slot, elements))
        return list(found.values())

    def by_slot(self) -> dict[ParameterSlot, dict[str, Entry]]:
        """The entries of each parameter, as copies. If ranks differ, the entries that any of them keeps."""
        if self.of_all is not None:
            return {slot: {key: copy.deepcopy(one) for key, one in self.of_all.items()} for slot in self.slots}
        found: dict[ParameterSlot, dict[str, Entry]] = {}
        for shard in sorted(self.by_shard):
            for slot, _, entries in self.entries_of(shard):
                known = found.setdefault(slot, {})
                known.update({key: copy.deepcopy(one) for key, one in entries.items() if key not in known})
        return found


def buckets_of(slots: Iterable[ParameterSlot]) -> list[BucketState]:
    """The slots by their buckets, in the order in which the buckets are found, without empty parameters."""
    by_bucket: dict[int, list[ParameterSlot]] = {}
    for slot in slots:
        if slot.place.numel:
            by_bucket.setdefault(id(slot.bucket), []).append(slot)
    return [BucketState(found) for found in by_bucket.values()]


def describe_buckets(
    optimizer: Optimizer, buckets: Sequence[BucketState], ranks: Sequence[int], control: Collectives
) -> None:
    """Fills in what all ranks hold on rank 0. On other ranks, fills in their own entries. Collective.

    It costs one small reduction of 16 bytes per bucket. If all parameters of a bucket have the same entries and values
    on all ranks, nothing else is sent. The exception is a bucket without a part on rank 0. Each rank describes its
    parts of all other buckets.

    Args:
        optimizer: The optimizer whose state is described.
        buckets: The same on all ranks, and empty. They are filled in.
        ranks: The ranks that together hold one copy, in the order of their shards.
        control: Collectives of all ranks. They work on host memory.
    """
    shard = ranks.index(control.rank) if control.rank in ranks else None
    for bucket in buckets:
        own: list[Entries] = [] if shard is None else [describe(optimizer, slot) for slot, _ in bucket.parts_of(shard)]
        if shard is not None and own:
            bucket.by_shard[shard] = own
    differing = _differing([next(iter(bucket.by_shard.values()), []) for bucket in buckets], control)
    unknown = [n for n, one in enumerate(buckets) if differing[n] or not one.has_parts_in(0)]
    if unknown:
        described = gather_object({n: buckets[n].by_shard for n in unknown}, control.group)
        for number in unknown:
            for of_rank in described:
                buckets[number].by_shard.update(of_rank[number])
    for bucket, differs in zip(buckets, differing, strict=True):
        if not differs and bucket.by_shard:
            bucket.of_all = next(iter(bucket.by_shard.values()))[0]


def describe(optimizer: Optimizer, slot: ParameterSlot) -> dict[str, Entry]:
    """This rank's entries for the slot's shard: sharded tensors by dtype, everything else by value on the host."""
    shard = slot.shard
    if shard is None:
        raise AssertionError("state was found for a shard that does not exist")
    entries = {MASTER_WEIGHTS: Entry(shard.dtype, None)} if slot.has_master_weights else {}
    for key, value in optimizer.state.get(shard, {}).items():
        if isinstance(value, Tensor) and value.shape == shard.shape:
            entries[key] = Entry(value.dtype, None)
        else:
            entries[key] = Entry(None, on_host(value))
    return entries


def on_host(value: Any) -> Any:
    """A value with its tensors in host memory."""
    return replace_leaves(value, lambda tensor: tensor.detach().cpu())


def _differing(own: Sequence[Sequence[Entries]], control: Collectives) -> list[bool]:
    """For each bucket, whether its parameters have different entries. Collective."""
    # The largest and the smallest number of all ranks. A rank without a part of a bucket has no number.
    extremes = torch.full((2, len(own)), -(2**62), dtype=torch.int64)
    for number, described in enumerate(own):
        numbers = {_number_of(entries) for entries in described}
        if len(numbers) == 1:
            only = numbers.pop()
            extremes[0, number], extremes[1, number] = only, -only
        elif numbers:
            extremes[:, number] = 2**62
    control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    return [largest != -smallest for largest, smallest in zip(*extremes.tolist(), strict=True)]


def _number_of(entries: Entries) -> int:
    """61 bits that are the same if all entries and their order are the same."""
    contents = [(key, str(one.dtype), replace_leaves(one.value, _content)) for key, one in entries.items()]
    return digest(pickle.dumps(contents))


def _content(tensor: Tensor) -> Any:
    # A pickled tensor has an address in it.
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def collect(
    optimizer: Optimizer, buckets: Sequence[BucketState], ranks: Sequence[int], control: Collectives
) -> dict[ParameterSlot, dict[str, Any]]:
    """The unsharded state on rank 0, in host memory. Other ranks get nothing. Collective.

    Each of ``ranks`` sends a message for each entry of each bucket, packed in host memory. Rank 0 receives the messages
    of one bucket at a time.

    Args:
        optimizer: The optimizer whose state is collected.
        buckets: After :func:`describe_buckets`.
        ranks: The ranks that together hold one copy, in the order of their shards, rank 0 first.
        control: Collectives of all ranks. They work on host memory.
    """
    if control.rank > 0:
        if control.rank in ranks:
            for bucket in buckets:
                for message in bucket.messages_of(ranks.index(control.rank)):
                    packed = _packed(optimizer, message)
                    as_work(control.group.send([packed], 0, 0)).wait()
        return {}
    state = _unsharded(buckets, _zeros)
    for bucket in buckets:
        # One by one, and before memory is taken for what arrives.
        for message in bucket.messages_of(0):
            _unpack(message, _packed(optimizer, message), state)
        arriving = []
        for shard, source in enumerate(ranks[1:], 1):
            for message in bucket.messages_of(shard):
                packed = message.room()
                arriving.append((message, packed, as_work(control.group.recv([packed], source, 0))))
        for message, packed, work in arriving:
            work.wait()
            _unpack(message, packed, state)
    return state


def _unpack(message: _Message, packed: Tensor, state: Mapping[ParameterSlot, StateDict]) -> None:
    for slot, elements, part in message.parts_in(packed):
        slot.storage_order(state[slot][message.key])[elements].copy_(part)


def _packed(optimizer: Optimizer, message: _Message) -> Tensor:
    """This rank's message, in host memory."""
    packed = message.room()
    for slot, _, part in message.parts_in(packed):
        if slot.shard is None or slot.shard_slice is None:
            raise AssertionError("state was found for a shard that does not exist")
        value: Tensor = slot.shard if message.key == MASTER_WEIGHTS else optimizer.state[slot.shard][message.key]
        uncut = slot.shard_slice.numel == slot.place.numel
        part.copy_(slot.storage_order(value.detach()) if uncut else value.detach())
    return packed


def _zeros(slot: ParameterSlot, _: str, dtype: torch.dtype) -> Tensor:
    # As before a first step: a rank may lack an entry that other ranks have.
    return torch.empty_strided(slot.parameter.shape, slot.strides, dtype=dtype).zero_()


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

    def _key(self, key: Any) -> Any:
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        return key if slot is None or slot.shard is None else slot.shard

    @override
    def __missing__(self, key: Any) -> Any:
        # Steps use shards as keys, which are found at once.
        slot = self._slots.get(key) if isinstance(key, Tensor) else None
        if slot is None:
            return super().__missing__(key)
        # A state made for a parameter of which this rank owns nothing must not stay.
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


class StateLeftOut(defaultdict[Any, Any]):
    """``optimizer.state`` in a copy of a sharded optimizer. Reading it raises an error until a state is loaded."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "This optimizer is a copy of a sharded one, without its state: each rank has a part of that. Call"
            " `state_dict()` of the original on all ranks, and `load_state_dict()` of the copy with what it returns."
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = pop = setdefault = update = keys = values = items = _refuse  # type: ignore[assignment]


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
    if isinstance(value, OwnPart) and slot.shard is not None:
        part = value.elements.as_strided(slot.shard.shape, slot.shard.stride())
    elif not isinstance(value, Tensor) or slot.shard is None or value.shape != slot.parameter.shape:
        return value.clone() if isinstance(value, Tensor) else value
    else:
        # A copy, so that the other ranks' parts can be freed. A checkpoint may be mapped into memory, not read.
        part = slot.part_of(value).clone()
    # State that an optimizer made in the parameter's dtype is converted to the master weights' dtype.
    return part.to(slot.bucket.shard_dtype) if part.dtype == slot.parameter.dtype else part
