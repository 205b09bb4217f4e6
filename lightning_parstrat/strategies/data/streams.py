"""Iterable datasets that know by themselves where they stand, in this process or in a loader's workers.

What counts is what was trained on, not what workers have read ahead: every batch brings along the state of the dataset
that it was made from. As in torchdata's StatefulDataLoader, https://github.com/meta-pytorch/data, whose loaders keep
such states themselves.
"""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterDataPipe, get_worker_info
from typing_extensions import override

from lightning_parstrat.distributed.torch_compat import batches_handed_out, index_iterator
from lightning_parstrat.strategies.data.orders import Order, is_stateful
from lightning_parstrat.strategies.data.swapped import SwappedLoader, set_class, swap_class

_END = object()


class Streamed(Order):
    """The order of an iterable dataset in this process.

    Args:
        sampler: What the loader counts batches by.
        dataset: Has ``state_dict`` and ``load_state_dict``.
        states_kept: By how many batches a checkpoint may be set back, at the moment.
        begin: The dataset's state, where a checkpoint is gone on from.
    """

    def __init__(self, sampler: Any, dataset: Any, states_kept: Callable[[], int], begin: Any = None) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._states_kept = states_kept
        self._drawn = 0
        self._goes_on = begin is not None
        # What a dataset was given, it may take up with its first sample only.
        self._states: dict[int, Any] = {} if begin is None else {0: begin}

    @override
    def __iter__(self) -> Iterator[Any]:
        for item in self._sampler:
            # Asked before a batch is read, for where the one before has ended: that may not be trained on yet.
            if self._drawn not in self._states:
                self._states[self._drawn] = copy.deepcopy(self._dataset.state_dict())
            # They may be large. In order, as they were noted.
            while len(self._states) > self._states_kept() + 1:
                del self._states[next(iter(self._states))]
            self._drawn += 1
            yield item

    @override
    def state(self, taken: int) -> dict[str, Any] | None:
        if not self._drawn and not self._states:
            return None
        if taken == 0 and not self._goes_on:
            # Where a new pass begins, its dataset may still stand at the end of the pass before.
            return {"stream": None, "taken": 0}
        # Nothing was read since the last batch, or else it was noted.
        state = self._states[taken] if taken in self._states else copy.deepcopy(self._dataset.state_dict())
        return {"stream": state, "taken": taken}


class Snapshot(NamedTuple):
    """Where the datasets of a loader's workers stand when so many batches have been handed out.

    Attributes:
        workers: The pickled state of each, after its latest batch; None where it has made none.
        next: The worker whose turn it is.
    """

    workers: tuple[bytes | None, ...]
    next: int


class StreamedInWorkers(Order):
    """The order of an iterable dataset in workers, which make batches by turns and read ahead.

    Args:
        sampler: What the loader counts batches by.
        workers: How many.
        states_kept: By how many batches a checkpoint may be set back, at the moment.
        saved: From where to go on: what :meth:`state` has returned.
    """

    def __init__(
        self, sampler: Any, workers: int, states_kept: Callable[[], int], saved: Mapping[str, Any] | None = None
    ) -> None:
        self._sampler = sampler
        self._states_kept = states_kept
        self.handed_out = 0
        self.begin = Snapshot((None,) * workers, 0)
        if saved is not None:
            states = tuple(None if state is None else pickle.dumps(state) for state in saved["workers"])
            self.begin = Snapshot(states, saved["next"])
        self._snapshots = {0: self.begin}

    @override
    def __iter__(self) -> Iterator[Any]:
        # Torch has the first worker begin: those before the one whose turn it is make an empty batch.
        return chain(repeat([None], self.begin.next), self._sampler)

    def note(self, made: "Made") -> None:
        """Notes that a batch is handed out."""
        states = list(self._snapshots[self.handed_out].workers)
        states[made.worker] = made.state
        self.handed_out += 1
        self._snapshots[self.handed_out] = Snapshot(tuple(states), (made.worker + 1) % len(states))
        while len(self._snapshots) > self._states_kept() + 1:
            del self._snapshots[next(iter(self._snapshots))]

    @override
    def number_made(self, drawn: int) -> int:
        return self.handed_out

    @override
    def state(self, taken: int) -> dict[str, Any] | None:
        snapshot = self._snapshots[taken]
        # Bytes of our own workers, or of a checkpoint that was loaded as its user wanted it.
        states = [None if state is None else pickle.loads(state) for state in snapshot.workers]
        return {"workers": states, "next": snapshot.next, "taken": taken}


def can_go_on_in_stream(dataloader: DataLoader[Any]) -> bool:
    """Whether the iterable dataset of a loader knows where it stands."""
    # A data pipe allows one iterator at a time, and is sharded by torch.
    return is_stateful(dataloader.dataset) and not (
        dataloader.num_workers and isinstance(dataloader.dataset, IterDataPipe)
    )


class Made(NamedTuple):
    """What comes from a worker. A tuple, whose batch is pinned as it would be alone.

    Attributes:
        batch: The batch.
        worker: Which worker has made it.
        state: Where its dataset stands then, pickled; empty for an empty batch, whose turn is left out.
    """

    batch: Any
    worker: int
    state: bytes


class WorkersPart:
    """Is sent to a loader's workers: has each one's dataset go on, and sends its state along with every batch.

    Args:
        dataloader: Its functions are called as without this.
        begin: From where the first pass of the workers goes on.
    """

    def __init__(self, dataloader: DataLoader[Any], begin: Snapshot) -> None:
        self._collate, self._initialize = dataloader.collate_fn, dataloader.worker_init_fn
        self._begin: Snapshot | None = begin
        self._leaves_out = False
        self._has_ended = False

    def initialize(self, worker: int) -> None:
        """The loader's ``worker_init_fn``: swaps the class of the worker's own copy of the dataset."""
        if self._initialize is not None:
            self._initialize(worker)
        dataset = get_worker_info().dataset  # type: ignore[union-attr]
        cls = type(dataset)
        set_class(
            dataset, type(cls.__name__, (cls,), {"__iter__": lambda dataset: self._samples(dataset, cls, worker)})
        )

    def _samples(self, dataset: Any, cls: Any, worker: int) -> Iterator[Any]:
        begin, self._begin = self._begin, None
        self._has_ended = False
        if begin is not None:
            saved = begin.workers[worker]
            state = None if saved is None else pickle.loads(saved)
            if state is not None:
                self._has_ended = state["ended"]
                dataset.load_state_dict(state["dataset"])
            # One that has ended would begin anew, and has no turn.
            if self._has_ended:
                return
            if worker < begin.next:
                self._leaves_out = True
                yield None
        # Not by a `for` loop: a dataset that is its own iterator would be asked for one again, and end up here.
        samples = cls.__iter__(dataset)
        while (sample := next(samples, _END)) is not _END:
            yield sample
        self._has_ended = True

    def collate(self, samples: Any) -> Made:
        """The loader's ``collate_fn``."""
        info: Any = get_worker_info()
        leaves_out, self._leaves_out = self._leaves_out, False
        if leaves_out:
            return Made(None, info.id, b"")
        batch = self._collate(samples)
        # Pickled now: the worker reads on at once.
        return Made(batch, info.id, pickle.dumps({"dataset": info.dataset.state_dict(), "ended": self._has_ended}))


class _FollowedLoader(SwappedLoader):
    """A loader whose workers say where their datasets stand."""

    __slots__ = ()


class WorkersBatches(Iterator[Any]):
    """Hands out the batches of workers as their loader would.

    Attributes:
        batches: The loader's own iterator.
    """

    def __init__(self, batches: Iterator[Made], order: StreamedInWorkers) -> None:
        self.batches = batches
        self.order = order

    @override
    def __next__(self) -> Any:
        made = next(self.batches)
        while not made.state:
            made = next(self.batches)
        self.order.note(made)
        return made.batch


def follow_workers(dataloader: DataLoader[Any], begin: Callable[[], Snapshot]) -> None:
    """Has the workers of a loader say where their datasets stand, and go on where a checkpoint was saved.

    Args:
        dataloader: Its class is swapped, see :func:`leave_workers`.
        begin: From where the next pass goes on.
    """
    iterate: Any = type(dataloader).__iter__

    def batches(self: Any) -> WorkersBatches:
        functions = {name: getattr(self, name) for name in ("collate_fn", "worker_init_fn")}
        part = WorkersPart(self, begin())
        vars(self).update(collate_fn=part.collate, worker_init_fn=part.initialize)
        try:
            own = iterate(self)
        finally:
            vars(self).update(functions)
        return WorkersBatches(own, index_iterator(own).order)

    swap_class(dataloader, _FollowedLoader, {"__iter__": batches})


def leave_workers(dataloader: Any) -> None:
    """Gives a loader its own class back."""
    if isinstance(dataloader, _FollowedLoader):
        set_class(dataloader, type(dataloader).class_before)


def drawn_from(batches: Any) -> Any:
    """What a loader's iterator draws indices from; None where it is none of torch's."""
    return index_iterator(batches.batches if isinstance(batches, WorkersBatches) else batches)


def handed_out(batches: Any) -> int:
    """How many batches a loader's iterator has handed out in its present pass."""
    return batches.order.handed_out if isinstance(batches, WorkersBatches) else batches_handed_out(batches)
