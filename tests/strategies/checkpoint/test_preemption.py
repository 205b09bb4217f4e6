"""A job that is told to go: who notes it, when all ranks save, and what is left as it was."""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parstrat.strategies.checkpoint import preemption
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY
from lightning_parstrat.strategies.checkpoint.preemption import check_job, job_number
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import make
from tests.strategies.parity import make_trainer, zero1
from tests.strategies.test_report import listening

IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}


class ToldToGo(Callback):
    """One rank gets a signal in the middle of a batch; notes after which batches there was a checkpoint."""

    def __init__(self, folder: str, signals: Sequence[signal.Signals], rank: int, batch: int) -> None:
        self.folder, self.signals, self.rank, self.batch = Path(folder), signals, rank, batch
        self.saved_by: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        self.saved_by += [batch_idx] * len(list(self.folder.glob("hpc_ckpt_*.ckpt")))
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            for signum in self.signals:
                os.kill(os.getpid(), signum)


def train_in_job(folder: str, strategy: str, signals: Sequence[signal.Signals], accumulate: int, requeues: bool) -> Any:
    """The batches before which a checkpoint was there, how training ended, and whether all is as it was."""
    preemption._SECONDS_UNTIL_SLURM_ENDS_THE_RUN = 0.0
    # Never the real one: there may be a job of that number.
    scontrol = Path(folder) / f"bin-{dist.get_rank()}" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/bash\necho "$@" >> {folder}/asked\n' if requeues else "#!/bin/bash\nexit 1\n")
    scontrol.chmod(stat.S_IRWXU)
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    told = ToldToGo(folder, signals, rank=1, batch=3)
    before = [signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)]
    trainer = make_trainer(
        make(strategy), callbacks=[told], default_root_dir=folder, accumulate_grad_batches=accumulate
    )
    callbacks = list(trainer.callbacks)
    ended: int | None = None
    with patch.dict(os.environ, IN_JOB, PATH=path):
        try:
            trainer.fit(zoo.MLP(), zoo.loader(80, 4, rank=dist.get_rank(), world_size=2))
        except SystemExit as exit:
            ended = exit.code  # type: ignore[assignment]
    after = [signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)]
    return told.saved_by, ended, before == after and callbacks == trainer.callbacks, trainer.global_step


ENDED, WINDOW, WENT_ON = ([], 143, True, 4), ([], 143, True, 2), (list(range(4, 10)), None, True, 10)
USER, TERM = (signal.SIGUSR1,), (signal.SIGTERM,)
JOBS: list[tuple[str, Sequence[signal.Signals], int, bool, Any]] = [
    *((strategy, USER, 1, True, ENDED) for strategy in ("zero1", "zero2", "zero3", "tuned")),
    # Slurm requeues by itself what it ends.
    ("zero1", TERM, 1, True, ENDED),
    # Told in the second window of three, agreed and saved at its end.
    ("zero1", USER, 3, True, WINDOW),
    ("zero2", USER, 3, True, WINDOW),
    ("zero1", USER, 1, False, WENT_ON),
    ("zero1", USER + TERM, 1, False, ENDED),
]
"""The strategy, the signals, micro-batches of a window, whether Slurm requeues, and what comes of it."""


@pytest.mark.parametrize(("strategy", "signals", "accumulate", "requeues", "expected"), JOBS)
def test_all_ranks_save_after_the_same_batch_and_end(
    pool: RankPool,
    tmp_path: Path,
    strategy: str,
    signals: Sequence[signal.Signals],
    accumulate: int,
    requeues: bool,
    expected: Any,
) -> None:
    assert pool.run(2, train_in_job, str(tmp_path), strategy, signals, accumulate, requeues) == [expected] * 2
    assert (tmp_path / "asked").exists() == (requeues and signals == USER)
    if requeues:
        checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
        assert checkpoint["global_step"] == expected[-1] and checkpoint[CHECKPOINT_KEY]["slurm_job"] == "7"


class ToldAtTheEnd(Callback):
    """The last rank gets a signal in the last batch, in the last validation, or before the training."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _tell(self, trainer: Trainer, place: str) -> None:
        if place == self.place and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, "before")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 9:
            self._tell(trainer, "batch")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._tell(trainer, "validation")


def told_at_the_end(folder: str, strategy: str, place: str) -> tuple[Any, bool, str, int]:
    """How a training ends that is told to, whether its handlers are given back, its last step and what resumes."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1000, save_on_train_epoch_end=False)
    data, ended = zoo.loader(80, 4, rank=dist.get_rank(), world_size=2), None
    arguments = {"enable_checkpointing": True, "default_root_dir": folder}
    try:
        trainer = make_trainer(make(strategy), callbacks=[ToldAtTheEnd(place), saves], **arguments)
        try:
            trainer.fit(zoo.MLP(), data, data)
        except SystemExit as exit:
            ended = exit.code
        given_back = signal.signal(signal.SIGTERM, before) is not before
    finally:
        signal.signal(signal.SIGTERM, before)
    resumed = make_trainer(make(strategy), **arguments)
    resumed.fit(zoo.MLP(), data, ckpt_path=f"{folder}/last.ckpt")
    return ended, given_back, str(trainer.state.status.value), resumed.global_step


@pytest.mark.parametrize(
    ("strategy", "place"),
    [("zero1", "batch"), ("zero1", "validation"), ("zero3", "batch"), ("tuned", "batch"), ("tuned", "validation")],
)
def test_a_signal_in_the_last_batch_or_validation_ends_the_program(
    pool: RankPool, tmp_path: Path, strategy: str, place: str
) -> None:
    assert pool.run(2, told_at_the_end, str(tmp_path), strategy, place) == [(143, True, "interrupted", 10)] * 2


COMPLETE = """
import sys
from lightning.pytorch import Trainer
from tests.strategies import zoo
from tests.strategies.checkpoint.test_preemption import ToldAtTheEnd
arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": sys.argv[1], "logger": False}
trainer = Trainer(strategy="zero1_custom", **arguments)
trainer.fit(zoo.MLP(), zoo.loader(8, 4))
trainer.save_checkpoint(f"{sys.argv[1]}/done.ckpt")
again = Trainer(strategy="zero1_custom", callbacks=[ToldAtTheEnd("before")], **arguments)
again.fit(zoo.MLP(), zoo.loader(8, 4), ckpt_path=f"{sys.argv[1]}/done.ckpt")
print("goes on")
"""


def test_a_signal_is_not_lost_in_a_training_that_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPLETE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGTERM and "goes on" not in ended.stdout, ended.stderr[-2000:]


def test_outside_of_slurm_sigusr1_is_the_programs(pool: RankPool) -> None:
    assert pool.run(2, handlers_in_training) == [(True, True, [15])] * 2


def handlers_in_training() -> tuple[bool, bool, list[int]]:
    """Whether SIGUSR1 is left alone, whether all is given back, and whether the program's own handler is called."""
    called: list[int] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.found = signal.getsignal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    def own(signum: int, _: Any) -> None:
        called.append(signum)

    before = signal.signal(signal.SIGTERM, own)
    look, usr1 = Look(), signal.getsignal(signal.SIGUSR1)
    try:
        with suppress(SystemExit):
            make_trainer(zero1(), callbacks=[look]).fit(zoo.MLP(), zoo.loader(20, 2))
        given_back = signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    return look.found == usr1, given_back, called


def test_the_number_of_a_job() -> None:
    for variables, number in (({}, "7"), ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2")):
        with patch.dict(os.environ, IN_JOB, **variables):
            assert job_number() == number


def test_what_another_job_saved_for_itself_is_refused() -> None:
    with patch.dict(os.environ, IN_JOB):
        check_job({"slurm_job": "7"}, "somewhere/hpc_ckpt_1.ckpt")
        check_job({"slurm_job": "6"}, "somewhere/last.ckpt")
        check_job({}, "somewhere/hpc_ckpt_1.ckpt")
        with pytest.raises(MisconfigurationException, match=r"was saved by job 6 .* this is job 7"):
            check_job({"slurm_job": "6"}, "somewhere/hpc_ckpt_1.ckpt")
    check_job({"slurm_job": "6"}, "somewhere/hpc_ckpt_1.ckpt")


def terminate(folder: str, saves: bool, **variables: str) -> tuple[list[str], int]:
    """What is said at the end of a training that is told to go, and the step that one resumed as it says begins at."""
    preemption._SECONDS_UNTIL_SLURM_ENDS_THE_RUN = 0.0
    Path(folder).mkdir(exist_ok=True)
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=1000)] if saves else []
    told = ToldToGo(folder, TERM, rank=1, batch=3)
    data = zoo.loader(80, 4, rank=dist.get_rank(), world_size=2)
    arguments = {"enable_checkpointing": saves, "default_root_dir": folder}
    with listening() as lines, suppress(SystemExit), patch.dict(os.environ, variables):
        make_trainer(zero1(), callbacks=[told, *callbacks], **arguments).fit(zoo.MLP(), data)
    steps = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
            steps.append(trainer.global_step)

    path = re.search(r"`ckpt_path='(.*)'` to `fit`", " ".join(lines))
    # Said on rank 0 alone.
    dist.broadcast_object_list(named := [path and path[1]])
    with patch.dict(os.environ, variables):
        make_trainer(zero1(), callbacks=[Look()], **arguments).fit(zoo.MLP(), data, ckpt_path=named[0])
    return [line for line in lines if re.search("saved|Training ends|resume", line)], steps[0]


def terminate_in_turn(folder: str) -> list[tuple[list[str], int]]:
    """With a callback that saves, in a job, and without both."""
    return [
        terminate(f"{folder}/saves", True),
        terminate(f"{folder}/job", False, **IN_JOB),
        terminate(f"{folder}/nothing", False),
    ]


def test_the_last_line_says_from_what_to_resume_or_that_nothing_was_saved(pool: RankPool, tmp_path: Path) -> None:
    first, others = pool.run(2, terminate_in_turn, str(tmp_path))
    last, of_job = tmp_path / "saves/last.ckpt", tmp_path / "job/hpc_ckpt_1.ckpt"
    saved = [f"Preempted: saved {path} after step 4." for path in (last, of_job)]
    resume = f"Training ends here. To resume, pass `ckpt_path='{last}'` to `fit`."
    in_job = "Training ends here. The job's next run resumes from it, if `fit` gets no `ckpt_path`."
    in_job += " Ranks wait up to 0 s for Slurm to end them."
    assert first[:2] == [([saved[0], resume], 4), ([saved[1], in_job], 4)]
    ((line,), begins) = first[2]
    assert begins == 0 and "Ended by SIGTERM after step 4, and nothing was saved" in line
    assert [lines for lines, _ in others] == [[], [], []]
