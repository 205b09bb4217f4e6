"""The places of a training's loaders: noted before each fetch, saved in checkpoints, and restored by a resume.

When a checkpoint is saved, batches may have been fetched that were not trained on, and workers may have drawn further.
So the place of every loader is noted before each fetch. For a map-style loader it is a number of batches in a pass. For
a loader with an own state, such as torchdata's StatefulDataLoader, it is that state. A place is one of each rank.
"""

import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.torch_compat import batches_handed_out, index_iterator
from lightning_parstrat.strategies.data.even import loaders_iterator, users_own
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.data.samplers import Pass, PositionedSampler, batches_before
from lightning_parstrat.strategies.lightning_compat import (
    batches_fetched,
    count_as_ended,
    ended_in_epoch,
    ends_epoch_first,
    iterators_in_training,
    mode_of_loaders,
)

_LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"

Place = dict[str, Any]
"""The place of a loader, as a checkpoint keeps it.

``position`` is the position of its pass after the trained batches, or None if nothing was drawn. ``generators`` are the
states of its generators and its sampler's. ``iterated`` says whether its iterator had been made, ``begun_again``
whether it had ended in the epoch. A loader with an own state has that in ``state``, pickled.
"""


class SavedPlaces(NamedTuple):
    """The places of loaders in a checkpoint.

    Attributes:
        ranks: For each rank that has saved them, its loaders' places. If as many ranks train now, other ranks' may be
            missing.
        within_epoch: Whether it was saved within an epoch.
        states: The states that Lightning gives to loaders with own states.
    """

    ranks: Sequence[Sequence[Place | None] | None] = ()
    within_epoch: bool = False
    states: Sequence[Any] = ()


class _Moment(NamedTuple):
    """A loader before a batch is fetched.

    Attributes:
        in_pass: The pass of a loader that knows its place, if it has an iterator.
        batches: How many batches its iterator has handed out in that pass.
        has_ended: Whether it has ended in the epoch.
        state: The pickled state of a loader with an own state, or why it cannot be pickled.
    """

    in_pass: Pass | None
    batches: int
    has_ended: bool
    state: bytes | Exception | None


class LoaderPositions:
    """Knows the places of a training's loaders, and lets the loaders resume at the places of a checkpoint."""

    def __init__(self) -> None:
        self._loaders: list[weakref.ref[Any]] = []
        self._saved = SavedPlaces()
        self._followed = 0
        self.have_own_states = False
        """Whether some loader keeps its own state."""
        self._noted: dict[int, Sequence[_Moment]] = {}
        self._given: Sequence[Any] = ()
        self._shifted = self._warned = False
        self._trained_before: int | None = None
        self._hides_warning: Any = None

    def __reduce__(self) -> Any:
        """Returns an empty object for a copied or pickled trainer, because iterators are not copied."""
        return type(self), ()

    def load(self, saved: SavedPlaces) -> None:
        """Takes over a checkpoint's places, before the loaders are made."""
        self._saved, self._followed = saved, 0

    def follow(self, dataloader: Any, trainer: Trainer, any_rank: Callable[[bool], bool]) -> None:
        """Makes a loader know its place from now on, and resume at the checkpoint's place.

        Collective if the checkpoint was saved within an epoch.

        Args:
            dataloader: A loader of the training, in the order in which they are used. Loaders other than torch's with a
                map-style dataset are not changed.
            trainer: The Trainer.
            any_rank: Returns whether a condition holds on any rank.
        """
        number, self._followed = self._followed, self._followed + 1
        of_ranks, within_epoch, _ = self._saved
        as_many = len(of_ranks) == trainer.world_size
        known = [of_ranks[trainer.global_rank]] if as_many else of_ranks
        places = [of_rank[number] for of_rank in known if of_rank is not None and number < len(of_rank)]
        self.have_own_states |= is_stateful(dataloader)
        _set_epoch(dataloader, trainer)
        resumed: Pass | str | None = None
        if _knows_its_place(dataloader):
            self._loaders.append(weakref.ref(dataloader))
            sampler = PositionedSampler(dataloader)
            lived_on = places and not within_epoch and _next_epoch(trainer)
            sampler.keeps_seed = bool(dataloader.persistent_workers and lived_on)
            resumed = self._resumed(sampler, places, as_many, trainer)
        if within_epoch and any_rank(isinstance(resumed, str)):
            rank_zero_warn(
                "The checkpoint was saved within an epoch, and a data loader cannot continue there:"
                f" {resumed if isinstance(resumed, str) else _ELSEWHERE}. It begins the epoch's samples again."
            )
        elif isinstance(resumed, Pass):
            sampler.resumed = resumed
            self._shifted |= resumed.counts_anew
        elif within_epoch and is_stateful(dataloader) and places and not as_many:
            rank_zero_warn(
                f"The checkpoint was saved within an epoch of {counted(len(of_ranks), 'rank')}, and there are"
                f" {trainer.world_size} now. A data loader with its own state gets that of rank 0 on all ranks, as"
                " under `ddp`. Samples may be repeated or left out in this epoch."
            )

    def _resumed(
        self, sampler: PositionedSampler, places: list[Any], as_many: bool, trainer: Trainer
    ) -> Pass | str | None:
        """The resumed pass. A reason as text if none can be resumed. None if nothing had been drawn."""
        if None in places:
            return "the checkpoint does not have its place"
        if as_many and places:
            sampler.load_generators(places[0]["generators"], places[0]["iterated"])
        positions = [place["position"] for place in places]
        if not self._saved.within_epoch or not any(positions):
            return None
        if as_many:
            return sampler.pass_at(positions[0]) or _OTHERS
        if not all(positions) or not sampler.shares_order:
            return f"{counted(len(places), 'rank')} had their own samples, and there are {trainer.world_size} now"
        return sampler.dealt(positions, trainer.global_rank, trainer.world_size) or _OTHERS

    def begin_training(self, trainer: Trainer) -> None:
        """Makes Lightning count batches from the loaders' places. With other ranks an epoch has other batches."""
        of_ranks, within_epoch, self._given = self._saved
        own = of_ranks[trainer.global_rank] if within_epoch and len(of_ranks) == trainer.world_size else None
        has_ended = [bool(place and place["begun_again"]) for place in own or ()]
        self._trained_before = _batches_trained(trainer) if within_epoch else None
        self._noted, self._saved, self._warned = {}, SavedPlaces(), False
        if within_epoch and None not in self.places(trainer, within_epoch=True):
            warnings.filterwarnings("ignore", _LIGHTNINGS_WARNING)
            self._hides_warning = warnings.filters[0]
        if ends_epoch_first(trainer):
            # Lightning replaces the iterators before the first batch. No item of theirs was drawn.
            for sampler in [positioned_sampler(reference()) for reference in self._loaders]:
                if sampler is not None:
                    sampler.set_generators()
        _begin_epoch_without_length(trainer)
        shifted, self._shifted = self._shifted, False
        if not shifted:
            count_as_ended(trainer, has_ended)
            return
        loaders = iterators_in_training(trainer)
        sized = [(length, iterator) for loader, iterator in loaders if (length := sized_len(loader)) is not None]
        if not sized:
            return
        deciding = (min if mode_of_loaders(trainer) == "min_size" else max)(sized, key=lambda pair: pair[0])
        # Beside a loader without a length, an epoch may have no known end.
        batch = int(min(batches_before(loaders_iterator(deciding[1])), trainer.num_training_batches - 1))
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        difference = batch - progress.processed
        for counter in ("ready", "started", "processed", "completed"):
            setattr(progress, counter, getattr(progress, counter) + difference)

    def begin_epoch(self) -> None:
        """Call when an epoch begins and is not a resumed one."""
        self._noted, self._given = {}, ()

    def end_epoch(self, trainer: Trainer) -> None:
        """Call when an epoch has ended, before the next epoch gets its number."""
        if _batches_trained(trainer) == self._trained_before:
            # The epoch was resumed at the end of one loader, and no batch was drawn from the others.
            _begin_all_passes(trainer)
        self._trained_before = None

    def note(self, trainer: Trainer) -> None:
        """Call before a batch is fetched."""
        trained, fetched = _batches_of_epoch(trainer), batches_fetched(trainer)
        is_first = not self._noted and fetched == trained
        self._noted[fetched] = self._at_begin(trainer) if is_first else _moments(trainer)
        for number in [number for number in self._noted if number < trained]:
            del self._noted[number]

    def _at_begin(self, trainer: Trainer) -> list[_Moment]:
        # Not the loaders' current states: a loader may apply a given state with its first batch only. And a loader that
        # has ended may report its end until then.
        given = iter(self._given)
        # Lightning may have fetched a batch before the training, or before the epoch of a loader that it made anew.
        return [moment._replace(batches=0) for moment in _moments(trainer, lambda _: next(given, None))]

    def places(self, trainer: Trainer, within_epoch: bool) -> Sequence[Place | None]:
        """The place of each loader after the trained batches, whatever was fetched since. None if it is not known.

        Args:
            trainer: The Trainer.
            within_epoch: Whether the epoch's iterators have been made.
        """
        trained = _batches_of_epoch(trainer)
        if trained in self._noted:
            moments = self._noted[trained]
        elif not self._noted or trained < next(iter(self._noted)):
            moments = self._at_begin(trainer)
        else:
            # Nothing was fetched since the last batch.
            moments = _moments(trainer)
        loaders = [loader for loader, _ in iterators_in_training(trainer)]
        # A loader that is used twice has one sampler and one state.
        users = [id(users_own(loader)) for loader in loaders]
        return [
            None if within_epoch and users.count(user) > 1 else _place(loader, moment, within_epoch)
            for user, loader, moment in zip(users, loaders, moments, strict=True)
        ]

    def warn_of_lost(self, trainer: Trainer, places: Sequence[Place | None]) -> None:
        """Warns, once in a training, that a checkpoint within an epoch does not know the place of a loader."""
        loaders = [loader for loader, _ in iterators_in_training(trainer)]
        lost = [loader for loader, place in zip(loaders, places, strict=False) if place is None]
        if lost and not self._warned:
            self._warned = True
            name, dataset = lost[0].__class__.__name__, getattr(lost[0], "dataset", None)
            over = "" if dataset is None else f" over {type(dataset).__name__}"
            rank_zero_warn(
                f"A checkpoint is saved within an epoch without the place of a data loader ({name}{over}). A training"
                " that resumes there begins its samples again: some are repeated, some left out. Take torchdata's"
                " `StatefulDataLoader`, or a `DataLoader` with a map-style dataset. If it is used in two places, give"
                " each a separate loader."
            )

    def release(self) -> None:
        """Restores all loaders' samplers, and forgets the checkpoint, because the next run is not its training."""
        self.load(SavedPlaces())
        self.have_own_states = False
        filters: Any = warnings.filters
        if self._hides_warning in filters:
            filters.remove(self._hides_warning)
        for dataloader in [reference() for reference in self._loaders]:
            sampler = positioned_sampler(dataloader)
            if sampler is not None:
                sampler.remove(dataloader)
        self._loaders.clear()


_OTHERS = "the indices that its sampler draws again are others than those that were trained on"
_ELSEWHERE = f"on another rank, {_OTHERS}, or the checkpoint does not have its place"


def is_stateful(owner: Any) -> bool:
    """Whether a loader or a sampler keeps its own place."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _batches_of_epoch(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.processed


def _batches_trained(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def _next_epoch(trainer: Trainer) -> int:
    """The number of the epoch that is resumed, or comes next."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    # Saved after an epoch's last batch, a checkpoint does not count the epoch yet.
    return int(epochs.processed + (batches.is_last_batch and epochs.started > epochs.processed))


def _begin_all_passes(trainer: Trainer) -> None:
    """Draws a batch from every loader and drops it, so that loaders apply the checkpoint's state now, not later."""
    random = rng_state()
    for _, iterator in iterators_in_training(trainer):
        if iterator is not None:
            next(iterator, None)
    # The drops must not change the random numbers of the training.
    set_rng_state(random)


def _begin_epoch_without_length(trainer: Trainer) -> None:
    """Makes Lightning count from 0 after a resume at the end of an epoch of unknown length.

    If it knows the length, it does so itself. Otherwise, accumulation windows would continue those of the epoch before.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if loop.restarted_on_train_batch_end and progress.is_last_batch and trainer.num_training_batches == math.inf:
        # Lightning counts the batch before the save once more, and begins with that count.
        progress.current.completed = -1


def _set_epoch(dataloader: Any, trainer: Trainer) -> None:
    """Sets the epoch of a loader's sampler. Lightning does so later, when the epoch's order may have been drawn."""
    epoch = _next_epoch(trainer)
    found = (getattr(dataloader, "sampler", None), getattr(getattr(dataloader, "batch_sampler", None), "sampler", None))
    samplers = {id(one): one for one in found}
    for sampler in samplers.values() if epoch else ():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def positioned_sampler(dataloader: Any) -> PositionedSampler | None:
    """The sampler that makes a loader know its place. None for other loaders."""
    attributes = getattr(dataloader, "__dict__", {})
    samplers = (attributes.get(name) for name in ("batch_sampler", "sampler"))
    # By its type, because `isinstance` sees the object that it stands for.
    return next((one for one in samplers if type(one) is PositionedSampler), None)


def _knows_its_place(dataloader: Any) -> bool:
    """Whether a loader is torch's own, has indices, hands out batches in order, and has no own state."""
    if not isinstance(dataloader, DataLoader) or type(dataloader).__iter__ is not DataLoader.__iter__:
        return False
    sampler = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    return (
        not any(is_stateful(one) for one in (dataloader, sampler, getattr(sampler, "sampler", None)))
        and positioned_sampler(dataloader) is None
        and getattr(dataloader, "in_order", True)
        and not isinstance(dataloader.dataset, IterableDataset)
    )


def _moments(trainer: Trainer, ask: Callable[[Any], Any] = lambda loader: loader.state_dict()) -> list[_Moment]:
    """This moment of each loader. ``ask`` returns the state of a loader with an own state."""
    ended, found = ended_in_epoch(trainer), []
    for number, (loader, iterator) in enumerate(iterators_in_training(trainer)):
        batches = loaders_iterator(iterator)
        in_pass = index_iterator(batches)
        known = in_pass if isinstance(in_pass, Pass) else None
        state = _pickled(ask(loader)) if is_stateful(loader) else None
        has_ended = number < len(ended) and ended[number]
        found.append(_Moment(known, 0 if known is None else batches_handed_out(batches), has_ended, state))
    return found


def _pickled(value: Any) -> bytes | Exception:
    # For a large state, `copy.deepcopy` would take ten times as long.
    try:
        return pickle.dumps(value)
    # A user's class may raise anything. The training continues if it is not saved.
    except Exception as error:
        return error


def _place(dataloader: Any, moment: _Moment, within_epoch: bool) -> Place | None:
    sampler, in_pass = positioned_sampler(dataloader), moment.in_pass if within_epoch else None
    place: Place = {
        "position": None if in_pass is None or in_pass.begin is None else in_pass.position(moment.batches),
        "generators": [] if sampler is None else sampler.generator_states(),
        "iterated": in_pass is not None,
        "begun_again": moment.has_ended,
    }
    if is_stateful(dataloader):
        return {**place, "state": moment.state if within_epoch else pickle.dumps(None)}
    return None if sampler is None else place


def as_saved(places: Sequence[Place | None]) -> list[Place | None]:
    """Places with loaders' states themselves, not their pickles, which users of a checkpoint may not want to unpickle.

    Raises:
        Exception: A state cannot be pickled.
    """
    return [
        place and ({**place, "state": _unpickled(place["state"])} if "state" in place else place) for place in places
    ]


def _unpickled(state: bytes | Exception) -> Any:
    if isinstance(state, Exception):
        raise state
    return pickle.loads(state)


def states_in(places: Sequence[Place | None]) -> list[Any]:
    """The states of these loaders, as Lightning saves them. Empty if an epoch begins."""
    states = [place["state"] for place in places if place is not None and "state" in place]
    return [] if None in states else states
