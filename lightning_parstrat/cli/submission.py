"""Submits a job to Slurm, and follows it to its end."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from lightning_parstrat.cli.errors import UsageError

POLL_SECONDS = 1.0
_FINISHED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT",
}  # fmt: skip
_FINISHED_IF_IT_LASTS = {"PREEMPTED"}
"""A requeued job is briefly in this state, too."""

_PATIENCE_SECONDS = 120.0
"""How long Slurm may fail to answer, or a job be in a state between two runs."""


class JobState(NamedTuple):
    """The state of a job as Slurm reports it.

    Attributes:
        name: Such as ``RUNNING``.
        reason: Why it is in this state, such as ``Resources``; empty where Slurm has none.
        exit_code: Of the job's script; or 128 plus the signal that ended it.
        restarts: How often it has been requeued.
    """

    name: str
    reason: str
    exit_code: int
    restarts: int

    @property
    def is_final(self) -> bool:
        """Whether the job has ended and will not be requeued."""
        return self.name in _FINISHED


def submit(job_file: str, folder: Path) -> int:
    """Submits a job file, and returns the job's number.

    Raises:
        UsageError: There is no Slurm here, or it refuses the job.
    """
    output = _slurm(["sbatch", "--parsable"], folder, job_file)
    # With several clusters, sbatch adds the cluster's name after a semicolon.
    return int(output.strip().split(";")[0])


def state_of(job: int) -> JobState:
    """Asks Slurm for the state of a job that is queued, runs, or has ended a few minutes ago.

    Raises:
        UsageError: Slurm does not know it (any more).
    """
    shown = _slurm(["scontrol", "--oneliner", "show", "job", str(job)])
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", shown))
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    reason = fields.get("Reason", "None")
    return JobState(
        name=fields["JobState"],
        reason="" if reason == "None" else reason,
        # The convention of shells.
        exit_code=int(code) or (128 + int(signal) if int(signal or 0) else 0),
        restarts=int(fields.get("Restarts", 0)),
    )


def cancel(job: int) -> None:
    """Ends a job."""
    _slurm(["scancel", str(job)])


class Follower:
    """Prints what is added to files that may not exist yet."""

    def __init__(self, paths: Sequence[Path], out: TextIO) -> None:
        self._positions = dict.fromkeys(paths, 0)
        self._out = out

    def print_new(self) -> None:
        """Prints what has been added since the last call."""
        for path, position in self._positions.items():
            try:
                with path.open(errors="replace") as file:
                    file.seek(position)
                    self._out.write(file.read())
                    self._positions[path] = file.tell()
            except FileNotFoundError:
                continue
        self._out.flush()


def wait_for(job: int, follower: Follower, say: Callable[[str], None]) -> JobState:
    """Shows a job's states and its logs until it has ended for good.

    On Ctrl-C it asks whether to cancel the job, which otherwise continues.
    """
    shown = None
    since = time.monotonic()
    while True:
        try:
            follower.print_new()
            try:
                state = state_of(job)
            except UsageError:
                # Slurm's controller may be restarting.
                if time.monotonic() - since > _PATIENCE_SECONDS:
                    raise
                time.sleep(POLL_SECONDS)
                continue
            if shown is None or (state.name, state.restarts) != (shown.name, shown.restarts):
                say(_describe(job, state))
                shown = state
            if state.name not in _FINISHED_IF_IT_LASTS:
                since = time.monotonic()
            if state.is_final or time.monotonic() - since > _PATIENCE_SECONDS:
                follower.print_new()
                return state
            time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            if _wants_to_cancel(job):
                cancel(job)
            else:
                say(f"Job {job} continues. Cancel it with: scancel {job}")
                raise


def _describe(job: int, state: JobState) -> str:
    reason = f" ({state.reason})" if state.reason else ""
    restarts = f", restarted {state.restarts} times" if state.restarts > 1 else ", restarted" if state.restarts else ""
    code = f", exit code {state.exit_code}" if state.is_final else ""
    return f"Job {job}: {state.name}{reason}{restarts}{code}"


def _wants_to_cancel(job: int) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"\nCancel job {job}? It continues otherwise. [y/N] ").strip().lower() in ("y", "yes")
    except (KeyboardInterrupt, EOFError):
        return False


def _slurm(command: Sequence[str], folder: Path | None = None, given: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"`{command[0]}` was not found on this machine. Run this on a login node of the Slurm cluster, or write the"
            " job file with --dry-run and submit it there."
        )
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
