"""A training that is told to go saves at the end of a batch; a Slurm job goes back into the queue and resumes there.

Lightning saves within the signal handler, wherever each rank happens to be: in the middle of a step, of a collective,
or of another save. Here the handler only notes the signal. Between batches the ranks agree, by 4 bytes that travel
while the next batch is trained, whether any of them was told, and all save after the same batch. That batch ends an
accumulation window, so that no gradient is lost.
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
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_parstrat.distributed.comm.agreement import RunningAgreement
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.resume import ResumePoints
from lightning_parstrat.strategies.lightning_compat import (
    bring_back_after_training,
    broadcast_sigterm_again,
    forget_sigterm,
    leave_out_sigterm_broadcast,
    path_for_slurm_job,
    save_last,
    users_handler,
    window_is_open,
)

_TERMINATE, _REQUEUE = 1, 2
_SECONDS_UNTIL_SLURM_ENDS_THE_RUN = 120.0


def signal_to_requeue_at(trainer: Trainer) -> signal.Signals | None:
    """The signal at which this job is to go back into the queue; None outside of Slurm, and where the user has said no.

    Under torchrun, too, whose environment Lightning prefers over Slurm's and then forgets to requeue.
    """
    environment = trainer.strategy.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        return environment.requeue_signal if environment.auto_requeue else None
    return signal.SIGUSR1 if "SLURM_JOB_ID" in os.environ and SLURMEnvironment.detect() else None


def job_number() -> str:
    """This job's number as ``scontrol`` takes it; that of a job in an array has two parts."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    number = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", number):
        raise AssertionError(f"Slurm gave the job a number that is none: {number!r}")
    return number


def own_job() -> dict[str, Any]:
    """What a checkpoint is to hold of the job that saves it; nothing outside of Slurm."""
    try:
        return {"slurm_job": job_number()} if "SLURM_JOB_ID" in os.environ else {}
    except (KeyError, AssertionError):
        # Variables that somebody has set by hand.
        return {}


def check_job(own: Mapping[str, Any], path: str | Path) -> None:
    """Refuses what another job saved for itself when it was preempted.

    Lightning takes the newest such file in ``default_root_dir``, whoever's it is.

    Args:
        own: What this package keeps in the checkpoint.
        path: Of the checkpoint.

    Raises:
        MisconfigurationException: It is another job's.
    """
    job = own.get("slurm_job")
    mine = own_job().get("slurm_job")
    if None in (job, mine) or job == mine:
        return
    if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(path).name):
        raise MisconfigurationException(
            f"{path} was saved by job {job} when it was preempted, and this is job {mine}. Give each job a"
            " `default_root_dir` of its own. To go on from there on purpose, copy the file under another name and pass"
            " `ckpt_path`."
        )


class SavesWhenPreempted(Callback):
    """Notes signals, and saves between batches. The strategies put it before the user's callbacks.

    Collective in every ``on_train_batch_start``: a non-blocking all-reduce of 4 bytes on the host.

    Args:
        control: Carries what the ranks tell each other.
        resume_points: Notes from where training goes on; comes before this among the callbacks.
        requeue_signal: The signal that means that a Slurm job is to be saved and requeued; None where there is no such
            job. SIGTERM means that training is to be saved and ended: Slurm requeues by itself where it wants to.
        wait_for_saves: Returns when what was saved is on the disk.
    """

    def __init__(
        self,
        control: Collectives,
        resume_points: ResumePoints,
        requeue_signal: signal.Signals | None,
        wait_for_saves: Callable[[], None],
    ) -> None:
        self._agreement = RunningAgreement(control)
        self._resume_points = resume_points
        self._requeue_signal = requeue_signal
        self._wait_for_saves = wait_for_saves
        self._own_signal = 0
        self._signal_of_any_rank = 0
        self._window_is_open = False
        self._loop: Any = None
        self._replaced: dict[signal.Signals, Any] = {}

    def listen(self, signum: signal.Signals) -> None:
        """Notes the signal from now on, in the place of whoever did so far."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._replaced.setdefault(signum, signal.getsignal(signum))
        signal.signal(signum, self._note)

    def stop_listening(self, trainer: Trainer) -> None:
        """Gives the signals back to who had them."""
        for signum, handler in self._replaced.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            # Lightning would bring back what it found, which was ours.
            bring_back_after_training(trainer, signum, handler, instead_of=self._note)
        self._replaced.clear()
        if self._loop is not None:
            broadcast_sigterm_again(self._loop)
            self._loop = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._own_signal = max(self._own_signal, _REQUEUE if signum == self._requeue_signal else _TERMINATE)
        users = self._handler_of_user(signum)
        if users is not None:
            users(signum, frame)

    def _handler_of_user(self, signum: int) -> Callable[[int, FrameType | None], Any] | None:
        """What a program had set for SIGTERM before Lightning, which goes on calling it."""
        replaced = self._replaced.get(signal.Signals(signum))
        return users_handler(replaced) if signum == signal.SIGTERM else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes SIGTERM over from Lightning, whose loop broadcasts rank 0's in every batch and misses the others'."""
        if trainer.received_sigterm:
            self._own_signal = _TERMINATE
            forget_sigterm(trainer)
        self.listen(signal.SIGTERM)
        self._loop = trainer.fit_loop.epoch_loop
        leave_out_sigterm_broadcast(self._loop)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learns whether any rank was told, unless gradients wait for a step: a checkpoint does not hold them."""
        self._window_is_open = window_is_open(trainer)
        if self._window_is_open:
            return
        self._signal_of_any_rank = self._agreement.answer()
        if self._signal_of_any_rank:
            # Where training goes on from: when it is saved, another batch will have been fetched.
            self._resume_points.note(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Saves where any rank was told to, before anything of this batch has happened.

        By now everything that belongs to the last batch has: hooks, validation, the end of the epoch.
        """
        if self._window_is_open:
            return
        told, self._signal_of_any_rank = self._signal_of_any_rank, 0
        if told:
            self._own_signal = 0
            self._save(trainer)
            if told == _TERMINATE or self._requeue(trainer):
                self._end()
        self._agreement.ask(self._own_signal)

    def _save(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()
        self._resume_points.fetched_too_much = True
        try:
            saved = _save_last(trainer) if self._requeue_signal is None else _save_for_job(trainer)
            self._wait_for_saves()
            for path in saved:
                rank_zero_info(f"Told to go: saved {path} after step {trainer.global_step}.")
        finally:
            self._resume_points.fetched_too_much = False

    def _requeue(self, trainer: Trainer) -> bool:
        """Puts the job back into the queue; whether Slurm has agreed."""
        refusal = _refusal_to_requeue() if trainer.is_global_zero else None
        refusal = trainer.strategy.broadcast(refusal)
        if refusal is not None:
            rank_zero_warn(f"Slurm does not requeue the job ({refusal}): training goes on until it is ended.")
        return refusal is None

    def _end(self) -> None:
        """Ends training on all ranks. In a Slurm job lets Slurm do that: only what it has ended does it requeue.

        What the program would do after training is not for a training half done.
        """
        rank_zero_info("Training ends here, and goes on from there when it runs again.")
        if self._requeue_signal is not None:
            for signum in self._replaced:
                signal.signal(signum, signal.SIG_DFL)
            time.sleep(_SECONDS_UNTIL_SLURM_ENDS_THE_RUN)
        raise SIGTERMException(128 + signal.SIGTERM)


def _save_for_job(trainer: Trainer) -> list[str]:
    """Saves what a Slurm job that runs again finds. Collective; returns the path."""
    path = trainer.strategy.broadcast(path_for_slurm_job(trainer))
    trainer.save_checkpoint(path)
    return [path]


def _save_last(trainer: Trainer) -> list[str]:
    """Saves what users' callbacks call the last, which ``ckpt_path="last"`` finds. Collective; returns the paths."""
    saving = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.save_last is True]
    for callback in saving:
        save_last(callback, trainer)
    if not saving:
        rank_zero_warn(
            f"Told to end by SIGTERM after step {trainer.global_step}, and nothing was saved:"
            " `ModelCheckpoint(save_last=True)` would have been."
        )
    return [callback.last_model_path for callback in saving]


def _refusal_to_requeue() -> str | None:
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job_number()], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
