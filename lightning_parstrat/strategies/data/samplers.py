"""Samplers of data loaders that can begin within an epoch: they draw the same indices again, and drop them.

A checkpoint holds the random state in which an epoch began, and the number and a digest of the drawn indices. It holds
the indices only if another number of ranks has begun the epoch.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from lightning_parstrat.distributed.torch_compat import index_iterator
from lightning_parstrat.strategies.data.random_numbers import rng_preserved, rng_state, set_rng_state
from lightning_parstrat.strategies.data.stand_in import StandIn
from lightning_parstrat.strategies.lightning_compat import sampler_within

_AT_ONCE = 1024
"""The number of indices that are dropped at once. An epoch may have more than fit into memory."""


class Pass(Iterator[Any]):
    """One pass over a loader's indices, which can be resumed at the same place.

    Attributes:
        begin: The state that decides its items. None if nothing has been drawn.
        batches_before: How many of its batches were trained on before it was saved and resumed.
        counts_anew: Whether Lightning has to count from ``batches_before``, and not from its own count.

    Args:
        sampler: The sampler of the pass.
        begin: For a resumed pass, the state in which it began.
        items: For a resumed pass, its items.
    """

    def __init__(
        self, sampler: "PositionedSampler", begin: Mapping[str, Any] | None = None, items: Iterable[Any] = ()
    ) -> None:
        self.begin, self.batches_before, self.counts_anew = begin, 0, False
        self._sampler, self._size = sampler, sampler.batch_size
        self._items = self._new_items() if begin is None else iter(items)
        self._batches = sampler.batches(self._items)
        self._is_first = True
        self._taken_before = self._drawn = 0
        self._digest = hashlib.sha256()

    def _new_items(self) -> Iterator[Any]:
        # On the first item, not before: loaders with workers begin two passes, and drop the first.
        self.begin = self._sampler.begin_state()
        yield from self._sampler.source

    def drop(self, position: Mapping[str, Any]) -> bool:
        """Drops the items that were trained on. Returns whether the drawn items are those that were drawn before.

        Args:
            position: The place of the saved pass.
        """
        taken = position["taken"]
        for at_once in [_AT_ONCE] * (taken // _AT_ONCE) + [taken % _AT_ONCE]:
            _add(self._digest, list(islice(self._items, at_once)))
        compared = self._digest.copy()
        # Drawn ahead, for example by workers: compared as well, and then drawn a second time.
        ahead = list(islice(self._items, position["drawn"] - taken))
        _add(compared, ahead)
        self._taken_before = self._drawn = taken
        self._batches = self._sampler.batches(chain(ahead, self._items))
        return compared.hexdigest() == str(position["digest"])

    @override
    def __next__(self) -> Any:
        if self._is_first:
            self._is_first = False
            self._sampler.begin(self)
        batch = next(self._batches)
        items = [batch] if self._size is None else batch
        self._drawn += len(items)
        _add(self._digest, items)
        return batch

    def position(self, batches: int) -> dict[str, Any]:
        """The entry of the pass in a checkpoint.

        Args:
            batches: How many of its batches were trained on since it was resumed.
        """
        return {
            "begin": self.begin,
            "taken": min(self._taken_before + batches * (self._size or 1), self._drawn),
            "drawn": self._drawn,
            "digest": self._digest.hexdigest(),
            "batches": self.batches_before + batches,
        }


class PositionedSampler(StandIn):
    """Stands for a loader's sampler of batches, or of samples if the loader makes no batches. Not collective.

    Attributes:
        resumed: The next pass, if it is a resumed one.
        keeps_seed: Whether the next pass draws no seed, because the workers of the saved training were persistent.

    Args:
        dataloader: The loader. :meth:`remove` restores its sampler.
    """

    __slots__ = ("_generators", "_name", "_rng", "_saved", "_sets_at_begin", "keeps_seed", "resumed")

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        super().__init__(getattr(dataloader, self._name))
        self.resumed: Pass | None = None
        self.keeps_seed = self._sets_at_begin = False
        self._saved: Sequence[Tensor] = ()
        self._rng: Tensor | None = None
        inner = (self.source, getattr(self.source, "sampler", None))
        owners = [*inner, *map(sampler_within, inner)]
        values = [
            dataloader.generator,
            *(value for owner in owners for value in getattr(owner, "__dict__", {}).values()),
        ]
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
        return self.stands_for.sampler if self._is_plain else self.stands_for

    @property
    def batch_size(self) -> int | None:
        """Items of a batch of the next pass. None if the source yields batches."""
        return self.stands_for.batch_size if self._is_plain else None

    def batches(self, items: Any) -> Iterator[Any]:
        """The batches of an iterable."""
        own = self.stands_for
        return iter(BatchSampler(items, own.batch_size, own.drop_last) if self._is_plain else items)

    @override
    def __iter__(self) -> Iterator[Any]:
        # A loader calls it first, and draws the seed afterwards. With workers it calls it again after that.
        if self.keeps_seed and self._rng is None:
            self._rng = torch.get_rng_state()
        return Pass(self) if self.resumed is None else self.resumed

    def begin(self, begun: Pass) -> None:
        """Notes that a pass draws its first batch."""
        self.resumed = None
        if self._rng is not None:
            torch.set_rng_state(self._rng)
        self.keeps_seed, self._rng = False, None
        if self._sets_at_begin:
            self.set_generators()

    def load_generators(self, states: Sequence[Tensor], at_begin: bool) -> None:
        """Sets the generators to their saved states.

        Args:
            states: Their states.
            at_begin: Whether they are set when the next pass begins. By then the loader has drawn a seed for its
                workers. The saved training had drawn that seed earlier.
        """
        self._saved, self._sets_at_begin = states, at_begin
        if not at_begin:
            self.set_generators()

    def set_generators(self) -> None:
        """Sets the generators to the states that were loaded."""
        self._sets_at_begin = False
        self._set(self._saved)

    def generator_states(self) -> list[Tensor]:
        """States of the generators that belong to the loader and the sampler."""
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

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
            yield iter(_unpacked(begin["items"]))
            return
        generators = self.generator_states()
        with rng_preserved():
            if begin["rng"] is not None:
                set_rng_state(begin["rng"])
            self._set(begin["generators"])
            if isinstance(source, DistributedSampler):
                # This change stays: with another seed, the next epochs would differ from those of the saved training.
                source.seed = begin["seed"]
            yield iter(source)
        self._set(generators)

    def pass_at(self, position: Mapping[str, Any]) -> Pass | None:
        """A pass that resumes a saved one. None if the indices drawn again differ from those drawn before."""
        begin = position["begin"]
        with self._drawn_again(self.source, begin) as items:
            resumed = Pass(self, begin, items)
            is_same = resumed.drop(position)
            if "items" not in begin:
                # Not those of the save: a loader that begins again may have drawn more from them by then.
                self.load_generators(self.generator_states(), at_begin=True)
        if not is_same:
            return None
        resumed.batches_before = position["batches"]
        length = sized_len(begin.get("items", self.source))
        if length is not None and self.batch_size is not None:
            self._end_with_epoch(resumed, length - position["taken"])
        return resumed

    def _end_with_epoch(self, resumed: Pass, left: int) -> None:
        """Makes Lightning count so that the pass ends with the epoch, also if batches have another size."""
        size, drops_last = self.batch_size or 1, self._is_plain and self.stands_for.drop_last
        before = len(self) - (left // size if drops_last else -(-left // size))
        resumed.counts_anew, resumed.batches_before = before != resumed.batches_before, before

    @property
    def shares_order(self) -> bool:
        """Whether ranks take one order in turns, so that other ranks can share the rest of it."""
        source = self.source
        is_dealt = any(isinstance(one, DistributedSampler) for one in (source, getattr(source, "sampler", None)))
        return is_dealt and sized_len(source) is not None

    def dealt(self, positions: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> Pass | None:
        """This rank's part of an epoch's rest, if another number of ranks has begun the epoch. None as in `pass_at`.

        It is also None if the items are not indices.

        Args:
            positions: The position of each rank that has begun the epoch.
            rank: This rank.
            ranks: The number of ranks now.
        """
        left = self._left_by(positions)
        own = None if left is None else _packed(share(left, rank, ranks))
        if left is None or own is None:
            return None
        resumed = Pass(self, {"items": own, "whole": len(left)}, _unpacked(own))
        self._end_with_epoch(resumed, len(own))
        resumed.counts_anew = True
        return resumed

    def _left_by(self, positions: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """The items of a shared epoch that no rank has taken, in its order. Without padding, if the length is known."""
        source, begin, of = self.source, positions[0]["begin"], len(positions)
        alone: list[Any] = []
        whole = begin.get("whole")
        if "items" not in begin and type(source) in (DistributedSampler, DistributedSamplerWrapper):
            # All orders at once. Of N ranks, rank r has items r, r + N, r + 2N of the order of a single rank.
            whole = len(source.dataset)
            with self._drawn_again(_as_rank(source, 0, 1), begin) as items:
                alone = list(items)
        parts = []
        for rank, position in enumerate(positions):
            part = share(alone, rank, of)
            if not alone or not _are_as_drawn(part, position):
                sampler = _as_rank(source, rank, of)
                with self._drawn_again(sampler, position["begin"]) as items:
                    # No more than its length: the sampler may yield items forever.
                    part = list(items if "items" in begin else islice(items, len(sampler)))
            if not _are_as_drawn(part, position):
                return None
            parts.append(part)
        return left_of_turns(parts, [position["taken"] for position in positions], whole)


def _add(digest: Any, items: Sequence[Any]) -> None:
    """Adds items to a digest. Equal items give the same digest in batches of any size."""
    kinds = (Tensor, np.ndarray, np.generic)
    # The `repr` of tensors and arrays may leave out values.
    plain = (
        one if type(one) is int else apply_to_collection(one, kinds, lambda value: value.tolist()) for one in items
    )
    digest.update("".join(f"{item!r};" for item in plain).encode())


def _are_as_drawn(items: Sequence[Any], position: Mapping[str, Any]) -> bool:
    digest = hashlib.sha256()
    _add(digest, items[: position["drawn"]])
    return digest.hexdigest() == str(position["digest"])


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


def _unpacked(items: Any) -> list[Any]:
    found: list[Any] = items.tolist() if isinstance(items, Tensor) else items
    return found


def batches_before(iterator: Any) -> int:
    """How many batches of its pass a loader's iterator leaves out, because they came before a resume."""
    own = index_iterator(iterator)
    return own.batches_before if isinstance(own, Pass) else 0
