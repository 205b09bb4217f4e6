"""Loaders with a state of their own, such as torchdata's StatefulDataLoader: what they say before a batch is fetched.

Lightning asks them when it saves. By then a batch may have been fetched that was not trained on, which their state
leaves out: one that Lightning has fetched ahead, as it does where a length is not known, or the one that is trained on.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_parstrat.strategies.lightning_compat import (
    batches_fetched,
    batches_fetched_ahead,
    ended_in_epoch,
    iterators_in_training,
)


def is_stateful(owner: Any) -> bool:
    """Whether a loader or a sampler knows by itself where it stands."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


class OwnState(NamedTuple):
    """Where a loader stands between two batches.

    Attributes:
        value: What it said, pickled; None where an epoch begins; the error of what cannot be pickled, for who saves it.
        begun_again: Whether it has come to its end in the epoch.
    """

    value: bytes | Exception | None
    begun_again: bool

    def state(self, within_epoch: bool) -> dict[str, Any]:
        """What a checkpoint keeps of it, beside what Lightning keeps."""
        return {"position": None, "generators": [], "iterated": False, "begun_again": within_epoch and self.begun_again}


class OwnStates:
    """Notes what these loaders say before each batch is fetched, as many as a checkpoint may be set back by.

    Not collective. Costs, in every batch, that loaders are asked for their state, and that it is pickled: a copy of a
    large one by :func:`copy.deepcopy` would take ten times as long.
    """

    def __init__(self) -> None:
        self._begin: list[OwnState | None] = []
        self._noted: dict[int, Sequence[OwnState | None]] = {}

    def begin(self, trainer: Trainer, values: Sequence[Any] = (), begun_again: Sequence[bool] = ()) -> None:
        """Call when an epoch begins, or goes on, before a batch is trained on.

        Args:
            trainer: The Trainer.
            values: What these loaders were given to go on from, in their order; empty where the epoch begins.
            begun_again: Of each loader that is trained on, whether it had come to its end; may be empty.
        """
        given, ended = list(map(_pickled, values)), list(begun_again)
        self._noted, self._begin = {}, []
        for number, (loader, _) in enumerate(iterators_in_training(trainer)):
            # Not what they say: what a loader was given, it may take up with its first batch only, and one that has
            # ended may stand at its end until then.
            has_ended = number < len(ended) and ended[number]
            is_own = is_stateful(loader)
            self._begin.append(OwnState(given.pop(0) if given else None, has_ended) if is_own else None)

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

    def now(self, trainer: Trainer) -> Sequence[OwnState | None]:
        """Of each loader that is trained on, where it stands after the batches that were; None of others."""
        trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if not self._noted or trained < next(iter(self._noted)):
            return self._begin
        # Nothing was fetched since the last batch, or else it was noted.
        return self._noted[trained] if trained in self._noted else _said(trainer)


def _said(trainer: Trainer) -> Sequence[OwnState | None]:
    ended = ended_in_epoch(trainer)
    return [
        OwnState(_pickled(loader.state_dict()), number < len(ended) and ended[number]) if is_stateful(loader) else None
        for number, (loader, _) in enumerate(iterators_in_training(trainer))
    ]


def _pickled(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value)
    # Whatever a user's class raises. A training that is not saved goes on.
    except Exception as error:
        return error


def as_lightning_saves(moments: Sequence[Any]) -> list[Any]:
    """The states of these loaders, of what is known of all; empty where an epoch begins.

    Raises:
        Exception: One cannot be pickled.
    """
    values = [moment.value for moment in moments if isinstance(moment, OwnState)]
    for value in values:
        if isinstance(value, Exception):
            raise value
    # Bytes of our own loaders, or of a checkpoint that was loaded as its user wanted it.
    return [] if None in values else [pickle.loads(value) for value in values if isinstance(value, bytes)]
