"""Where a training resumes: random numbers, loaders, and accumulation windows that a checkpoint cuts through."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parstrat.core.wording import counted
from lightning_parstrat.strategies.data.own_states import Place, as_saved, states_in
from lightning_parstrat.strategies.data.positions import LoaderPositions
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.lightning_compat import (
    before_fetches,
    count_one_step_less,
    ends_epoch_first,
    validate_first,
    validation_is_due,
)

RNG = "rng"
"""The key of the states of random number generators, among this package's entries of a checkpoint."""

VALIDATION_IS_DUE = "validation_is_due"
"""The key of whether a training that resumes validates before it trains, among these entries."""


class ResumePoint(NamedTuple):
    """A moment between two batches, before the second is fetched, at which a training can resume.

    Attributes:
        rng: States of this rank's random number generators.
        positions: Where the loaders stand.
        has_iterators: Whether the epoch's iterators have been made, which draws random numbers.
        micro_batches: Number of batches trained since.
        validation_is_due: Whether a validation comes next.
    """

    rng: dict[str, Any]
    positions: Sequence[Place | None]
    has_iterators: bool = True
    micro_batches: int = 0
    validation_is_due: bool = False


class ResumePoints:
    """Notes moments at which a training can resume, for checkpoints that are saved at other moments. Not collective.

    A checkpoint does not hold gradients. One that is saved in the middle of an accumulation window is set back to the
    window's start, so that its batches are trained again. And one that is saved when the next batch has already been
    fetched is set back to the moment before.

    Args:
        positions: Says where loaders stand.
    """

    def __init__(self, positions: LoaderPositions) -> None:
        self.fetched_too_much = False
        """Whether a checkpoint is to be set back to the last point even if nothing has been trained since."""
        self.epoch_has_ended = False
        """Whether no batch has begun since an epoch ended, be it because training did."""
        self._has_iterators = False
        self._begins = False
        self._loaded_is_due: bool | None = None
        self._positions = positions
        self._point: ResumePoint | None = None
        self._fetching_point: ResumePoint | None = None

    def load(self, checkpoint: dict[str, Any], is_due: bool | None, trainer: Trainer | None) -> None:
        """Takes over whether a validation comes next; of a checkpoint that does not say so, Lightning decides."""
        self._loaded_is_due = is_due and trainer is not None and trainer.enable_validation
        if self._loaded_is_due:
            _complete_last_batch(checkpoint)

    def begin_training(self, trainer: Trainer) -> None:
        """Notes the start of a training, or where it goes on; see :meth:`note`. There it validates first if it must."""
        self._has_iterators = not ends_epoch_first(trainer)
        self._begins, self._fetching_point = True, None
        is_due = self._loaded_is_due if trainer.fit_loop.epoch_loop.restarting else None
        _validate_or_pass_over(trainer, is_due)
        self.note(trainer, bool(is_due))
        before_fetches(trainer, self._begin_fetch)

    def _begin_fetch(self, trainer: Trainer) -> None:
        """Notes the moment before a batch is fetched, where there are loaders that cannot be asked for it later."""
        if self._positions.before_fetch(trainer):
            self._fetching_point = ResumePoint(
                rng_state(), self._positions.now(trainer, within_epoch=True, fetching=True)
            )

    def begin_epoch(self, trainer: Trainer) -> None:
        """Notes the start of an epoch."""
        loop = trainer.fit_loop
        # Lightning makes the first iterators of a training before, and those of a later epoch from here on.
        self._has_iterators = trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting
        self._begins, self._fetching_point = True, None
        self._positions.begin_epoch(trainer)
        self._point = self._now(trainer, is_due=False)

    def begin_batch(self) -> None:
        """Notes that the first batch of an epoch, or of what is left of it, has been fetched."""
        self.epoch_has_ended = self._begins = False
        self._has_iterators = True

    def end_epoch(self, trainer: Trainer) -> None:
        """Notes the end of an epoch, before other callbacks save."""
        self._positions.end_epoch(trainer)
        self.epoch_has_ended = True
        self._has_iterators, self._fetching_point = False, None

    def end_batch(self, trainer: Trainer, window_is_open: bool) -> None:
        """Notes the end of a window, or counts a batch in it, before other callbacks save."""
        self._has_iterators, self._fetching_point = not _epoch_is_over(trainer), None
        if not window_is_open:
            self._point = None
            # Without accumulation no save falls into a window.
            if trainer.accumulate_grad_batches > 1:
                self.note(trainer)
        elif self._point is not None:
            self._point = self._point._replace(micro_batches=self._point.micro_batches + 1)

    def note(self, trainer: Trainer, is_due: bool | None = None) -> None:
        """Call where no window is open and the next batch has not been fetched.

        Args:
            trainer: The Trainer.
            is_due: Whether a validation comes next, where Lightning does not know it.
        """
        self._point = self._now(trainer, validation_is_due(trainer) if is_due is None else is_due)

    def _now(self, trainer: Trainer, is_due: bool) -> ResumePoint:
        places = self._positions.now(trainer, self._has_iterators)
        return ResumePoint(rng_state(), places, self._has_iterators, 0, is_due)

    def end_validation(self) -> None:
        """Notes that a validation has ended: a training that resumes does not draw again what it has drawn."""
        if self._point is not None and not self._point.micro_batches:
            self._point = self._point._replace(rng=rng_state(), validation_is_due=False)

    def point_of_save(self, trainer: Trainer) -> ResumePoint:
        """The point that a checkpoint saved now is to be set back to: this moment, where that is right."""
        if self._point is not None and self._begins:
            # What hooks have drawn since is not drawn again.
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
    """A checkpoint as it would have been saved at ``point``.

    Args:
        checkpoint: As saved at this moment.
        trainer: The Trainer.
        point: What to set it back to. After the last batch of an epoch, the loaders' states are left out: at their end,
            they would give the next epoch no batches.
        epoch_has_ended: Whether this moment is after an epoch, also one that the end of training has cut short.
    """
    progress, is_over = trainer.fit_loop.epoch_loop.batch_progress, _epoch_is_over(trainer)
    loops = copy.deepcopy(checkpoint["loops"])
    fit_loop = loops["fit_loop"]
    if progress.is_last_batch and not is_over:
        # Of an epoch whose length it does not know, Lightning would take the last batch for trained.
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
            # Lightning counts this batch again when it resumes at the end of a batch.
            count_one_step_less(fit_loop)
    return {**checkpoint, "loops": loops}


def _begin_next_epoch(fit_loop: dict[str, Any]) -> None:
    """Has Lightning begin an epoch again that had no batch yet, and not take the one before for it."""
    for counters in ("total", "current"):
        fit_loop["epoch_progress"][counters]["ready"] = fit_loop["epoch_progress"][counters]["started"]
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False


def _validate_or_pass_over(trainer: Trainer, is_due: bool | None) -> None:
    """Has a training that resumes validate before it trains where that was to come next, and only there.

    Lightning passes over a validation that was due after the batch that was saved after. What it would have drawn,
    and done to callbacks and learning rates, the training that was not interrupted goes on from.

    Args:
        trainer: The Trainer, whose loops have been restored.
        is_due: Whether it comes next; None for a checkpoint that does not say so, which is left to Lightning.
    """
    loop = trainer.fit_loop.epoch_loop
    # Of an earlier training by this Trainer, which may not have come to ask.
    vars(loop.val_loop).pop("increment_progress_to_evaluation_end", None)
    if is_due is None:
        return
    if is_due:
        validate_first(trainer)
        return

    def pass_over_nothing() -> None:
        vars(loop.val_loop).pop("increment_progress_to_evaluation_end", None)

    # On the instance, not on the class, and once: other Trainers of this process keep theirs.
    loop.val_loop.increment_progress_to_evaluation_end = pass_over_nothing


def _complete_last_batch(checkpoint: dict[str, Any]) -> None:
    """Has Lightning take the batch that was saved after for completed: what comes next is its validation."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["total"], progress["current"]):
        counters["completed"] = counters["processed"]


def loaders_of_rank(checkpoint: Mapping[str, Any], saved: Mapping[str, Any], rank: int, ranks: int) -> list[Any]:
    """States of a rank's stateful loaders, which its part of a checkpoint gets; empty where there are none.

    Args:
        checkpoint: As Lightning has it, with rank 0's.
        saved: What this package's entries have of loaders.
        rank: Which one.
        ranks: How many there are now.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    of_ranks = saved.get("ranks", [])
    own = states_in(of_ranks[rank]) if len(of_ranks) == ranks else []
    if own and "combined_loader" in state:
        state["combined_loader"] = own
    # A copy: Lightning hands the original to the loaders when it restores the loops.
    return copy.deepcopy(state.get("combined_loader") or [])


def can_be_resumed(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a training can go on from a checkpoint, of which weights alone would do for other purposes."""
    return "optimizer_states" in checkpoint and "loops" in checkpoint


def _epoch_is_over(trainer: Trainer) -> bool:
    """Whether the last batch of an epoch was trained on, which may have been fetched before."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch) and progress.current.processed == progress.current.ready


class RandomNumbers:
    """Restores the random number generators of all ranks.

    Lightning does not: after a resume, dropout and shuffling would draw again what they drew when training began.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def load(self, saved: Mapping[str, Any] | None, rank: int, world_size: int) -> None:
        """Takes over this rank's state; see :meth:`before_loaders` and :meth:`before_training`."""
        self._loaded = None
        if saved is None:
            return
        if len(saved["states"]) != world_size:
            rank_zero_info(
                f"The checkpoint has the random number generators of {counted(len(saved['states']), 'rank')}, and this"
                f" training has {counted(world_size, 'rank')}: random numbers are not restored."
            )
            return
        self._loaded = {"state": saved["states"][rank], "within_epoch": saved["within_epoch"]}

    def before_loaders(self) -> None:
        """Sets the generators: a new epoch draws its shuffling from them."""
        if self._loaded is not None:
            set_rng_state(self._loaded["state"])

    def before_training(self, trainer: Trainer) -> None:
        """Sets the generators again, where loaders had drawn before the save or will draw once more for this epoch."""
        loaded = self._loaded
        if loaded is not None and (loaded["within_epoch"] or ends_epoch_first(trainer)):
            set_rng_state(loaded["state"])
