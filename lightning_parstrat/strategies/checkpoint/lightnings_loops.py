"""How Lightning's loops count, in a checkpoint and in a training that resumes from it."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.data.samplers import batches_before
from lightning_parstrat.strategies.lightning_compat import (
    count_one_step_less,
    epoch_is_over,
    iterators_in_training,
    mode_of_loaders,
    validate_first,
)


def set_back(loops: Mapping[str, Any], trainer: Trainer, states: Sequence[Any], batches: int) -> dict[str, Any]:
    """The loops' part of a checkpoint, as it would have been saved some batches before.

    Args:
        loops: The part as it is saved at this moment.
        trainer: The Trainer.
        states: States of the loaders with own states. After the last batch of an epoch there are usually none. They are
            at their end, and would give the next epoch no batches.
        batches: The number of batches to set it back by.
    """
    progress, is_over = trainer.fit_loop.epoch_loop.batch_progress, epoch_is_over(trainer)
    loops = copy.deepcopy(dict(loops))
    fit_loop = loops["fit_loop"]
    if progress.is_last_batch and not is_over:
        # If Lightning does not know the epoch's length, it would count the last batch as trained.
        fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False
    epochs = trainer.fit_loop.epoch_progress.total
    if is_over and epochs.ready > epochs.started:
        # Lightning is to begin an epoch that had no batch yet. Otherwise it would resume the epoch before.
        for counters in ("total", "current"):
            fit_loop["epoch_progress"][counters]["ready"] = fit_loop["epoch_progress"][counters]["started"]
        counts = fit_loop["epoch_loop.batch_progress"]
        counts["current"] = dict.fromkeys(counts["current"], 0)
        counts["is_last_batch"] = False
    fit_loop["state_dict"].pop("combined_loader", None)
    if states:
        fit_loop["state_dict"]["combined_loader"] = list(states)
    if batches:
        for counters in ("total", "current"):
            counted = fit_loop["epoch_loop.batch_progress"][counters]
            counted.update({name: number - batches for name, number in counted.items()})
        fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False
        if counted["completed"] < counted["processed"]:
            # Lightning counts this batch again if it resumes at the end of a batch.
            count_one_step_less(fit_loop)
    return loops


def validate_or_pass_over(trainer: Trainer, is_due: bool | None) -> None:
    """Makes a resumed training validate before it trains if a validation was due, and only then.

    If a checkpoint was saved after a batch, Lightning skips the validation after that batch. The uninterrupted training
    has run that validation, with its random draws and its effects on callbacks and learning rates.

    Args:
        trainer: The Trainer, whose loops have been restored.
        is_due: Whether a validation comes next. None if the checkpoint does not have it, and Lightning decides.
            `give_back_loop` undoes it.
    """
    if is_due:
        validate_first(trainer)
    elif is_due is not None:
        # On the instance, not on the class, so that other Trainers of this process are unchanged.
        trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end = lambda: None


def _plateaus(trainer: Trainer) -> list[Any]:
    """The schedulers that use a metric at the end of an epoch."""
    return [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == "epoch"]


def metrics_of_schedulers(trainer: Trainer) -> dict[str, Any]:
    """The metrics that schedulers will use when the epoch ends, as far as they are known."""
    plateaus = _plateaus(trainer)
    # Reading metrics reduces those of the step.
    known = trainer.callback_metrics if plateaus else {}
    return {one.monitor: known[one.monitor].cpu() for one in plateaus if one.monitor in known}


def epoch_ends(trainer: Trainer) -> bool:
    """Whether an epoch ends now, or with the validation that runs now. Schedulers that use a metric step then."""
    epochs = trainer.fit_loop.epoch_progress.current
    has_ended = epochs.completed < epochs.processed and not stops_within_epoch(trainer)
    return has_ended or (trainer.validating and epoch_is_over(trainer))


def stops_within_epoch(trainer: Trainer) -> bool:
    """Whether a fit ends before an epoch's last batch, by ``max_steps`` or ``should_stop``."""
    is_asked = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    return is_asked and not epoch_is_over(trainer)


def step_plateaus(trainer: Trainer, metrics: Mapping[str, Any]) -> None:
    """Takes the steps of schedulers that were to come after a save. Lightning does not take them after a resume."""
    for config in _plateaus(trainer):
        if config.monitor in metrics and next_epoch(trainer) % config.frequency == 0:
            config.scheduler.step(metrics[config.monitor])


def end_resumed_epoch(trainer: Trainer, metrics: Mapping[str, Any]) -> None:
    """Lets schedulers that use a metric step at the end of a resumed epoch, if their metrics are known.

    Args:
        trainer: The Trainer.
        metrics: Those of before the save. Others count if they were logged since.
    """
    loop: Any = trainer.fit_loop
    used = {one.monitor for one in _plateaus(trainer)}
    known = trainer.callback_metrics
    known.update({name: value for name, value in metrics.items() if name not in known})
    if loop.restarting and used and known.keys() >= used:
        # Not by the loop's own setter, which takes a training with `max_steps` for a resumed one.
        type(loop).__base__.restarting.fset(loop, False)


def next_epoch(trainer: Trainer) -> int:
    """The number of the epoch that is resumed, or comes next."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    # Saved after an epoch's last batch, a checkpoint does not count the epoch yet.
    return int(epochs.processed + (batches.is_last_batch and epochs.started > epochs.processed))


def count_ended_epoch_once(fit_loop: Mapping[str, Any], trainer: Trainer, stopped_within: bool) -> None:
    """Makes Lightning count an epoch once that had ended before the save. With ``max_steps``, it ends that epoch again.

    Args:
        fit_loop: The loop's state, which is about to be loaded.
        trainer: The Trainer.
        stopped_within: Whether the training that was saved had stopped within the epoch, and continues there.
    """
    epochs = fit_loop["epoch_progress"]
    ends_again = trainer.max_steps != -1 or stopped_within
    if ends_again and epochs["total"]["processed"] == epochs["total"]["ready"] > 0:
        for counters in (epochs["total"], epochs["current"]):
            counters["processed"] -= 1
            counters["completed"] = counters["processed"]


def count_batch_once(trainer: Trainer) -> None:
    """Makes Lightning count a batch once that was fetched before a save and not trained. It comes again."""
    counted = trainer.fit_loop.epoch_loop.batch_progress
    for counters in (counted.total, counted.current):
        counters.ready = counters.started = counters.processed


def begin_epoch_without_length(trainer: Trainer) -> None:
    """Makes Lightning count from 0 after a resume at the end of an epoch of unknown length.

    If it knows the length, it does so itself. Otherwise, accumulation windows would continue those of the epoch before.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if loop.restarted_on_train_batch_end and progress.is_last_batch and trainer.num_training_batches == math.inf:
        # Lightning counts the batch before the save once more, and begins with that count.
        progress.current.completed = -1


def count_whole_epoch(trainer: Trainer) -> None:
    """Makes Lightning count all batches of an epoch that was saved at its end. With other ranks, it has other batches.

    Otherwise Lightning would continue that epoch, or begin the next one with that count.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if loop.restarting and progress.is_last_batch and trainer.num_training_batches != math.inf:
        _count_further(trainer, int(trainer.num_training_batches) - progress.current.ready)


def _count_further(trainer: Trainer, batches: int) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    for counter in ("ready", "started", "processed", "completed"):
        setattr(progress, counter, getattr(progress, counter) + batches)


def count_epoch_as_begun(trainer: Trainer) -> None:
    """Makes Lightning count the epoch that it trains as begun. After a resume at an epoch's last batch, it does not."""
    for counted in (trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current):
        counted.started = max(counted.started, counted.processed + 1)
        counted.ready = max(counted.ready, counted.started)


def count_from_places(trainer: Trainer) -> None:
    """Makes Lightning count batches from the loaders' places. With other ranks, an epoch has other batches."""
    loaders = iterators_in_training(trainer)
    sized = [(length, iterator) for loader, iterator in loaders if (length := sized_len(loader)) is not None]
    if sized:
        decides = min if mode_of_loaders(trainer) == "min_size" else max
        _, iterator = decides(sized, key=lambda pair: pair[0])
        # Beside a loader without a length, an epoch may have no known end.
        batch = int(min(batches_before(iterator), trainer.num_training_batches - 1))
        _count_further(trainer, batch - trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def draw_from_all_loaders(trainer: Trainer) -> None:
    """Draws a batch from every loader and drops it, so that loaders apply the checkpoint's state now, not later."""
    random = rng_state()
    for _, iterator in iterators_in_training(trainer):
        if iterator is not None:
            next(iterator, None)
    # The drops must not change the random numbers of the training.
    set_rng_state(random)
