"""A preempted training saves at the end of a batch. A Slurm job is requeued, and resumes there.

Lightning saves within the signal handler. A rank may then be in the middle of a step, of a collective, or of another
save. Here the handler only records the signal. Each step's control message shows all ranks whether any of them got one,
and all save after the same batch. That batch ends an accumulation window, so that no gradient is lost.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_parstrat.distributed.comm.agreement import any_rank_for_each
from lightning_parstrat.strategies.checkpoint.resume import Resume
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import (
    give_back_signals,
    leave_signals_alone,
    path_for_slurm_job,
    save_last,
    window_is_open,
)
from lightning_parstrat.strategies.parts import Part

# Bits, because ranks may have got different signals. If both have come, the job is requeued.
_TERMINATE, _REQUEUE = 1, 2
_SECONDS_UNTIL_SLURM_ENDS_THE_RUN = 120.0


def signal_to_requeue_at(trainer: Trainer) -> signal.Signals | None:
    """The signal at which this job is to be requeued. None outside of Slurm, and if the user has turned it off.

    It is also set under torchrun. There, Lightning uses torchrun's environment, and does not requeue.
    """
    environment = trainer.strategy.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        return environment.requeue_signal if environment.auto_requeue else None
    return signal.SIGUSR1 if "SLURM_JOB_ID" in os.environ and SLURMEnvironment.detect() else None


def job_number() -> str | None:
    """This job's number as ``scontrol`` takes it. In a job array it has two parts. None outside of Slurm."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID") if "SLURM_ARRAY_JOB_ID" in os.environ else ("SLURM_JOB_ID",)
    number = "_".join(os.environ.get(name, "") for name in names)
    return number if re.fullmatch(r"\d+(_\d+)?", number) else None


def check_job(own: Mapping[str, Any], path: str | Path) -> None:
    """Refuses a checkpoint that another job saved when it was preempted.

    Lightning resumes from the newest such file in ``default_root_dir``, also if another job saved it.

    Args:
        own: This package's entries of the checkpoint.
        path: Path of the checkpoint.

    Raises:
        MisconfigurationException: Another job saved it.
    """
    job, mine = own.get("slurm_job"), job_number()
    if None not in (job, mine) and job != mine and re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(path).name):
        raise MisconfigurationException(
            f"{path} was saved by job {job} when it was preempted, and this is job {mine}. Give each job a"
            " separate `default_root_dir`. To resume from it on purpose, copy the file under another name and pass"
            " it as `ckpt_path`."
        )


class Preemption(Part):
    """Records signals, makes a fit save when any rank got one, and then ends it or requeues the job.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks. Their messages carry the signals.
        resume: The place of the training.
        wait_for_saves: Returns when all saves are on the disk.
        end_step: Called at the end of a step, with the signals of the ranks that train together. Returns those to
            answer now.
        synchronize: Called before other callbacks and the module see the end of the training, or a validation.
    """

    _of_one_training = frozenset({"_callback", "_replaced"})

    def __init__(
        self,
        strategy: DDPStrategy,
        ranks: Ranks,
        resume: Resume,
        wait_for_saves: Callable[[], None],
        end_step: Callable[[int], int],
        synchronize: Callable[[], None],
    ) -> None:
        super().__init__(strategy)
        self._ranks, self._resume, self._wait_for_saves = ranks, resume, wait_for_saves
        self._end_step, self._synchronize = end_step, synchronize
        self._callback: SavesWhenPreempted | None = None
        self._replaced: dict[int, Any] = {}
        # Then a Slurm job is saved and requeued. SIGTERM means to save and end, because Slurm itself may requeue it.
        self._requeue_signal: signal.Signals | None = None
        # How many messages were read, and the signals of the latest.
        self._answered = self._asked_to = 0

    @override
    def begin_fit(self) -> None:
        """Records signals from now on, instead of the program's handlers and Lightning."""
        self._requeue_signal = signal_to_requeue_at(self._trainer)
        # All of these come before those of the user's callbacks, which may save.
        self._callback = SavesWhenPreempted(
            on_exception=lambda *given: self._ranks.give_up(given[-1]),
            on_train_epoch_start=lambda *_: self._resume.begin_epoch(),
            on_train_epoch_end=lambda *_: self._resume.end_epoch(),
            on_train_batch_start=self.begin_batch,
            on_train_batch_end=self.end_batch,
            on_validation_start=lambda *_: self._synchronize(),
            on_train_end=lambda *_: self._synchronize(),
        )
        self._replaced = {}
        # Now, because it is collective on first use.
        self._answered, self._asked_to = self._ranks.messages.launched, 0
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            signums = {signal.SIGTERM, self._requeue_signal or signal.SIGTERM}
            self._replaced = {signum: signal.signal(signum, self._note) for signum in signums}
        leave_signals_alone(self._trainer)

    @override
    def on_train_start(self) -> None:
        """Checks for signals between batches from now on."""
        # Not earlier: programs count, copy and compare their callbacks until a training starts.
        self._remove_callback()
        self._trainer.callbacks.insert(0, self._callback)

    @override
    def on_train_end(self) -> None:
        """Ends the checks between batches, and answers signals that came since the last one. Collective."""
        self._remove_callback()
        bits = (_TERMINATE, _REQUEUE)
        own = self._asked_to | self._ranks.messages.signal
        found = any_rank_for_each([bool(own & bit) for bit in bits], self._ranks.control)
        self._asked_to = sum(bit for bit, is_set in zip(bits, found, strict=True) if is_set)
        self.begin_batch(self._trainer)

    @override
    def teardown(self) -> None:
        """Restores the signal handlers."""
        if self._callback is not None:
            self._remove_callback()
            for signum, handler in self._replaced.items():
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            give_back_signals(self._trainer)
            self._callback = None
            is_noted = self._ranks.messages.signal & _TERMINATE and not self._trainer.interrupted
            if is_noted and not callable(self._replaced.get(signal.SIGTERM)):
                # No batch has answered it: for example, a resumed training was complete.
                signal.raise_signal(signal.SIGTERM)

    def _remove_callback(self) -> None:
        # In place: tuners replace the list for a while, and look into their own list afterwards.
        callbacks = self._trainer.callbacks
        callbacks[:] = [one for one in callbacks if one is not self._callback]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._ranks.messages.signal |= _REQUEUE if signum == self._requeue_signal else _TERMINATE
        programs = self._replaced.get(signum)
        if signum == signal.SIGTERM and callable(programs):
            # As Lightning's handler does.
            programs(signum, frame)

    def end_batch(self, trainer: Trainer, *_: Any) -> None:
        """Checks whether any rank got a signal. Collective at the end of a window.

        If the window has sent no control message, this sends one.
        """
        messages = self._ranks.messages
        accumulates = window_is_open(trainer)
        self._resume.end_batch(trainer, accumulates)
        # Not in an open accumulation window: a checkpoint has no gradients.
        if accumulates:
            return
        if messages.launched == self._answered:
            # No backward has sent gradients, and with them a message.
            messages.launch()
        self._answered = messages.launched
        self._asked_to = self._end_step(messages.latest().signal)
        # The loaders will have fetched the next batch when the checkpoint is saved.
        self._resume.keeps_next_fetch = bool(self._asked_to)

    def begin_batch(self, trainer: Trainer, *_: Any) -> None:
        """Saves if any rank got a signal before, and before any work on this batch.

        All work on the last batch is done: hooks, validation, the end of the epoch. Collective then.
        """
        self._resume.begin_batch(trainer)
        asked_to, self._asked_to = self._asked_to, 0
        if not asked_to:
            return
        # Cleared: if Slurm does not requeue, training continues, and the same signal must not save again.
        self._ranks.messages.signal = 0
        saved = self._save(trainer)
        is_requeued = bool(asked_to & _REQUEUE) and self._requeue(trainer)
        if is_requeued or asked_to & _TERMINATE:
            self._end(saved)

    def _save(self, trainer: Trainer) -> list[str]:
        for logger in trainer.loggers:
            # Slurm ends this process without a teardown, and a logger's buffer would be lost.
            logger.save()
        if self._requeue_signal is None:
            saved = _save_last(trainer)
        else:
            # Where Lightning looks when the job runs again. The name has a number that grows with the files in the
            # folder. Ranks may see these at different times.
            saved = [trainer.strategy.broadcast(path_for_slurm_job(trainer))]
            trainer.save_checkpoint(saved[0])
        self._resume.keeps_next_fetch = False
        self._wait_for_saves()
        for path in saved:
            rank_zero_info(f"Preempted: saved {path} after step {trainer.global_step}.")
        return saved

    def _requeue(self, trainer: Trainer) -> bool:
        """Requeues the job. Returns whether Slurm has agreed. Collective."""
        # Rank 0 asks Slurm, and all ranks use its answer. Otherwise some could end while others train.
        refusal = _refusal_to_requeue() if trainer.is_global_zero else None
        refusal = trainer.strategy.broadcast(refusal)
        if refusal is not None:
            rank_zero_warn(f"Slurm does not requeue the job ({refusal}): training continues until Slurm ends it.")
        return refusal is None

    def _end(self, saved: list[str]) -> None:
        """Ends training on all ranks. A Slurm job waits for Slurm to end it, because Slurm then requeues it.

        It raises an exception, so that the program does not continue as after a complete training.
        """
        if self._requeue_signal is not None:
            rank_zero_info(
                "Training ends here. The job's next run resumes from it, if `fit` gets no `ckpt_path`. Ranks wait up to"
                f" {_SECONDS_UNTIL_SLURM_ENDS_THE_RUN:g} s for Slurm to end them."
            )
        elif saved:
            rank_zero_info(f"Training ends here. To resume, pass `ckpt_path={saved[-1]!r}` to `fit`.")
        if self._requeue_signal is not None:
            # With default handlers, Slurm's SIGTERM ends the process while it sleeps.
            for signum in self._replaced:
                signal.signal(signum, signal.SIG_DFL)
            time.sleep(_SECONDS_UNTIL_SLURM_ENDS_THE_RUN)
        raise SIGTERMException(128 + signal.SIGTERM)


class SavesWhenPreempted(LambdaCallback):
    """Calls parts of the strategy between batches, before the user's callbacks."""

    def __deepcopy__(self, _: Any) -> "SavesWhenPreempted":
        """Returns itself: users copy a trainer's callbacks, and this one refers to process groups."""
        return self


def _save_last(trainer: Trainer) -> list[str]:
    """Saves by users' callbacks that save the last, for ``ckpt_path="last"``. Collective. Returns the paths."""
    saving = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.save_last is True]
    for callback in saving:
        save_last(callback, trainer)
    if not saving:
        rank_zero_warn(
            f"Ended by SIGTERM after step {trainer.global_step}, and nothing was saved. To save in this case, add"
            " `ModelCheckpoint(save_last=True)` to the callbacks."
        )
    return [callback.last_model_path for callback in saving]


def _refusal_to_requeue() -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", "requeue", str(job_number())], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
