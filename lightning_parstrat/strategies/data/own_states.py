"""Loaders with a state of their own, such as torchdata's StatefulDataLoader: what they say before a batch is fetched.

Lightning asks them when it saves. By then a batch may have been fetched that was not trained on, which their state
leaves out: one that Lightning has fetched ahead, as it does where a length is not known, or the one that is trained on.
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
"""Where a loader stands, as a checkpoint keeps it.

``position`` is that of its pass after what was trained on, or None where nothing was drawn. ``generators`` are the
states of its generators and its sampler's. ``iterated`` says whether its iterator had been made. One with a state of
its own has that in ``state``, and in ``begun_again`` whether it had come to its end in the epoch.
"""


def is_stateful(owner: Any) -> bool:
    """Whether a loader or a sampler knows by itself where it stands."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


class OwnStates:
    """Notes what these loaders say before each batch is fetched, as many as a checkpoint may be set back by.

    Not collective. Costs, in every batch, that loaders are asked for their state, and that it is pickled: a copy of a
    large one by :func:`copy.deepcopy` would take ten times as long.
    """

    def __init__(self) -> None:
        self._begin: Sequence[Place | None] = []
        self._noted: dict[int, Sequence[Place | None]] = {}

    def begin(self, trainer: Trainer, values: Sequence[Any] = (), begun_again: Sequence[bool] = ()) -> None:
        """Call when an epoch begins, or goes on, before a batch is trained on.

        Args:
            trainer: The Trainer.
            values: What these loaders were given to go on from, in their order; empty where the epoch begins.
            begun_again: Of each loader that is trained on, whether it had come to its end; may be empty.
        """
        # Not what they say: what a loader was given, it may take up with its first batch only, and one that has ended
        # may stand at its end until then.
        given = iter(values)
        self._noted, self._begin = {}, _places(trainer, lambda _: next(given, None), begun_again)

    def note(self, trainer: Trainer) -> None:
        """Call before a batch is fetched."""
        fetched = batches_fetched(trainer)
        is_first = not self._noted and fetched == trainer.fit_loop.epoch_loop.batch_progress.current.processed
        self._noted.setdefault(fetched, self._begin if is_first else _said(trainer))
        # By so many batches a checkpoint may be set back: of a window, of those in the fetcher, the one that is trained
        # on, and the one that is fetched meanwhile.
        kept = trainer.accumulate_grad_batches + batches_fetched_ahead(trainer) + 2
        # In order, as they were noted.
        while len(self._noted) > kept + 1:
            del self._noted[next(iter(self._noted))]

    def now(self, trainer: Trainer) -> Sequence[Place | None]:
        """Of each loader that is trained on, where it stands after the batches that were; None of others."""
        trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if not self._noted or trained < next(iter(self._noted)):
            return self._begin
        # Nothing was fetched since the last batch, or else it was noted.
        return self._noted[trained] if trained in self._noted else _said(trainer)


def _said(trainer: Trainer) -> Sequence[Place | None]:
    return _places(trainer, lambda loader: loader.state_dict(), ended_in_epoch(trainer))


def _places(trainer: Trainer, ask: Callable[[Any], Any], ended: Sequence[bool]) -> Sequence[Place | None]:
    """Of each loader with a state of its own its place, by what it is asked; None of others."""
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
    # Whatever a user's class raises. A training that is not saved goes on.
    except Exception as error:
        return error


def as_saved(place: Place, within_epoch: bool) -> Place:
    """A place with what the loader has said, whose class the user of a checkpoint may not want to unpickle.

    Raises:
        Exception: It cannot be pickled.
    """
    if "state" not in place:
        return place
    said = place["state"] if within_epoch else None
    if isinstance(said, Exception):
        raise said
    return {**place, "state": said if said is None else pickle.loads(said)}


def states_in(places: Sequence[Place | None]) -> list[Any]:
    """The states of these loaders, as Lightning saves them; empty where an epoch begins."""
    states = [place["state"] for place in places if place is not None and "state" in place]
    return [] if None in states else states
