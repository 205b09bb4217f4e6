"""Samplers of data loaders that can begin in the middle of an epoch."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.strategies.data.orders import Order, is_stateful, order_of
from lightning_parstrat.strategies.data.streams import Snapshot, Streamed, StreamedInWorkers, drawn_from
from lightning_parstrat.strategies.lightning_compat import sampler_within


class Grouping(NamedTuple):
    """How batches are made of what a sampler yields.

    Attributes:
        size: Items of a batch; None where each item is one.
        drop_last: Whether a shorter batch at the end is left out.
    """

    size: int | None
    drop_last: bool

    def batches(self, items: Any) -> Iterator[Any]:
        """The batches of an iterable."""
        return iter(items if self.size is None else BatchSampler(items, self.size, self.drop_last))

    def number(self, items: int) -> int:
        """How many batches so many items make."""
        if self.size is None:
            return items
        return items // self.size if self.drop_last else -(-items // self.size)

    def items(self, batches: int) -> int:
        """How many items so many batches have, where all are full."""
        return batches * (self.size or 1)


class Pass:
    """One pass over a loader's batches of indices, which knows in which order.

    Args:
        sampler: Whose.
        order: Of the items.
        batches_before: How many batches of the pass were trained on before it was saved and gone on with; None for a
            new pass.
    """

    def __init__(self, sampler: "PositionedSampler", order: Order, batches_before: int | None = None) -> None:
        self.batches_before = batches_before or 0
        self.begun = batches_before is not None
        """Whether its order is settled: nothing more is drawn for it from generators that others draw from, too."""
        self._sampler = sampler
        self.order = order
        self._before = sampler.latest
        self._number = 0
        self._grouping = sampler.grouping
        self._batches = self._grouping.batches(order)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # Only now: loaders with workers begin two passes, and drop the first.
        if self._number == 0:
            self._sampler.begin(self)
            self.begun = True
        batch = next(self._batches)
        self._number += 1
        return batch

    def forget_pass_before(self) -> None:
        """Lets go of the pass before, of which nobody asks any more when the next has begun."""
        self._before = None

    def state(self, batches: int) -> dict[str, Any] | None:
        """What a checkpoint keeps of it.

        Args:
            batches: How many of its batches were trained on. Fewer than none: the last of the pass before were not.
        """
        if batches < 0 and self._before is not None:
            return self._before.state(self._before.order.number_made(self._before._number) + batches)
        # Where a training begins, Lightning still counts as it did in the checkpoint.
        batches = max(0, batches)
        state = self.order.state(self._grouping.items(batches))
        return None if state is None else {**state, "batches": self.batches_before + batches}


_OWN_NAMES = frozenset(
    {
        "_before_seed",
        "_generators",
        "_generators_of_save",
        "_name",
        "_own",
        "_resumed",
        "_saved_generators",
        "_set_back",
        "_stream",
        "_stream_begins",
        "_undoes_seed",
        "_workers",
        "latest",
    }
)
"""What a :class:`PositionedSampler` has beside the sampler that it stands for."""


class PositionedSampler:
    """Stands for a loader's sampler of batches, or of samples where it makes none. Not collective.

    Args:
        dataloader: The loader; it gets its own sampler back by :meth:`remove`.
        set_back: By how many batches a checkpoint may be set back, at the moment.
    """

    def __init__(self, dataloader: DataLoader[Any], set_back: Callable[[], int]) -> None:
        self._set_back = set_back
        self._name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        self._own: Any = getattr(dataloader, self._name)
        self._stream = dataloader.dataset if isinstance(dataloader.dataset, IterableDataset) else None
        self._workers = dataloader.num_workers
        self._stream_begins = Snapshot((None,) * self._workers, 0)
        self.latest: Pass | None = None
        self._generators = _generators_of(dataloader, self._own, self.source)
        self._generators_of_save: list[Tensor] = []
        self._saved_generators: list[Tensor] = []
        self._resumed: Callable[[], Pass] | None = None
        self._undoes_seed = False
        self._before_seed: Tensor | None = None
        # The loader refuses this attribute to be set; what has it as `__dict__` does not ask it.
        vars(dataloader)[self._name] = self

    @property
    def _is_plain(self) -> bool:
        return type(self._own) is BatchSampler and self._stream is None

    @property
    def source(self) -> Any:
        """Yields the items that batches are made of, or the batches."""
        return self._own.sampler if self._is_plain else self._own

    @property
    def grouping(self) -> Grouping:
        """How the next pass makes batches of them."""
        return Grouping(self._own.batch_size, self._own.drop_last) if self._is_plain else Grouping(None, False)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """What a user sets, such as another batch size, is the loader's own sampler's."""
        if name in _OWN_NAMES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._own, name, value)

    def remove(self, dataloader: DataLoader[Any]) -> None:
        """Gives a loader its own sampler back."""
        if vars(dataloader).get(self._name) is self:
            vars(dataloader)[self._name] = self._own

    def resume(self, order: Order, batches_before: int) -> None:
        """Has the next pass go on in an order that a checkpoint was saved in."""
        self._resumed = lambda: Pass(self, order, batches_before)

    def go_on_in_stream(self, position: Mapping[str, Any]) -> None:
        """Has the iterable dataset go on where a checkpoint was saved; its iterator is made afterwards."""
        if self._stream is None or not is_stateful(self._stream):
            raise MisconfigurationException(
                "The checkpoint has the state of an iterable dataset, and the data loader in its place has none that"
                " takes one. Give `fit` the loaders of the training that was saved."
            )
        workers = len(position.get("workers", ()))
        if workers != self._workers:
            raise MisconfigurationException(
                "The checkpoint was saved within an epoch, and has the state of an iterable dataset in"
                f" {counted(workers, 'worker')}; the data loader has num_workers={self._workers}, whose parts of the"
                f" data are others. Resume with num_workers={workers}, or from a checkpoint of an epoch's end."
            )
        order: Order
        if workers:
            order = StreamedInWorkers(self.source, workers, self._set_back, position)
            self._stream_begins = order.begin
        else:
            if position["stream"] is not None:
                self._stream.load_state_dict(copy.deepcopy(position["stream"]))
            order = Streamed(self.source, self._stream, self._set_back, position["stream"])
        self.resume(order, position["batches"])

    def take_stream_begin(self) -> Snapshot:
        """From where the next pass over an iterable dataset in workers goes on; those after it begin anew."""
        begin, self._stream_begins = self._stream_begins, Snapshot((None,) * self._workers, 0)
        return begin

    def begin(self, begun: Pass) -> None:
        """Notes that a pass draws its first batch."""
        if self.latest is not None:
            self.latest.forget_pass_before()
        self.latest = begun
        self._resumed = None
        if self._before_seed is not None:
            torch.set_rng_state(self._before_seed)
        self._undoes_seed, self._before_seed = False, None
        # After the loader has drawn a seed for its workers, which the training that was saved had drawn before.
        self._set_generators()

    def set_generators_of_save(self, states: list[Tensor], iterated: bool) -> None:
        """Sets the generators of loader and sampler as they were when saved.

        Args:
            states: Of the generators.
            iterated: Whether the loader's iterator had been made: then they are set when the next has been made, too.
        """
        self._saved_generators = self._generators_of_save = states
        if not iterated:
            self._set_generators()

    def undo_pass(self) -> None:
        """Sets the generators again as they were when saved: the pass that was begun is left for another one."""
        self._saved_generators = self._generators_of_save
        self._set_generators()

    def forget_save(self) -> None:
        """Lets go of what was saved, when training has begun."""
        self._generators_of_save = []

    def undo_workers_seed(self) -> None:
        """Has the next pass draw nothing for workers: those of the training that was saved had lived on."""
        self._undoes_seed = True

    def _set_generators(self) -> None:
        states, self._saved_generators = self._saved_generators, []
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def generator_states(self) -> list[Tensor]:
        """States of the generators that loader and sampler have of their own."""
        return [generator.get_state() for generator in self._generators]

    def __iter__(self) -> Iterator[Any]:
        # A loader asks for a pass first, and draws the seed then; with workers it asks once more.
        if self._undoes_seed and self._before_seed is None:
            self._before_seed = torch.get_rng_state()
        return Pass(self, self._new_order()) if self._resumed is None else self._resumed()

    def _new_order(self) -> Order:
        if self._stream is None:
            return order_of(self.source)
        if self._workers:
            return StreamedInWorkers(self.source, self._workers, self._set_back)
        return Streamed(self.source, self._stream, self._set_back)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        # While it is being copied or unpickled it has none: asking itself for it would never end.
        if name == "_own":
            raise AttributeError(name)
        return getattr(self._own, name)

    @override
    def __reduce__(self) -> Any:
        """Copies and pickles are of the loader's own sampler."""
        return _itself, (self._own,)

    @property
    def __class__(self) -> Any:
        """To programs that ask what a loader's sampler is an instance of, it is what it stands for."""
        return type(self._own)


def _itself(sampler: Any) -> Any:
    return sampler


def _generators_of(dataloader: DataLoader[Any], *samplers: Any) -> list[torch.Generator]:
    inner = [getattr(sampler, "sampler", None) for sampler in samplers]
    owners = [*samplers, *inner, *(sampler_within(sampler) for sampler in (*samplers, *inner))]
    values = [dataloader.generator, *(value for owner in owners for value in getattr(owner, "__dict__", {}).values())]
    # By identity: loader and sampler usually share one.
    return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())


def batches_before(iterator: Any) -> int:
    """How many batches of its pass a loader's iterator leaves out, as they came before a resume."""
    own = drawn_from(iterator)
    return own.batches_before if isinstance(own, Pass) else 0
