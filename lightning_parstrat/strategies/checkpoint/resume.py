"""Training that resumes as if it had not stopped, by the states of loaders and random numbers in a checkpoint.

A checkpoint does not hold gradients. If it is saved within an accumulation window, it is set back to the window's
begin, and the window's batches are trained again. If the next batch has already been fetched, it may be set back to the
moment before.
"""

import copy
import pickle
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.global_batch import Division
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import any_rank, gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY, RESUME
from lightning_parstrat.strategies.checkpoint.lightnings_loops import (
    begin_epoch_without_length,
    count_batch_once,
    count_ended_epoch_once,
    count_epoch_as_begun,
    count_from_places,
    count_whole_epoch,
    draw_from_all_loaders,
    end_resumed_epoch,
    epoch_ends,
    metrics_of_schedulers,
    next_epoch,
    set_back,
    step_plateaus,
    stops_within_epoch,
    validate_or_pass_over,
)
from lightning_parstrat.strategies.data.places import (
    Moment,
    Place,
    is_stateful,
    knows_its_place,
    moments,
    places_at,
    positioned_sampler,
    set_epoch,
    states_in,
)
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.data.samplers import PositionedSampler
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import (
    batches_fetched,
    batches_that_stepped,
    before_fetches,
    count_as_ended,
    ends_epoch_first,
    epoch_is_over,
    forget_loaders,
    give_back_loop,
    iterators_in_training,
    set_batches_that_stepped,
    trainer_of,
    validation_is_due,
)
from lightning_parstrat.strategies.parts import Part

_NOTHING: Mapping[str, Any] = {"ranks": (), "within_epoch": False, "validation_is_due": None}
"""The entry of a checkpoint that another strategy has saved: Lightning decides whether a validation is due."""

_LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class _Point(NamedTuple):
    """A moment between two batches, before the second is fetched, at which a training can resume.

    Attributes:
        rng: States of this rank's random number generators.
        places: The loaders' places.
        within_epoch: Whether the epoch's iterators have been made, which draws random numbers.
        trained: Number of the epoch's batches that were trained on before.
        validation_is_due: Whether a validation comes next.
    """

    rng: dict[str, Any]
    places: list[Place | None]
    within_epoch: bool
    trained: int
    validation_is_due: bool


class Resume(Part):
    """Saves the place of a training in checkpoints, and resumes a training at a checkpoint's place.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
    """

    _of_one_training = frozenset({"_division", "_point"})

    def __init__(self, strategy: DDPStrategy, ranks: Ranks) -> None:
        super().__init__(strategy)
        self._ranks = ranks
        # The checkpoint's entry, and the states that Lightning gives to loaders with states of their own.
        self._saved, self._given = _NOTHING, list[Any]()
        self._read = _NOTHING
        # The loaders that know their places, and how many have been followed in all.
        self._loaders, self._followed = list[weakref.ref[Any]](), 0
        self._has_resumed = self._trains = self._warned = False
        self._metrics: Mapping[str, Any] = {}
        self._has_iterators = False
        # Whether a validation comes first when training begins. Afterwards Lightning knows it.
        self._is_due: bool | None = None
        self._trained_before: int | None = None
        self._hides_warning: Any = None
        # By the number of the epoch's batches that were fetched before.
        self._noted: dict[int, list[Moment]] = {}
        self._point: _Point | None = None
        self._division: Division | None = None
        self._fetch_began: float | None = None
        # How many batches have stepped, and how many had at a resume. None if that is not known.
        self._stepped: int | None = None
        self._stepped_before: int | None = None
        self._loaded_seconds = 0.0
        self.keeps_next_fetch = False
        """Whether a checkpoint that is saved after the next fetch is set back to the moment before that fetch."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leaves out iterators, which are not copied."""
        return {**super().__getstate__(), "_loaders": [], "_noted": {}}

    # The training that was saved.

    @override
    def setup_optimizers(self) -> None:
        """Notes that a new training has not been set to its checkpoint's place."""
        self._has_resumed, self._point = False, None

    def load(self, checkpoint: dict[str, Any], entries: Mapping[str, Any]) -> None:
        """Takes over the place of a checkpoint's training, before its loaders are made.

        Args:
            checkpoint: The checkpoint, as Lightning has it.
            entries: This package's entries in it.
        """
        trainer = trainer_of(self._strategy.lightning_module)
        saved = entries.get(RESUME, _NOTHING)
        is_due = saved["validation_is_due"] and trainer is not None and trainer.enable_validation
        if is_due:
            # Lightning is to count the batch before the save as completed, because its validation comes next.
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for counters in (progress["total"], progress["current"]):
                counters["completed"] = counters["processed"]
        if trainer is not None and "loops" in checkpoint:
            count_ended_epoch_once(checkpoint["loops"]["fit_loop"], trainer, saved.get("stops_within_epoch", False))
        self._saved, self._followed = {**saved, "validation_is_due": is_due}, 0
        own, ranks = self._own, len(saved["ranks"])
        if ranks and own is None:
            rank_zero_info(
                f"The checkpoint has the random number generators of {counted(ranks, 'rank')} with different data, and"
                f" this training has {counted(self._ranks.data_ranks, 'such rank')}: random numbers are not restored."
            )
        states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        of_loaders = states_in(own["loaders"]) if own is not None else []
        if of_loaders and "combined_loader" in states:
            # Lightning has saved those of rank 0.
            states["combined_loader"] = of_loaders
        # A copy: Lightning hands the original to the loaders when it restores the loops.
        self._given = copy.deepcopy(states.get("combined_loader") or [])
        # Loaders that are made before `before_loaders` are made again.
        self._read, self._saved = self._saved, _NOTHING

    @property
    def _own(self) -> Mapping[str, Any] | None:
        """The state that this rank has saved. None if another number of ranks has saved the checkpoint."""
        ranks: Sequence[Mapping[str, Any] | None] = self._saved["ranks"]
        return ranks[self._ranks.data_rank] if len(ranks) == self._ranks.data_ranks else None

    def before_loaders(self) -> None:
        """Sets the random numbers before Lightning makes the training's loaders: they draw an epoch's order from them.

        Draws in between would change it. Loaders that were made before the checkpoint was read are made again.
        """
        forget_loaders(self._trainer)
        self._restore_loaders()
        self._saved, self._followed = self._read, 0
        if self._own is not None:
            set_rng_state(self._own["rng"])

    def divide(self, division: Division) -> None:
        """Makes the next loader's sampler divide its samples among ranks."""
        self._division = division

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes a training's loader know its place, and resume at the checkpoint's.

        Collective if the checkpoint was saved within an epoch. Loaders other than torch's with a map-style dataset are
        not changed.
        """
        if self._trainer.training:
            self._follow(dataloader)
        return dataloader

    def _follow(self, dataloader: Any) -> None:
        own, within_epoch, epoch = self._own, self._saved["within_epoch"], next_epoch(self._trainer)
        number, self._followed = self._followed, self._followed + 1
        # Of as many ranks, the others' states may be missing.
        states = [state for state in (self._saved["ranks"] if own is None else [own]) if state is not None]
        places = [state["loaders"][number] for state in states if number < len(state["loaders"])]
        if epoch:
            set_epoch(dataloader, epoch)
        trainer, sampler = self._trainer, None
        if knows_its_place(dataloader):
            sampler = PositionedSampler(dataloader, self._division, lambda: trainer.training)
        fails = False
        if sampler is not None:
            self._loaders.append(weakref.ref(dataloader))
            lives_on = dataloader.persistent_workers and places and epoch and not within_epoch
            sampler.workers_live_on, sampler.undoes_seed = bool(lives_on), bool(lives_on or within_epoch)
            fails = not self._sets(sampler, places)
        state = None if within_epoch or not places or places[0] is None else places[0].get("state")
        if state is not None:
            # Of a stream that continues. Lightning loads states within an epoch alone.
            dataloader.load_state_dict(copy.deepcopy(state))
        if within_epoch and any_rank(fails, self._ranks.control):
            if sampler is not None:
                sampler.resumed, sampler.recounts = None, False
            rank_zero_warn(
                "The checkpoint was saved within an epoch, and a data loader cannot continue there on all ranks. So it"
                " begins the epoch's samples again. Possible reasons: its place is not in the checkpoint; its sampler"
                " draws other indices than before; ranks of another number cannot share its samples. Or rank_shares or"
                " keep_global_batch was set for one of both trainings alone."
            )
        elif (within_epoch or state is not None) and is_stateful(dataloader) and places and own is None:
            rank_zero_warn(
                f"The checkpoint was saved by {counted(len(self._saved['ranks']), 'rank')}, and there are"
                f" {self._ranks.world_size} now. A data loader with its own state gets that of rank 0 on all ranks, as"
                " under `ddp`. Samples may be repeated or left out."
            )

    def _sets(self, sampler: PositionedSampler, places: Sequence[Place | None]) -> bool:
        """Sets a loader to the place that each rank has saved. Returns whether that was possible."""
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return False
        positions = [place.get("position") for place in known]
        generators = [place.get("generators", []) for place in known]
        # Ranks that share an order draw the same numbers, so other ranks continue it, too.
        if generators and all(_are_equal(generators[0], others) for others in generators[1:]):
            sampler.set_generators(generators[0])
        if not (self._saved["within_epoch"] and any(positions)):
            return True
        is_divided = sampler.division is not None
        if any(position is not None and position.get("of_all_ranks", False) != is_divided for position in positions):
            return False
        if self._own is not None or is_divided:
            return sampler.resume(positions[0])
        return sampler.resume(sampler.dealt(positions, self._ranks.data_rank, self._ranks.data_ranks))

    def begin(self) -> None:
        """Resumes at the checkpoint's place: when training starts, or earlier, before a save by a callback."""
        trainer = trainer_of(self._strategy.lightning_module)
        if self._trains or trainer is None or not trainer.training or not iterators_in_training(trainer):
            return
        if not (self._has_resumed or self._saved["within_epoch"]):
            count_whole_epoch(trainer)
        ends_first, own = ends_epoch_first(trainer), self._own
        if not self._has_resumed:
            self._has_resumed = True
            self._begin_training(trainer, ends_first)
        # In each call: the uninterrupted training has not drawn what callbacks draw meanwhile.
        if own is not None and (self._saved["within_epoch"] or ends_first):
            # Loaders had drawn before the save, or will draw again for this epoch.
            set_rng_state(own["rng"])

    def _begin_training(self, trainer: Trainer, ends_first: bool) -> None:
        own, within_epoch = self._own, self._saved["within_epoch"]
        self._noted, self._warned, self._point = {}, False, None
        self._stepped = self._stepped_before = self._saved.get("stepped")
        if trainer.fit_loop.epoch_loop.restarting:
            count_batch_once(trainer)
        elif self._stepped is None:
            self._stepped = batches_that_stepped(trainer)
        self._has_iterators = not ends_first
        self._trained_before = _trained_in_all(trainer) if within_epoch else None
        if trainer.fit_loop.restarted_mid_epoch:
            _warn_of_hooks(trainer)
        found = [positioned_sampler(loader) for loader, _ in iterators_in_training(trainer)]
        samplers = [sampler for sampler in found if sampler is not None]
        if ends_first:
            # Lightning replaces the iterators before the first batch.
            for sampler in samplers:
                sampler.undo_seed()
        states = self._saved["ranks"] if own is None else [own]
        self._metrics = next((one.get("metrics", {}) for one in states if one is not None), {})
        if self._saved.get("epoch_ends", False):
            step_plateaus(trainer, self._metrics)
            self._metrics = {}
        begin_epoch_without_length(trainer)
        if any(sampler.recounts for sampler in samplers):
            count_from_places(trainer)
        elif own is not None and within_epoch:
            count_as_ended(trainer, [bool(place and place["begun_again"]) for place in own["loaders"]])
        if within_epoch and None not in places_at(self._moments(trainer), within_epoch=True):
            warnings.filterwarnings("ignore", _LIGHTNINGS_WARNING)
            self._hides_warning = warnings.filters[0]
        is_due = self._saved["validation_is_due"] if trainer.fit_loop.epoch_loop.restarting else None
        validate_or_pass_over(trainer, is_due)
        self._is_due = bool(is_due)
        before_fetches(trainer, self._before_fetch)

    @override
    def on_train_start(self) -> None:
        """Restores the checkpoint's random numbers if training resumes within an epoch."""
        self.begin()
        self._saved, self._trains = _NOTHING, True

    # The course of a training.

    def begin_epoch(self) -> None:
        """Call when an epoch begins that is not resumed."""
        trainer = self._trainer
        # Lightning has made a training's first iterators already. It makes those of a later epoch after this.
        loop = trainer.fit_loop
        self._has_iterators = trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting
        self._is_due, self._point = None, None
        self._noted, self._given = {}, []

    def _before_fetch(self, trainer: Trainer) -> None:
        self._has_iterators, self._is_due = True, None
        if not self._noted:
            count_epoch_as_begun(trainer)
        trained, fetched = _trained(trainer), batches_fetched(trainer)
        is_first = not self._noted and fetched == trained
        self._noted[fetched] = moments(trainer, self._given if is_first else None)
        for number in [number for number in self._noted if number < trained]:
            del self._noted[number]
        if self._point is None or self._point.trained == trained:
            # Random numbers are kept only where they are needed: if loaders may draw some, and for a window.
            draws = any(is_stateful(moment.loader) for moment in self._noted[fetched])
            keeps = draws or self.keeps_next_fetch or trainer.accumulate_grad_batches > 1
            self._point = self._now() if keeps else None
        self._fetch_began = time.perf_counter()

    def end_fetch(self) -> None:
        """Call when a batch of training was fetched. If it is one of evaluation, nothing happens."""
        if self._fetch_began is not None:
            self._loaded_seconds += time.perf_counter() - self._fetch_began
            self._fetch_began = None

    def loaded_seconds(self) -> float:
        """How long all fetches of batches have taken so far."""
        return self._loaded_seconds

    def begin_batch(self, trainer: Trainer) -> None:
        """Call when a batch begins, before other callbacks log or save."""
        if self._stepped_before is not None:
            # Lightning adds one at some resumes, and the batch before the save may have been counted or not.
            set_batches_that_stepped(trainer, self._stepped_before)
            self._stepped_before = None

    def end_batch(self, trainer: Trainer, window_is_open: bool) -> None:
        """Call when a batch ends, before other callbacks save."""
        self._stepped = batches_that_stepped(trainer) + (not window_is_open)
        self._has_iterators = not epoch_is_over(trainer)
        if not window_is_open:
            self._point = None

    def end_epoch(self) -> None:
        """Call when an epoch ends, before other callbacks save and before the next epoch gets its number."""
        if _trained_in_all(self._trainer) == self._trained_before:
            # The epoch was resumed at the end of one loader, and no batch was drawn from the others.
            draw_from_all_loaders(self._trainer)
        self._trained_before = None
        # If a fit stops within an epoch, Lightning ends the epoch, too. It is resumed where it stopped.
        self._has_iterators, self._is_due = stops_within_epoch(self._trainer), None
        end_resumed_epoch(self._trainer, self._metrics)
        self._metrics = {}

    @override
    def on_train_end(self) -> None:
        """Keeps the place, for checkpoints that are saved when the loaders' iterators are gone."""
        self._point, self._trains = self._point_of_save(), False

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Keeps the place, for a checkpoint that is saved all the same. Not collective."""
        # A user's loader may raise when it is asked. That must not hide this exception.
        with suppress(Exception):
            if self._trains:
                self._point = self._point_of_save()

    @override
    def teardown(self) -> None:
        """Restores the loaders, and forgets the checkpoint, because the next run is not its training."""
        self._trains = False
        # An exception may come before there is a Trainer.
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None:
            give_back_loop(trainer.fit_loop.epoch_loop)
            give_back_loop(trainer.fit_loop.epoch_loop.val_loop)
        self._saved = self._read = _NOTHING
        self._metrics, self._stepped_before = {}, None
        self._given, self._followed = [], 0
        filters: Any = warnings.filters
        if self._hides_warning in filters:
            filters.remove(self._hides_warning)
        self._restore_loaders()
        self._division = None

    def _restore_loaders(self) -> None:
        for dataloader in [reference() for reference in self._loaders]:
            sampler = positioned_sampler(dataloader)
            if sampler is not None:
                sampler.remove(dataloader)
        self._loaders.clear()

    # Saves.

    def _moments(self, trainer: Trainer) -> list[Moment]:
        """The loaders after the trained batches, whatever was fetched since."""
        trained = _trained(trainer)
        if trained in self._noted:
            return self._noted[trained]
        is_before_first = not self._noted or trained < next(iter(self._noted))
        return moments(trainer, self._given if is_before_first else None)

    def _now(self) -> _Point:
        trainer = self._trainer
        is_due = validation_is_due(trainer) if self._is_due is None else self._is_due
        places = places_at(self._moments(trainer), self._has_iterators)
        return _Point(rng_state(), places, self._has_iterators, _trained(trainer), is_due and not trainer.validating)

    def _point_of_save(self) -> _Point:
        """The point that a checkpoint saved now is set back to. It is this moment, if training can resume here."""
        return self._now() if self._point is None else self._point

    def with_place(self, checkpoint: dict[str, Any], control: Collectives | None) -> dict[str, Any]:
        """The checkpoint with the training's place in this package's entries, set back to a point to resume from.

        Collective in ``control``: some 10 KB from each rank to rank 0. Without it, the place is of this rank alone. A
        checkpoint from which no training can resume is not changed.
        """
        # Other uses need weights alone.
        can_resume = checkpoint.keys() >= {"optimizer_states", "loops"}
        # The ranks agree on it, because a user's hook may have changed the checkpoint on some ranks only.
        if not (can_resume if control is None else any_rank(can_resume, control)):
            return checkpoint
        point, trainer = self._point_of_save(), self._trainer
        if point.within_epoch:
            self._warn_of_lost(point.places)
        own = {"rng": point.rng, "loaders": point.places, "metrics": metrics_of_schedulers(trainer)}
        # Raises if a loader's state cannot be pickled and loaded, before rank 0 waits for it.
        own = pickle.loads(pickle.dumps(own)) if self._strategy.world_size > 1 else copy.deepcopy(own)
        if control is not None:
            of_ranks = gather_object(own, control.group)
        else:
            # Without empty places for others, a training of several ranks would take this rank's rest for the whole.
            absent = {**own, "loaders": [None] * len(own["loaders"])}
            of_ranks = [own, *[absent] * (self._strategy.world_size - 1)]
        # Ranks with the same data have one place.
        of_ranks = [of_ranks[rank] for rank in self._ranks.grid.first_of_data if of_ranks]
        if not can_resume:
            return checkpoint
        resumes = {
            "ranks": of_ranks,
            "within_epoch": point.within_epoch,
            "validation_is_due": point.validation_is_due,
            "epoch_ends": epoch_ends(trainer),
            "stops_within_epoch": stops_within_epoch(trainer),
            "stepped": self._stepped,
        }
        loops = set_back(checkpoint["loops"], trainer, states_in(point.places), _trained(trainer) - point.trained)
        return {**checkpoint, "loops": loops, CHECKPOINT_KEY: {**checkpoint[CHECKPOINT_KEY], RESUME: resumes}}

    def _warn_of_lost(self, places: Sequence[Place | None]) -> None:
        """Warns, once in a training, that a checkpoint within an epoch does not know the place of a loader."""
        loaders = [loader for loader, _ in iterators_in_training(self._trainer)]
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


def _warn_of_hooks(trainer: Trainer) -> None:
    """Warns of hooks that the uninterrupted training has called in the epoch, and Lightning does not call now."""
    hook = "on_train_epoch_start"
    callbacks = [one for one in trainer.callbacks if not isinstance(one, (ProgressBar, LearningRateMonitor))]
    own = __name__.partition(".")[0]
    owners = [one for one in (trainer.lightning_module, *callbacks) if not type(one).__module__.startswith(own)]
    names = [type(one).__name__ for one in owners if is_overridden(hook, one)]
    if names:
        rank_zero_warn(
            f"Training resumes within an epoch, and Lightning does not call `{hook}` of {', '.join(names)} again."
            " What it has set, such as frozen layers or an accumulation factor, is missing until it sets that again."
            " Set it in `on_train_start`, too, or save at the end of an epoch."
        )


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _trained(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.processed


def _trained_in_all(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed
