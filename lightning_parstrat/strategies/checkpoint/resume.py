"""Training that resumes as if it had not stopped, by the states of loaders and random numbers in a checkpoint.

A checkpoint does not hold gradients. If it is saved within an accumulation window, it is set back to the window's
begin, and the window's batches are trained again. If the next batch has already been fetched, it may be set back to the
moment before.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import any_rank, gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.lightnings_loops import (
    complete_last_batch,
    decide_on_validation_again,
    set_back,
    validate_or_pass_over,
)
from lightning_parstrat.strategies.checkpoint.states_in_files import RESUME
from lightning_parstrat.strategies.data.positions import LoaderPositions, Place, SavedPlaces, as_saved, states_in
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import (
    before_fetches,
    ends_epoch_first,
    epoch_is_over,
    give_back_loop,
    iterators_in_training,
    trainer_of,
    validation_is_due,
)
from lightning_parstrat.strategies.parts import Part

_NOTHING = {"ranks": (), "within_epoch": False, "validation_is_due": None}
"""The entry of a checkpoint that another strategy has saved: Lightning decides whether a validation is due."""


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

    def __init__(self, strategy: DDPStrategy, ranks: Ranks) -> None:
        super().__init__(strategy)
        self._ranks, self._positions = ranks, LoaderPositions()
        self._loaded: Mapping[str, Any] = {}
        self._loaded_is_due: bool | None = None
        # Whether a validation comes first when training begins. Afterwards Lightning knows it.
        self._is_due: bool | None = None
        self._has_resumed = self._trains = False
        self._has_iterators = self._epoch_has_ended = False
        self._point: _Point | None = None
        self.keeps_next_fetch = False
        """Whether a checkpoint that is saved after the next fetch is set back to the moment before that fetch."""

    # The training that was saved.

    @override
    def setup_optimizers(self) -> None:
        """Notes that a new training has not been set to its checkpoint's place."""
        self._has_resumed, self._point = False, None

    def load(self, checkpoint: dict[str, Any], entries: Mapping[str, Any]) -> None:
        """Takes over the place of a checkpoint's training.

        Args:
            checkpoint: The checkpoint, as Lightning has it.
            entries: This package's entries in it.
        """
        rank, ranks = self._strategy.global_rank, self._strategy.world_size
        trainer = trainer_of(self._strategy.lightning_module)
        saved: Mapping[str, Any] = entries.get(RESUME, _NOTHING)
        self._loaded_is_due = saved["validation_is_due"] and trainer is not None and trainer.enable_validation
        if self._loaded_is_due:
            complete_last_batch(checkpoint)
        of_ranks, as_many = saved["ranks"], len(saved["ranks"]) == ranks
        self._loaded = {"rng": of_ranks[rank]["rng"], "within_epoch": saved["within_epoch"]} if as_many else {}
        if of_ranks and not as_many:
            rank_zero_info(
                f"The checkpoint has the random number generators of {counted(len(of_ranks), 'rank')}, and this"
                f" training has {counted(ranks, 'rank')}: random numbers are not restored."
            )
        states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        own = states_in(of_ranks[rank]["loaders"]) if as_many else []
        if own and "combined_loader" in states:
            # Lightning has saved those of rank 0.
            states["combined_loader"] = own
        # A copy: Lightning hands the original to the loaders when it restores the loops.
        given = copy.deepcopy(states.get("combined_loader") or [])
        places = [state and state["loaders"] for state in of_ranks]
        self._positions.load(SavedPlaces(places, saved["within_epoch"], given))

    def before_loaders(self) -> None:
        """Sets the random numbers before Lightning makes the training's loaders: they draw an epoch's order from them.

        Draws in between would change it.
        """
        if self._loaded:
            set_rng_state(self._loaded["rng"])

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes the training's loaders know their places, and resume at those of a checkpoint."""
        if self._trainer.training:
            self._positions.follow(dataloader, self._trainer, lambda fails: any_rank(fails, self._ranks.control))
        return dataloader

    def begin(self) -> None:
        """Resumes at the checkpoint's place: when training starts, or earlier, before a save by a callback."""
        trainer = trainer_of(self._strategy.lightning_module)
        if self._trains or trainer is None or not trainer.training or not iterators_in_training(trainer):
            return
        # In each call: the uninterrupted training has not drawn what callbacks draw meanwhile.
        if self._loaded and (self._loaded["within_epoch"] or ends_epoch_first(trainer)):
            # Loaders had drawn before the save, or will draw again for this epoch.
            set_rng_state(self._loaded["rng"])
        if not self._has_resumed:
            self._has_resumed = True
            self._positions.begin_training(trainer)
            self._has_iterators, self._point = not ends_epoch_first(trainer), None
            is_due = self._loaded_is_due if trainer.fit_loop.epoch_loop.restarting else None
            validate_or_pass_over(trainer, is_due)
            self._is_due = bool(is_due)
            before_fetches(trainer, self._before_fetch)

    @override
    def on_train_start(self) -> None:
        """Restores the checkpoint's random numbers if training resumes within an epoch."""
        self.begin()
        self._loaded, self._trains = {}, True

    # The course of a training.

    def begin_epoch(self) -> None:
        """Call when an epoch begins that is not resumed."""
        trainer = self._trainer
        # Lightning has made a training's first iterators already. It makes those of a later epoch after this.
        loop = trainer.fit_loop
        self._has_iterators = trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting
        self._is_due, self._point = None, None
        self._positions.begin_epoch()

    def _before_fetch(self, trainer: Trainer) -> None:
        self._has_iterators, self._epoch_has_ended, self._is_due = True, False, None
        self._positions.note(trainer)
        if self._point is None or self._point.trained == _trained(trainer):
            # Random numbers are kept only where they are needed: if loaders may draw some, and for a window.
            keeps = self._positions.have_own_states or self.keeps_next_fetch or trainer.accumulate_grad_batches > 1
            self._point = self._now() if keeps else None

    def end_batch(self, trainer: Trainer, window_is_open: bool) -> None:
        """Call when a batch ends, before other callbacks save."""
        self._has_iterators = not epoch_is_over(trainer)
        if not window_is_open:
            self._point = None

    def end_epoch(self) -> None:
        """Call when an epoch ends, before other callbacks save."""
        self._positions.end_epoch(self._trainer)
        self._epoch_has_ended, self._has_iterators, self._is_due = True, False, None

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
        """Restores the loaders."""
        self._trains = False
        # An exception may come before there is a Trainer.
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None:
            give_back_loop(trainer.fit_loop.epoch_loop)
            decide_on_validation_again(trainer)
        self._loaded = {}
        self._positions.release()

    # Saves.

    def _now(self) -> _Point:
        trainer = self._trainer
        is_due = validation_is_due(trainer) if self._is_due is None else self._is_due
        places = list(self._positions.places(trainer, self._has_iterators))
        return _Point(rng_state(), places, self._has_iterators, _trained(trainer), is_due and not trainer.validating)

    def _point_of_save(self) -> _Point:
        """The point that a checkpoint saved now is set back to. It is this moment, if training can resume here."""
        return self._now() if self._point is None else self._point

    def set_back(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint set back to a point at which training can resume."""
        point, trainer = self._point_of_save(), self._trainer
        states = states_in(as_saved(point.places))
        loops = set_back(checkpoint["loops"], trainer, states, _trained(trainer) - point.trained, self._epoch_has_ended)
        return {**checkpoint, "loops": loops}

    def gather(self, control: Collectives | None, can_resume: bool) -> dict[str, Any]:
        """The entry of each rank's random numbers and loaders' places. Without ``control``, of this rank alone.

        Collective in ``control``: some 10 KB from each rank to rank 0.

        Args:
            control: The collectives of all ranks.
            can_resume: Whether training can resume from the checkpoint. Otherwise there are no places.
        """
        point = self._point_of_save()
        if can_resume and point.within_epoch:
            self._positions.warn_of_lost(self._trainer, point.places)
        own = {"rng": point.rng, "loaders": as_saved(point.places) if can_resume else []}
        of_ranks = [own] if control is None else gather_object(own, control.group)
        return {
            "ranks": of_ranks,
            "within_epoch": point.within_epoch,
            "validation_is_due": point.validation_is_due,
        }

    def gather_alone(self, can_resume: bool) -> dict[str, Any]:
        """The result of :meth:`gather` for this rank alone, with empty places for other ranks. Not collective."""
        entry = self.gather(None, can_resume)
        (own,) = entry["ranks"]
        # Without the empty places, a training of several ranks would take this rank's rest for the whole rest.
        absent = {**own, "loaders": [None] * len(own["loaders"])}
        return {**entry, "ranks": [own, *[absent] * (self._strategy.world_size - 1)]}


def _trained(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.processed
