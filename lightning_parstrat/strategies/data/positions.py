"""The places of a training's loaders: recorded between batches, saved in checkpoints, and restored by a resume."""

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.torch_compat import batches_handed_out, index_iterator
from lightning_parstrat.strategies.data.even import loaders_iterator, users_own
from lightning_parstrat.strategies.data.own_states import OwnStates, Place, as_saved, is_stateful
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.data.samplers import Pass, PositionedSampler, batches_before
from lightning_parstrat.strategies.lightning_compat import (
    batches_fetched,
    batches_fetched_ahead,
    count_as_ended,
    ends_epoch_first,
    iterators_in_training,
    mode_of_loaders,
)

LOADERS = "loaders"
"""The key of the loaders' places, among this package's entries of a checkpoint."""

_LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class LoaderPositions:
    """Knows the places of a training's loaders, and lets the loaders resume at the places of a checkpoint."""

    def __init__(self) -> None:
        self._loaders: list[weakref.ref[Any]] = []
        self._saved: Mapping[str, Any] | None = None
        self._followed = 0
        self._own = OwnStates()
        self._given: Sequence[Any] = ()
        self._has_own = self._shifted = self._warned = False
        self._trained_before: int | None = None
        self._at_end: Sequence[Sequence[Place | None]] = ()
        self._hides_warning: Any = None

    def __reduce__(self) -> Any:
        """Returns an empty object for a copied or pickled trainer, because iterators are not copied."""
        return type(self), ()

    def load(self, saved: Mapping[str, Any] | None, given: Sequence[Any] = ()) -> None:
        """Takes over a checkpoint's entry :data:`LOADERS`, before the loaders are made.

        Args:
            saved: The entry, or None if the checkpoint has none.
            given: The states that Lightning gives to loaders with own states.
        """
        self._saved, self._followed, self._given = saved, 0, given

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
        of_ranks = [] if self._saved is None else self._saved["ranks"]
        as_many = len(of_ranks) == trainer.world_size
        # From a sharded checkpoint, a rank has read its own places alone.
        known = [of_ranks[trainer.global_rank]] if as_many else of_ranks
        places = [of_rank[number] for of_rank in known if number < len(of_rank)]
        self._has_own |= is_stateful(dataloader)
        _set_epoch(dataloader, trainer)
        resumed: Pass | str | None = None
        if _knows_its_place(dataloader):
            self._loaders.append(weakref.ref(dataloader))
            sampler = PositionedSampler(dataloader)
            lived_on = places and not self._within_epoch and _next_epoch(trainer)
            sampler.keeps_seed = bool(dataloader.persistent_workers and lived_on)
            resumed = self._resumed(sampler, places, as_many, trainer)
        if self._within_epoch and any_rank(isinstance(resumed, str)):
            rank_zero_warn(
                "The checkpoint was saved within an epoch, and a data loader cannot go on there:"
                f" {resumed if isinstance(resumed, str) else _ELSEWHERE}. It begins the epoch's samples anew."
            )
        elif isinstance(resumed, Pass):
            sampler.resumed = resumed
            self._shifted |= resumed.counts_anew
        elif self._within_epoch and is_stateful(dataloader) and places and not as_many:
            rank_zero_warn(
                f"The checkpoint was saved within an epoch of {counted(len(of_ranks), 'rank')}, and there are"
                f" {trainer.world_size} now. A data loader with a state of its own gets that of rank 0 on all ranks, as"
                " under `ddp`: samples may come twice or never in this epoch."
            )

    @property
    def _within_epoch(self) -> bool:
        return self._saved is not None and bool(self._saved["within_epoch"])

    def _resumed(
        self, sampler: PositionedSampler, places: list[Any], as_many: bool, trainer: Trainer
    ) -> Pass | str | None:
        """The resumed pass. A reason as text if none can be resumed. None if nothing had been drawn."""
        if None in places:
            return "the checkpoint does not say where it stood"
        if as_many and places:
            sampler.saved, sampler.set_at_begin = places[0]["generators"], places[0]["iterated"]
            if not sampler.set_at_begin:
                sampler.set_generators()
        positions = [place["position"] for place in places]
        if not self._within_epoch or not any(positions):
            return None
        if as_many:
            return sampler.gone_on(positions[0]) or _OTHERS
        if not all(positions) or not sampler.shares_order:
            return f"{counted(len(places), 'rank')} had samples of their own, and there are {trainer.world_size} now"
        return sampler.dealt(positions, trainer.global_rank, trainer.world_size) or _OTHERS

    def begin_training(self, trainer: Trainer) -> None:
        """Makes Lightning count batches from the loaders' places. With other ranks an epoch has other batches."""
        # The places at the end of an earlier training, whose iterators are gone.
        self._at_end = ()
        self._trained_before = _batches_trained(trainer) if self._within_epoch else None
        begun_again = self._begun_again(trainer)
        self._own.begin(trainer, self._given, begun_again)
        if self._within_epoch and None not in self.now(trainer, within_epoch=True):
            warnings.filterwarnings("ignore", _LIGHTNINGS_WARNING)
            self._hides_warning = warnings.filters[0]
        self._saved, self._given, self._warned = None, (), False
        if ends_epoch_first(trainer):
            # Lightning replaces the iterators before the first batch. No item of theirs was drawn.
            for sampler in [positioned_sampler(reference()) for reference in self._loaders]:
                if sampler is not None:
                    sampler.set_generators()
        _begin_epoch_without_length(trainer)
        shifted, self._shifted = self._shifted, False
        if not shifted:
            count_as_ended(trainer, begun_again)
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

    def _begun_again(self, trainer: Trainer) -> list[bool]:
        """For each loader, whether it had ended in the epoch. Such a loader has handed out fewer batches since."""
        if self._saved is None or not self._within_epoch or len(self._saved["ranks"]) != trainer.world_size:
            return []
        trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        places = [place or {"position": None} for place in self._saved["ranks"][trainer.global_rank]]
        fewer = [bool(place["position"]) and place["position"]["batches"] < trained for place in places]
        return [begun or place.get("begun_again", False) for begun, place in zip(fewer, places, strict=True)]

    def begin_epoch(self, trainer: Trainer) -> None:
        """Call when an epoch begins and is not a resumed one."""
        self._own.begin(trainer)

    def end_epoch(self, trainer: Trainer) -> None:
        """Call when an epoch has ended, before the next epoch gets its number."""
        if _batches_trained(trainer) == self._trained_before:
            # The epoch was resumed at the end of one loader, and no batch was drawn from the others.
            _begin_all_passes(trainer)
        self._trained_before = None

    def before_fetch(self, trainer: Trainer) -> bool:
        """Call before a batch is fetched. Returns whether loaders have own states, which are then recorded."""
        if self._has_own:
            self._own.note(trainer)
        return self._has_own

    def now(self, trainer: Trainer, within_epoch: bool, fetching: bool = False) -> Sequence[Place | None]:
        """The place of each loader after the trained batches, whatever was fetched since.

        Args:
            trainer: The Trainer.
            within_epoch: Whether the epoch's iterators have been made.
            fetching: Whether this is the moment before a batch is fetched.

        Returns:
            A place for each loader of the training. None for a loader whose place cannot be known.
        """
        if self._at_end:
            return self._at_end[within_epoch]
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        # While a batch is fetched, the fetcher's queue lacks one that no step has got yet.
        fetched = batches_fetched(trainer) if fetching else batches_fetched_ahead(trainer) + progress.ready
        ahead = fetched - progress.processed
        at_most = progress.processed if mode_of_loaders(trainer) == "max_size" else None
        loaders = iterators_in_training(trainer)
        own = (self._own.now(trainer) if self._has_own else ()) or [None] * len(loaders)
        # A loader that is used twice has one sampler and one state.
        users = [id(users_own(loader)) for loader, _ in loaders]
        return [
            None if within_epoch and users.count(user) > 1 else known or _place(*loader, ahead, at_most, within_epoch)
            for user, loader, known in zip(users, loaders, own, strict=True)
        ]

    def state(self, places: Sequence[Place | None], within_epoch: bool) -> list[Place | None]:
        """This rank's part of a checkpoint's entry :data:`LOADERS`."""
        return [None if place is None else as_saved(place, within_epoch) for place in places]

    def warn_of_lost(self, trainer: Trainer, places: Sequence[Place | None]) -> None:
        """Warns, once in a training, that a checkpoint within an epoch does not know the place of a loader."""
        loaders = [loader for loader, _ in iterators_in_training(trainer)]
        lost = [loader for loader, place in zip(loaders, places, strict=False) if place is None]
        if lost and not self._warned:
            self._warned = True
            name, dataset = lost[0].__class__.__name__, getattr(lost[0], "dataset", None)
            over = "" if dataset is None else f" over {type(dataset).__name__}"
            rank_zero_warn(
                f"A checkpoint is saved within an epoch, and a data loader ({name}{over}) cannot be told where it"
                " stands: a training that resumes there begins its samples anew, so that some come twice and some"
                " never. Take torchdata's `StatefulDataLoader`, or a `DataLoader` with a map-style dataset. If it"
                " stands in two places, give each a loader of its own."
            )

    def end_training(self, trainer: Trainer) -> None:
        """Keeps the places of the loaders, for checkpoints that are saved when their iterators are gone."""
        self._at_end = [self.now(trainer, within_epoch) for within_epoch in (False, True)]

    def release(self) -> None:
        """Restores all loaders' samplers, and forgets the checkpoint, because the next run is not its training."""
        self.load(None)
        self._has_own = False
        filters: Any = warnings.filters
        if self._hides_warning in filters:
            filters.remove(self._hides_warning)
        for dataloader in [reference() for reference in self._loaders]:
            sampler = positioned_sampler(dataloader)
            if sampler is not None:
                sampler.remove(dataloader)
        self._loaders.clear()


_OTHERS = "the indices that its sampler draws again are others than those that were trained on"
_ELSEWHERE = f"on another rank, {_OTHERS}, or the checkpoint does not say where it stood"


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


def _place(dataloader: Any, iterator: Any, ahead: int, at_most: int | None, within_epoch: bool) -> Place | None:
    sampler = positioned_sampler(dataloader)
    if sampler is None:
        return None
    own = loaders_iterator(iterator)
    in_pass = index_iterator(own)
    made = within_epoch and isinstance(in_pass, Pass)
    place: Place = {"position": None, "generators": sampler.generator_states(), "iterated": made}
    if made and in_pass.begun:
        number = batches_handed_out(own)
        # A loader that has ended before the others has handed out nothing since.
        batches = number - ahead if at_most is None else min(number, at_most - in_pass.batches_before)
        place["position"], place["generators"] = in_pass.state(batches)
    return place
