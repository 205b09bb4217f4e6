"""Training that resumes as if it had not stopped, by the states of loaders and random numbers in a checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_parstrat.distributed.comm.agreement import any_rank, gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.resume_points import (
    VALIDATION_IS_DUE,
    ResumePoints,
    can_be_resumed,
    from_which_training_goes_on,
    loaders_of_rank,
)
from lightning_parstrat.strategies.data.positions import LOADERS, LoaderPositions
from lightning_parstrat.strategies.data.random_numbers import RNG, RandomNumbers
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import fetches_alone, iterators_in_training, trainer_of
from lightning_parstrat.strategies.parts import Part


class Resume(Part):
    """Saves the place of a training in checkpoints, and resumes a training at a checkpoint's place.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        positions: The loaders' places.
        points: Moments at which training can resume.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, positions: LoaderPositions, points: ResumePoints) -> None:
        super().__init__(strategy)
        self._ranks, self._positions, self._points = ranks, positions, points
        self._random = RandomNumbers()
        self._goes_on = False
        self._trains = False

    @override
    def setup_optimizers(self) -> None:
        """Notes that a new training has not been set to its checkpoint's place."""
        self._goes_on = False

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes the training's loaders know their places, and resume at those of a checkpoint."""
        if self._trainer.training:
            control = self._ranks.control if self._ranks.have_joined else None
            self._positions.follow(
                dataloader, self._trainer, lambda fails: any_rank(fails, control) if control else fails
            )
        return dataloader

    @override
    def on_train_start(self) -> None:
        """Restores the checkpoint's random numbers if training resumes within an epoch."""
        self.go_on()
        self._random, self._trains = RandomNumbers(), True

    def go_on(self) -> None:
        """Resumes at the checkpoint's place: when training starts, or earlier, before a save by a callback."""
        trainer = trainer_of(self._strategy.lightning_module)
        if self._trains or trainer is None or not trainer.training or not iterators_in_training(trainer):
            return
        # In each call: the uninterrupted training has not drawn what callbacks draw meanwhile.
        self._random.before_training(trainer)
        if not self._goes_on:
            self._positions.begin_training(trainer)
            self._points.begin_training(trainer)
            self._goes_on = True

    @override
    def on_validation_end(self) -> None:
        """Notes the random numbers after a validation."""
        self._points.end_validation()

    @override
    def on_train_end(self) -> None:
        """Keeps the places of the loaders."""
        self._positions.end_training(self._trainer)
        self._trains = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Keeps the places of the loaders, for a checkpoint that is saved all the same. Not collective."""
        # A user's loader may raise when it is asked. That must not hide this exception.
        with suppress(Exception):
            if self._trains:
                self._positions.end_training(self._trainer)

    @override
    def teardown(self) -> None:
        """Restores the loaders."""
        self._trains = False
        # An exception may come before there is a Trainer.
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None:
            fetches_alone(trainer)
        self._random = RandomNumbers()
        self._positions.release()

    def load(self, checkpoint: dict[str, Any], entries: Mapping[str, Any]) -> None:
        """Takes over the place of a checkpoint's training.

        Args:
            checkpoint: The checkpoint, as Lightning has it.
            entries: This package's entries in it.
        """
        rank, number = self._strategy.global_rank, self._strategy.world_size
        self._points.load(checkpoint, entries.get(VALIDATION_IS_DUE), trainer_of(self._strategy.lightning_module))
        self._random.load(entries.get(RNG), rank, number)
        given = loaders_of_rank(checkpoint, entries.get(LOADERS, {}), rank, number)
        self._positions.load(entries.get(LOADERS), given)

    def before_loaders(self) -> None:
        """Call before Lightning makes the training's loaders, because draws in between would change their shuffling."""
        self._random.before_loaders()

    def set_back(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The checkpoint set back to a point at which training can resume, and an entry about that point."""
        if not can_be_resumed(checkpoint):
            return checkpoint, {}
        point = self._points.point_of_save(self._trainer)
        back = from_which_training_goes_on(checkpoint, self._trainer, point, self._points.epoch_has_ended)
        return back, {VALIDATION_IS_DUE: point.validation_is_due}

    def gather(self, control: Collectives | None, goes_on: bool) -> dict[str, Any]:
        """Each rank's random numbers and loaders' places. Without ``control``, those of this rank.

        Collective in ``control``: some 10 KB from each rank to rank 0.

        Args:
            control: The collectives of all ranks.
            goes_on: Whether training can resume from the checkpoint. Otherwise loaders are not asked for their states,
                because that draws from some samplers.
        """
        trainer = self._trainer
        point = self._points.point_of_save(trainer)
        within_epoch = point.has_iterators
        if goes_on and within_epoch:
            self._positions.warn_of_lost(trainer, point.positions)
        own = (point.rng, self._positions.state(point.positions if goes_on else (), within_epoch))
        of_ranks = [own] if control is None else gather_object(own, control.group)
        rngs, loaders = zip(*of_ranks, strict=True) if of_ranks else ((), ())
        return {
            RNG: {"states": list(rngs), "within_epoch": within_epoch},
            LOADERS: {"ranks": list(loaders), "within_epoch": within_epoch},
        }

    def gather_alone(self, goes_on: bool) -> dict[str, Any]:
        """The result of :meth:`gather` for this rank alone, with empty places for other ranks. Not collective."""
        states = self.gather(None, goes_on)
        loaders = states[LOADERS]
        # Without the empty places, a training of several ranks would take this rank's rest for the whole rest.
        absent = [[None] * len(of_rank) for of_rank in loaders["ranks"]] * (self._strategy.world_size - 1)
        return {**states, LOADERS: {**loaders, "ranks": [*loaders["ranks"], *absent]}}
