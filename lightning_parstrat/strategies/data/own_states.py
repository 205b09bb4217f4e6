"""Loaders with own states, such as torchdata's StatefulDataLoader: their states before each batch is fetched.

Lightning asks loaders for their states when it saves. By then, a batch may have been fetched that was not trained on.
A resume from these states would skip it. If a loader's length is not known, Lightning fetches batches ahead. And the
batch in training may be such a batch.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_parstrat.strategies.lightning_compat import (
    batches_fetched,
    batches_fetched_ahead,
    ended_in_epoch,
    iterators_in_training,
)

Place = dict[str, Any]
"""The place of a loader, as a checkpoint keeps it.

``position`` is the position of its pass after the trained batches, or None if nothing was drawn. ``generators`` are the
states of its generators and its sampler's. ``iterated`` says whether its iterator had been made. A loader with an own
state has that in ``state``. In ``begun_again`` it has whether it had ended in the epoch.
"""


def is_stateful(owner: Any) -> bool:
    """Whether a loader or a sampler keeps its own place."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


class OwnStates:
    """Records the states of these loaders before each batch is fetched.

    It keeps as many as a checkpoint may be set back by. Not collective. In every batch, it asks loaders for their
    states and pickles them. For a large state, :func:`copy.deepcopy` would take ten times as long.
    """

    def __init__(self) -> None:
        self._begin: Sequence[Place | None] = []
        self._noted: dict[int, Sequence[Place | None]] = {}

    def begin(self, trainer: Trainer, values: Sequence[Any] = (), begun_again: Sequence[bool] = ()) -> None:
        """Call when an epoch begins or is resumed, before a batch is trained on.

        Args:
            trainer: The Trainer.
            values: The states that these loaders were given to resume from, in their order. Empty if the epoch begins.
            begun_again: For each loader of the training, whether it had ended. May be empty.
        """
        # Not the loaders' current states: a loader may apply a given state with its first batch only. And a loader that
        # has ended may report its end until then.
        given = iter(values)
        self._noted, self._begin = {}, _places(trainer, lambda _: next(given, None), begun_again)

    def note(self, trainer: Trainer) -> None:
        """Call before a batch is fetched."""
        fetched = batches_fetched(trainer)
        is_first = not self._noted and fetched == trainer.fit_loop.epoch_loop.batch_progress.current.processed
        self._noted.setdefault(fetched, self._begin if is_first else _said(trainer))
        # A checkpoint may be set back by so many batches: a window, and those in the fetcher. One more is in training,
        # and one more is fetched meanwhile.
        kept = trainer.accumulate_grad_batches + batches_fetched_ahead(trainer) + 2
        # In the order of their recording.
        while len(self._noted) > kept + 1:
            del self._noted[next(iter(self._noted))]

    def now(self, trainer: Trainer) -> Sequence[Place | None]:
        """The place of each loader of the training after the trained batches. None for loaders without an own state."""
        trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if not self._noted or trained < next(iter(self._noted)):
            return self._begin
        # If it is missing, nothing was fetched since the last batch, and the loaders' states are current.
        return self._noted[trained] if trained in self._noted else _said(trainer)


def _said(trainer: Trainer) -> Sequence[Place | None]:
    return _places(trainer, lambda loader: loader.state_dict(), ended_in_epoch(trainer))


def _places(trainer: Trainer, ask: Callable[[Any], Any], ended: Sequence[bool]) -> Sequence[Place | None]:
    """The place of each loader with an own state, with the result of ``ask``. None for other loaders."""
    return [
        {
            "position": None,
            "generators": [],
            "iterated": False,
            "state": _pickled(ask(loader)),
            "begun_again": number < len(ended) and ended[number],
        }
        if is_stateful(loader)
        else None
        for number, (loader, _) in enumerate(iterators_in_training(trainer))
    ]


def _pickled(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value)
    # A user's class may raise anything. The training continues if it is not saved.
    except Exception as error:
        return error


def as_saved(place: Place, within_epoch: bool) -> Place:
    """A place with the loader's state itself, not its pickle, which users of a checkpoint may not want to unpickle.

    Raises:
        Exception: The state cannot be pickled.
    """
    if "state" not in place:
        return place
    said = place["state"] if within_epoch else None
    if isinstance(said, Exception):
        raise said
    return {**place, "state": said if said is None else pickle.loads(said)}


def states_in(places: Sequence[Place | None]) -> list[Any]:
    """The states of these loaders, as Lightning saves them. Empty if an epoch begins."""
    states = [place["state"] for place in places if place is not None and "state" in place]
    return [] if None in states else states
