"""Samplers of data loaders that can begin within an epoch: they draw the same indices again, and drop them.

A checkpoint holds the random state in which an epoch began, and the number and a digest of the drawn indices. It holds
the indices only if another number of ranks has begun the epoch.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import index
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_parstrat.core.epoch_order import left_of_turns, share
from lightning_parstrat.core.global_batch import Division
from lightning_parstrat.distributed.torch_compat import present_pass
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.data.stand_in import StandIn
from lightning_parstrat.strategies.lightning_compat import sampler_within

_AT_ONCE = 1024
"""The number of indices that are dropped at once."""

Position = Mapping[str, Any]
"""The position of a pass in a checkpoint.

``begin`` is the state that decides its items, ``taken`` how many were trained on, ``drawn`` how many were drawn,
``digest`` the digest of these, and ``batches`` how many batches of the pass were trained on. ``of_all_ranks`` says
whether the items are those of all ranks.
"""


class Pass(Iterator[Any]):
    """One pass over a loader's indices, which can be resumed at the same place.

    Attributes:
        begin: The state that decides its items. None if nothing has been drawn.
        batches_before: How many of its batches were trained on before it was saved and resumed.

    Args:
        sampler: The sampler of the pass.
        begin: For a resumed pass, the state in which it began.
        items: For a resumed pass, its items.
    """

    def __init__(
        self, sampler: "PositionedSampler", begin: Mapping[str, Any] | None = None, items: Iterable[Any] = ()
    ) -> None:
        self.begin, self.batches_before = begin, 0
        self._sampler, self._size, self._items = sampler, sampler.batch_size, iter(items)
        self._batches: Iterator[Any] | None = None
        self._taken_before = self._drawn = 0
        self._digest = hashlib.sha256()

    def drop(self, position: Position) -> bool:
        """Drops the items that were trained on. Returns whether the drawn items are those that were drawn before."""
        # Not all at once, because an epoch may have more than fit into memory.
        for left in range(position["taken"], 0, -_AT_ONCE):
            _add(self._digest, islice(self._items, min(left, _AT_ONCE)))
        compared = self._digest.copy()
        # Drawn ahead, for example by workers: compared as well, and then drawn a second time.
        ahead = list(islice(self._items, position["drawn"] - position["taken"]))
        _add(compared, ahead)
        self._items = chain(ahead, self._items)
        self._taken_before = self._drawn = position["taken"]
        return compared.hexdigest() == str(position["digest"])

    @override
    def __next__(self) -> Any:
        # On the first item, not before: loaders with workers begin two passes, and drop the first.
        division = self._sampler.division
        if self._batches is None:
            self._sampler.begin()
            if division is not None:
                division.begin(self.batches_before)
            if self.begin is None:
                self.begin, self._items = self._sampler.begin_state(), iter(self._sampler.source)
            self._batches = iter(self._sampler.batches(self._items, self._taken_before))
        batch = next(self._batches)
        items = [batch] if self._size is None else batch
        self._drawn += len(items)
        _add(self._digest, items)
        return batch if division is None else division.own(batch)

    def position(self, batches: int) -> Position:
        """The position in the pass.

        Args:
            batches: How many of its batches were trained on since it was resumed.
        """
        taken = self._sampler.samples_of(batches, self._taken_before)
        return {
            "begin": self.begin,
            "of_all_ranks": self._sampler.division is not None,
            "taken": min(self._taken_before + taken, self._drawn),
            "drawn": self._drawn,
            "digest": self._digest.hexdigest(),
            "batches": self.batches_before + batches,
        }


class PositionedSampler(StandIn):
    """Stands for a loader's sampler of batches, or of samples if the loader makes no batches. Not collective.

    Attributes:
        division: Cuts the batches of all ranks. None if this rank draws its own samples alone.
        resumed: The next pass, if it is a resumed one.
        recounts: Whether Lightning has to count from that pass's ``batches_before``, and not from its own count.
        undoes_seed: Whether the next pass sets generators back to before the loader drew a seed for its workers,
            because the saved training had drawn that seed earlier.
        workers_live_on: Whether it does so with torch's random numbers, too: the saved training had persistent workers.

    Args:
        dataloader: The loader. :meth:`remove` restores its sampler.
        division: Cuts the batches of all ranks, which a `BatchSampler` makes of a `DistributedSampler`'s samples.
        trains: Whether a training draws now. An evaluation with the same loader has the loader's own sampler.
    """

    __slots__ = (
        *("_before_seed", "_generators", "_name", "_trains", "division", "recounts", "resumed"),
        *("undoes_seed", "workers_live_on"),
    )

    def __init__(self, dataloader: DataLoader[Any], division: Division | None, trains: Callable[[], bool]) -> None:
        self._trains = trains
        self._name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        super().__init__(getattr(dataloader, self._name))
        self.division = division
        self.resumed: Pass | None = None
        self.recounts = self.undoes_seed = self.workers_live_on = False
        self._before_seed: tuple[Tensor, list[Tensor]] | None = None
        inner = (self.source, getattr(self.source, "sampler", None))
        owners = [dataloader, *inner, *map(sampler_within, inner)]
        values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
        # By identity, because loader and sampler usually share one.
        self._generators = list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())
        # The loader refuses to set this attribute. A change of its `__dict__` bypasses that check.
        vars(dataloader)[self._name] = self

    def remove(self, dataloader: DataLoader[Any]) -> None:
        """Restores a loader's sampler."""
        vars(dataloader)[self._name] = self.stands_for

    @property
    def _is_plain(self) -> bool:
        return type(self.stands_for) is BatchSampler

    @property
    def source(self) -> Any:
        """The iterable of the items that batches are made of, or of the batches."""
        source = self.stands_for.sampler if self._is_plain else self.stands_for
        return source if self.division is None else _as_rank(source, 0, 1)

    @property
    def batch_size(self) -> int | None:
        """Items of a batch of the next pass. None if the source yields batches."""
        return self.stands_for.batch_size if self._is_plain else None

    def batches(self, items: Any, taken: int) -> Any:
        """The batches of a pass, of all ranks if there is a division.

        Args:
            items: What the pass has left.
            taken: The number of its items before.
        """
        own = self.stands_for
        if self.division is not None:
            return (list(islice(items, size)) for size in self.division.sizes(len(self.source) - taken))
        return BatchSampler(items, own.batch_size, own.drop_last) if self._is_plain else items

    def samples_of(self, batches: int, taken: int) -> int:
        """The items of the next batches.

        Args:
            batches: The number of batches.
            taken: The number of items before.
        """
        if self.division is None:
            return batches * (self.batch_size or 1)
        return sum(islice(self.division.sizes(len(self.source) - taken), batches))

    def _length(self, items: int) -> int:
        """The number of batches that so many items make."""
        own = self.stands_for
        if self.division is not None:
            return sum(1 for _ in self.division.sizes(items))
        return len(BatchSampler(range(items), own.batch_size, own.drop_last)) if self._is_plain else items

    @override
    def __len__(self) -> int:
        is_own = self.division is None or not self._trains()
        return super().__len__() if is_own else self._length(len(self.source))

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._trains():
            return super().__iter__()
        # A loader calls it first, and draws the seed afterwards. With workers it calls it again after that.
        if self._before_seed is None:
            self._before_seed = (torch.get_rng_state(), self.generator_states())
        return Pass(self) if self.resumed is None else self.resumed

    def begin(self) -> None:
        """Notes that a pass draws its first item."""
        self.resumed = None
        if self.undoes_seed:
            self.undo_seed()

    def undo_seed(self) -> None:
        """Sets generators back to before the loader has drawn the first seed for its workers."""
        self.undoes_seed = False
        if self._before_seed is not None:
            before, states = self._before_seed
            self.set_generators(states)
            if self.workers_live_on:
                torch.set_rng_state(before)

    def set_generators(self, states: Sequence[Tensor]) -> None:
        """Sets the generators that belong to the loader and the sampler."""
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def generator_states(self) -> list[Tensor]:
        """States of the generators that belong to the loader and the sampler."""
        return [generator.get_state() for generator in self._generators]

    def begin_state(self) -> dict[str, Any]:
        """The state that decides the order of a pass that begins now: plain values and tensors."""
        source = self.source
        is_random = type(source) not in (DistributedSampler, SequentialSampler)
        rng = rng_state() if is_random else None
        return {"rng": rng, "generators": self.generator_states(), "seed": getattr(source, "seed", None)}

    @contextmanager
    def _drawn_again(self, source: Any, begin: Mapping[str, Any]) -> Iterator[Iterator[Any]]:
        """The items of a pass that began in this state, drawn from a sampler. Later ones may be drawn after its end."""
        if "items" in begin:
            items = begin["items"]
            yield iter(items.tolist() if isinstance(items, Tensor) else items)
            return
        random = rng_state()
        if begin["rng"] is not None:
            set_rng_state(begin["rng"])
        self.set_generators(begin["generators"])
        if isinstance(source, DistributedSampler):
            # This change stays: with another seed, the next epochs would differ from those of the saved training.
            source.seed = begin["seed"]
        yield iter(source)
        # Not so the generators: later items are drawn from them.
        set_rng_state(random)

    def resume(self, position: Position | None) -> bool:
        """Makes the next pass continue a saved one. Returns whether the indices drawn again are those drawn before."""
        if position is None:
            return False
        begin = position["begin"]
        with self._drawn_again(self.source, begin) as items:
            resumed = Pass(self, begin, items)
            is_same = resumed.drop(position)
        before, length = position["batches"], sized_len(begin.get("items", self.source))
        if before is None or (self.batch_size is not None and length is not None):
            # The pass has to end with Lightning's epoch, also if batches have another size.
            before = len(self) - self._length((length or 0) - position["taken"])
        resumed.batches_before, self.recounts = before, is_same and before != position["batches"]
        self.resumed = resumed if is_same else None
        return is_same

    def dealt(self, positions: Sequence[Position | None], rank: int, ranks: int) -> Position | None:
        """This rank's position in an epoch's rest, if another number of ranks has begun the epoch.

        None if these ranks shared no order, if the indices drawn again are not those drawn before, or no indices.

        Args:
            positions: The position of each rank that has begun the epoch.
            rank: This rank.
            ranks: The number of ranks now.
        """
        source, parts, taken = self.source, [], []
        is_dealt = any(isinstance(one, DistributedSampler) for one in (source, getattr(source, "sampler", None)))
        if not is_dealt or sized_len(source) is None:
            return None
        # The two that add padding, of the first items.
        is_padded = type(source) in (DistributedSampler, DistributedSamplerWrapper)
        whole = len(source.dataset) if is_padded else None
        for one, position in enumerate(positions):
            if position is None:
                return None
            begin, sampler = position["begin"], _as_rank(source, one, len(positions))
            with self._drawn_again(sampler, begin) as items:
                # No more than its length: the sampler may yield items forever.
                parts.append(list(items if "items" in begin else islice(items, len(sampler))))
            if not Pass(self, begin, parts[-1]).drop(position):
                return None
            taken.append(position["taken"])
            whole = begin.get("whole", whole)
        left = left_of_turns(parts, taken, whole)
        own = _packed(share(left, rank, ranks))
        nothing = {"taken": 0, "drawn": 0, "digest": hashlib.sha256().hexdigest(), "batches": None}
        return None if own is None else {"begin": {"items": own, "whole": len(left)}, **nothing}


def _as_rank(sampler: Any, rank: int, ranks: int) -> Any:
    """A copy of a sampler that shares an order with other ranks, as one of these ranks would have it."""
    own = copy.copy(sampler)
    inner = own if isinstance(own, DistributedSampler) else copy.copy(own.sampler)
    samples = len(inner.dataset)
    inner.rank, inner.num_replicas = rank, ranks
    inner.num_samples = samples // ranks if inner.drop_last else -(-samples // ranks)
    inner.total_size = ranks * inner.num_samples
    if inner is not own:
        own.sampler = inner
    return own


def _add(digest: Any, items: Iterable[Any]) -> None:
    """Adds items to a digest. Equal items give the same digest in batches of any size."""
    kinds = (Tensor, np.ndarray, np.generic)
    # The `repr` of tensors and arrays may leave out values.
    plain = (
        one if type(one) is int else apply_to_collection(one, kinds, lambda value: value.tolist()) for one in items
    )
    digest.update("".join(f"{item!r};" for item in plain).encode())


def _packed(items: Sequence[Any]) -> Any:
    """Indices as one tensor, batches of them as lists. None for other items, which a checkpoint may not hold."""
    try:
        return torch.tensor([index(item) for item in items], dtype=torch.int64)
    except TypeError:
        pass
    try:
        return [[index(item) for item in batch] for batch in items]
    except TypeError:
        return None


def batches_before(iterator: Any) -> int:
    """How many batches of its pass a loader's iterator leaves out, because they came before a resume."""
    own, _ = present_pass(iterator)
    return own.batches_before if isinstance(own, Pass) else 0
