"""The order in which an epoch goes through a sampler: what a checkpoint keeps of it, and how it goes on from there."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from lightning_parstrat.core.epoch_order import in_turns, left_of_turns
from lightning_parstrat.strategies.data.random_numbers import rng_preserved

_RANDOM = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
"""They draw when their first item is asked for: from their generator, or else from torch's own."""

_REPLAYED = (*_RANDOM, SequentialSampler, DistributedSampler)
_END = object()
_TOO_LARGE = 2**63


class Order(ABC):
    """One way through a sampler, from where it begins. To be iterated once."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The items that are left."""

    @abstractmethod
    def state(self, taken: int) -> dict[str, Any] | None:
        """From what the order goes on after ``taken`` of these items; None where nothing has been drawn.

        Plain values and tensors, for a checkpoint.
        """

    def number_made(self, drawn: int) -> int:
        """How many batches were made of what was drawn, when the order has come to its end."""
        return drawn


def order_of(sampler: Any) -> Order:
    """The order of a new pass over a sampler: torch's own are replayed, what any other yields is noted."""
    if type(sampler) in _REPLAYED:
        return Replayed(sampler)
    return Recorded(sampler, whole=len(sampler.dataset) if type(sampler) is DistributedSamplerWrapper else None)


def is_stateful(owner: Any) -> bool:
    """Whether a loader, dataset or sampler knows by itself where it stands."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def can_go_on(sampler: Any) -> bool:
    """Whether what is left of its orders can be told: it has an end, and nobody else has it go on."""
    if any(is_stateful(one) for one in (sampler, getattr(sampler, "sampler", None))):
        return False
    return type(sampler) in _REPLAYED or sized_len(sampler) is not None


def takes_turns(sampler: Any) -> bool:
    """Whether a sampler shares one order with those of other ranks."""
    samplers = (sampler, getattr(sampler, "sampler", None))
    return any(isinstance(one, DistributedSampler) or hasattr(one, "num_replicas") for one in samplers)


class Beginning(NamedTuple):
    """What decides an order of one of torch's samplers.

    Attributes:
        kind: Name of the sampler's class.
        length: How many items it has.
        epoch: Of a DistributedSampler.
        seed: Of a DistributedSampler.
        random: The state of the generator that the order is drawn from.
    """

    kind: str
    length: int
    epoch: int | None
    seed: int | None
    random: Tensor | None


class Replayed(Order):
    """An order that follows from a few numbers; going on in it loads no sample.

    Args:
        sampler: One of torch's, of exactly its class.
        state: From where to go on; None for a new pass.
    """

    def __init__(self, sampler: Any, state: Mapping[str, Any] | None = None) -> None:
        self._sampler = sampler
        self._skipped = 0 if state is None else state["taken"]
        self._beginning = None if state is None else Beginning(*(state[name] for name in Beginning._fields))

    @staticmethod
    def fits(sampler: Any, state: Mapping[str, Any]) -> bool:
        """Whether a state is of such a sampler, over as many samples."""
        return type(sampler) in _REPLAYED and (type(sampler).__name__, len(sampler)) == (state["kind"], state["length"])

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._beginning is not None:
            return self._again(self._beginning)
        epoch, seed = (getattr(self._sampler, name, None) for name in ("epoch", "seed"))
        return self._noting(iter(self._sampler), epoch, seed)

    def _noting(self, items: Iterator[Any], epoch: int | None, seed: int | None) -> Iterator[Any]:
        random = self._generator_state() if isinstance(self._sampler, _RANDOM) else None
        self._beginning = Beginning(type(self._sampler).__name__, len(self._sampler), epoch, seed, random)
        yield from items

    def _again(self, beginning: Beginning) -> Iterator[Any]:
        if beginning.epoch is not None:
            # For good: with another seed, the next epochs would not be those of the training that was saved.
            self._sampler.seed = beginning.seed
            self._sampler.set_epoch(beginning.epoch)
        with self._as_it_began(beginning.random):
            items = iter(self._sampler)
            first = next(items, _END)
        yield from islice(chain([first], items) if first is not _END else items, self._skipped, None)

    @contextmanager
    def _as_it_began(self, random: Tensor | None) -> Generator[None, None, None]:
        """Sets what is drawn from; a generator of the sampler's own goes on from there."""
        if random is None:
            yield
        elif self._sampler.generator is not None:
            self._sampler.generator.set_state(random)
            yield
        else:
            before = torch.get_rng_state()
            torch.set_rng_state(random)
            yield
            torch.set_rng_state(before)

    def _generator_state(self) -> Tensor:
        generator = self._sampler.generator
        state: Tensor = torch.get_rng_state() if generator is None else generator.get_state()
        return state

    @override
    def state(self, taken: int) -> dict[str, Any] | None:
        if self._beginning is None:
            return None
        return {**self._beginning._asdict(), "taken": self._skipped + taken}


def can_be_shared(sampler: Any, states: list[Mapping[str, Any]]) -> bool:
    """Whether what ranks have left of their orders can be put together, and dealt out again to such a sampler's ranks.

    Args:
        sampler: This rank's.
        states: Of each rank's order.
    """
    if all("items" in state for state in states):
        return takes_turns(sampler)
    kind = DistributedSampler.__name__
    return type(sampler) is DistributedSampler and all(state.get("kind") == kind for state in states)


def left_by_ranks(sampler: Any, states: list[Mapping[str, Any]]) -> list[Any]:
    """What no rank has taken of an epoch that ranks share, in its order; without padding where that is known.

    Args:
        sampler: Over the same samples, for any number of ranks.
        states: Of each rank's order.
    """
    first = states[0]
    if "items" in first:
        left = in_turns([unpacked(state["items"]) for state in states])
        return left if first["whole"] is None else left[: first["whole"] - sum(state["taken"] for state in states)]
    alone = DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, first["seed"])
    alone.set_epoch(first["epoch"])
    return left_of_turns(list(alone), [state["taken"] for state in states])


class Recorded(Order):
    """An order of which nothing is known but what has been drawn; a checkpoint holds what is left of it.

    Args:
        sampler: Yields the items of a new pass.
        items: What is left of a pass that is gone on with; None for a new one.
        whole: How many items all ranks have together, without padding; None where that is unknown.
    """

    def __init__(self, sampler: Any, items: list[Any] | None = None, whole: int | None = None) -> None:
        self._sampler = sampler
        self._items = items or []
        self._rest: Iterator[Any] | None = None if items is None else iter(())
        self._whole = whole

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._rest is None:
            self._rest = iter(self._sampler)
        return self._follow(self._rest)

    def _follow(self, rest: Iterator[Any]) -> Iterator[Any]:
        position = 0
        while True:
            if position == len(self._items):
                item = next(rest, _END)
                if item is _END:
                    return
                self._items.append(item)
            yield self._items[position]
            position += 1

    @override
    def state(self, taken: int) -> dict[str, Any] | None:
        if self._rest is None:
            return None
        # Now, as in a new process the sampler would draw something else. No more than it says it has: it may go on
        # forever.
        with rng_preserved():
            self._items.extend(islice(self._rest, max(0, len(self._sampler) - len(self._items))))
        items = [plain(item) for item in self._items[taken:]]
        return {"items": packed(items), "taken": taken, "whole": self._whole}


class NotPlainError(TypeError):
    """A sampler yields what a checkpoint cannot hold."""


def plain(item: Any) -> Any:
    """What a sampler has yielded, of values that are loaded with ``weights_only``: numbers of NumPy become Python's.

    Raises:
        NotPlainError: It has something else in it.
    """
    if isinstance(item, Integral) and not isinstance(item, bool):
        return int(item)
    if item is None or type(item) in (bool, float, str):
        return item
    if type(item) is Tensor:
        return item.item() if item.ndim == 0 else item
    if isinstance(item, (np.ndarray, np.generic)) and item.dtype != object:
        return plain(item.tolist())
    if type(item) in (list, tuple):
        return type(item)(map(plain, item))
    if type(item) is dict:
        return {plain(key): plain(value) for key, value in item.items()}
    raise NotPlainError(type(item).__name__)


def packed(items: list[Any]) -> Any:
    """Indices as one tensor, lists of them as two; anything else as it is."""
    if _are_indices(items):
        return torch.tensor(items, dtype=torch.int64)
    if all(type(item) is list and _are_indices(item) for item in items):
        return {
            "indices": torch.tensor(list(chain.from_iterable(items)), dtype=torch.int64),
            "sizes": torch.tensor([len(item) for item in items], dtype=torch.int64),
        }
    return list(items)


def unpacked(items: Any) -> list[Any]:
    """Undoes :func:`packed`; batches are lists."""
    if isinstance(items, Tensor):
        indices: list[Any] = items.tolist()
        return indices
    if isinstance(items, dict):
        flat = iter(items["indices"].tolist())
        return [list(islice(flat, size)) for size in items["sizes"].tolist()]
    return list(items)


def _are_indices(items: Iterable[Any]) -> bool:
    return all(type(item) is int and -_TOO_LARGE <= item < _TOO_LARGE for item in items)
