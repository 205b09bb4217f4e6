"""Points at which a training resumes: random numbers, loaders, and accumulation windows that a save interrupts."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_parstrat.strategies.data.own_states import Place, as_saved, states_in
from lightning_parstrat.strategies.data.positions import LoaderPositions
from lightning_parstrat.strategies.data.random_numbers import rng_state
from lightning_parstrat.strategies.lightning_compat import (
    before_fetches,
    count_one_step_less,
    ends_epoch_first,
    validate_first,
    validation_is_due,
)

VALIDATION_IS_DUE = "validation_is_due"
"""The key of whether a resumed training validates before it trains, among this package's entries of a checkpoint."""


class ResumePoint(NamedTuple):
    """A moment between two batches, before the second is fetched, at which a training can resume.

    Attributes:
        rng: States of this rank's random number generators.
        positions: The loaders' places.
        has_iterators: Whether the epoch's iterators have been made, which draws random numbers.
        micro_batches: Number of batches trained since this moment.
        validation_is_due: Whether a validation comes next.
    """

    rng: dict[str, Any]
    positions: Sequence[Place | None]
    has_iterators: bool = True
    micro_batches: int = 0
    validation_is_due: bool = False


class ResumePoints:
    """Records moments at which a training can resume, for checkpoints that are saved at other moments. Not collective.

    A checkpoint does not hold gradients. If it is saved within an accumulation window, it is set back to the window's
    start. Then the window's batches are trained again. If it is saved when the next batch has already been fetched, it
    is set back to the moment before.

    Args:
        positions: Knows the loaders' places.
    """

    def __init__(self, positions: LoaderPositions) -> None:
        self.fetched_too_much = False
        """Whether a checkpoint is set back to the last point even if no batch has been trained since."""
        self.epoch_has_ended = False
        """Whether no batch has begun since an epoch ended. The end of training may have ended it."""
        self._has_iterators = False
        self._begins = False
        self._loaded_is_due: bool | None = None
        self._positions = positions
        self._point: ResumePoint | None = None
        self._fetching_point: ResumePoint | None = None

    def load(self, checkpoint: dict[str, Any], is_due: bool | None, trainer: Trainer | None) -> None:
        """Takes over whether a validation comes next. If the checkpoint does not have it, Lightning decides."""
        self._loaded_is_due = is_due and trainer is not None and trainer.enable_validation
        if self._loaded_is_due:
            _complete_last_batch(checkpoint)

    def begin_training(self, trainer: Trainer) -> None:
        """Records the start or the resume of a training, see :meth:`note`. A resumed one validates first if due."""
        self._has_iterators = not ends_epoch_first(trainer)
        self._begins, self._fetching_point = True, None
        is_due = self._loaded_is_due if trainer.fit_loop.epoch_loop.restarting else None
        _validate_or_pass_over(trainer, is_due)
        self.note(trainer, bool(is_due))
        before_fetches(trainer, self._begin_fetch)

    def _begin_fetch(self, trainer: Trainer) -> None:
        """Records the moment before a batch is fetched, if loaders have own states that cannot be read later."""
        if self._positions.before_fetch(trainer):
            self._fetching_point = ResumePoint(
                rng_state(), self._positions.now(trainer, within_epoch=True, fetching=True)
            )

    def begin_epoch(self, trainer: Trainer) -> None:
        """Records the start of an epoch."""
        loop = trainer.fit_loop
        # Lightning has made a training's first iterators already. It makes those of a later epoch after this.
        self._has_iterators = trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting
        self._begins, self._fetching_point = True, None
        self._positions.begin_epoch(trainer)
        self._point = self._now(trainer, is_due=False)

    def begin_batch(self) -> None:
        """Records that the first batch of an epoch, or of the rest of one, has been fetched."""
        self.epoch_has_ended = self._begins = False
        self._has_iterators = True

    def end_epoch(self, trainer: Trainer) -> None:
        """Records the end of an epoch, before other callbacks save."""
        self._positions.end_epoch(trainer)
        self.epoch_has_ended = True
        self._has_iterators, self._fetching_point = False, None

    def end_batch(self, trainer: Trainer, window_is_open: bool) -> None:
        """Records the end of a window, or counts a batch in it, before other callbacks save."""
        self._has_iterators, self._fetching_point = not _epoch_is_over(trainer), None
        if not window_is_open:
            self._point = None
            # Without accumulation, no save is within a window.
            if trainer.accumulate_grad_batches > 1:
                self.note(trainer)
        elif self._point is not None:
            self._point = self._point._replace(micro_batches=self._point.micro_batches + 1)

    def note(self, trainer: Trainer, is_due: bool | None = None) -> None:
        """Call while no window is open and the next batch has not been fetched.

        Args:
            trainer: The Trainer.
            is_due: Whether a validation comes next. None if Lightning knows it.
        """
        self._point = self._now(trainer, validation_is_due(trainer) if is_due is None else is_due)

    def _now(self, trainer: Trainer, is_due: bool) -> ResumePoint:
        places = self._positions.now(trainer, self._has_iterators)
        return ResumePoint(rng_state(), places, self._has_iterators, 0, is_due)

    def end_validation(self) -> None:
        """Records the end of a validation: a resumed training does not repeat its random draws."""
        if self._point is not None and not self._point.micro_batches:
            self._point = self._point._replace(rng=rng_state(), validation_is_due=False)

    def point_of_save(self, trainer: Trainer) -> ResumePoint:
        """The point that a checkpoint saved now is set back to. It is this moment, if training can resume here."""
        if self._point is not None and self._begins:
            # A resume does not repeat what hooks have drawn since.
            point = self._point._replace(rng=rng_state())
        elif self._point is not None and (self._point.micro_batches or self.fetched_too_much):
            point = self._point
        elif self._fetching_point is not None:
            point = self._fetching_point
        else:
            point = self._now(trainer, validation_is_due(trainer))
        return point._replace(validation_is_due=point.validation_is_due and not trainer.validating)


def from_which_training_goes_on(
    checkpoint: dict[str, Any], trainer: Trainer, point: ResumePoint, epoch_has_ended: bool
) -> dict[str, Any]:
    """The checkpoint as it would have been saved at ``point``.

    Args:
        checkpoint: The checkpoint as it is saved at this moment.
        trainer: The Trainer.
        point: The point to set it back to. After the last batch of an epoch, the loaders' states are left out. They are
            at their end, and would give the next epoch no batches.
        epoch_has_ended: Whether this moment is after an epoch, also after one that the end of training has cut short.
    """
    progress, is_over = trainer.fit_loop.epoch_loop.batch_progress, _epoch_is_over(trainer)
    loops = copy.deepcopy(checkpoint["loops"])
    fit_loop = loops["fit_loop"]
    if progress.is_last_batch and not is_over:
        # If Lightning does not know the epoch's length, it would count the last batch as trained.
        fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False
    epochs = trainer.fit_loop.epoch_progress.total
    if is_over and epochs.ready > epochs.started:
        _begin_next_epoch(fit_loop)
    if not (is_over or epoch_has_ended) and progress.current.ready:
        # After a resume at the last batch of an epoch, Lightning has not counted the next epoch as begun.
        for counted in (fit_loop["epoch_progress"][counters] for counters in ("total", "current")):
            begun = counted["processed"] + 1
            counted.update(ready=max(counted["ready"], begun), started=max(counted["started"], begun))
    fit_loop["state_dict"].pop("combined_loader", None)
    states = states_in([place and as_saved(place, point.has_iterators) for place in point.positions])
    if states:
        fit_loop["state_dict"]["combined_loader"] = states
    if point.micro_batches:
        for counters in ("total", "current"):
            counted = fit_loop["epoch_loop.batch_progress"][counters]
            counted.update({name: number - point.micro_batches for name, number in counted.items()})
        fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False
        if counted["completed"] < counted["processed"]:
            # Lightning counts this batch again if it resumes at the end of a batch.
            count_one_step_less(fit_loop)
    return {**checkpoint, "loops": loops}


def _begin_next_epoch(fit_loop: dict[str, Any]) -> None:
    """Makes Lightning begin an epoch that had no batch yet. Otherwise it would resume the epoch before."""
    for counters in ("total", "current"):
        fit_loop["epoch_progress"][counters]["ready"] = fit_loop["epoch_progress"][counters]["started"]
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False


def _validate_or_pass_over(trainer: Trainer, is_due: bool | None) -> None:
    """Makes a resumed training validate before it trains if a validation was due, and only then.

    If a checkpoint was saved after a batch, Lightning skips the validation after that batch. The uninterrupted training
    has run that validation, with its random draws and its effects on callbacks and learning rates.

    Args:
        trainer: The Trainer, whose loops have been restored.
        is_due: Whether a validation comes next. None if the checkpoint does not have it, and Lightning decides.
    """
    loop = trainer.fit_loop.epoch_loop
    # Left by an earlier training of this Trainer, if Lightning has not called it.
    vars(loop.val_loop).pop("increment_progress_to_evaluation_end", None)
    if is_due is None:
        return
    if is_due:
        validate_first(trainer)
        return

    def pass_over_nothing() -> None:
        vars(loop.val_loop).pop("increment_progress_to_evaluation_end", None)

    # On the instance, not on the class, and once, so that other Trainers of this process are unchanged.
    loop.val_loop.increment_progress_to_evaluation_end = pass_over_nothing


def _complete_last_batch(checkpoint: dict[str, Any]) -> None:
    """Makes Lightning count the batch before the save as completed, because its validation comes next."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        counters["completed"] = counters["processed"]


def loaders_of_rank(checkpoint: Mapping[str, Any], saved: Mapping[str, Any], rank: int, ranks: int) -> list[Any]:
    """The states of a rank's stateful loaders. They replace those of rank 0 in the checkpoint. Empty if there are none.

    Args:
        checkpoint: The checkpoint as Lightning has it, with rank 0's states.
        saved: This package's entry on loaders.
        rank: The rank.
        ranks: The number of ranks now.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    of_ranks = saved.get("ranks", [])
    own = states_in(of_ranks[rank]) if len(of_ranks) == ranks else []
    if own and "combined_loader" in state:
        state["combined_loader"] = own
    # A copy: Lightning hands the original to the loaders when it restores the loops.
    return copy.deepcopy(state.get("combined_loader") or [])


def can_be_resumed(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a training can resume from a checkpoint. Other uses need weights alone."""
    return "optimizer_states" in checkpoint and "loops" in checkpoint


def _epoch_is_over(trainer: Trainer) -> bool:
    """Whether the last batch of an epoch was trained on. It may have been fetched earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch) and progress.current.processed == progress.current.ready
