"""Runs the processes of a row, and ends them: they succeed together, within a limit of time, or there is a reason."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.ranks import clean_up_on_sigterm, free_port, rank_environment

_GRACE = 5.0
_KEPT_LINES = 30
_OF_AN_ERROR = re.compile(r"^(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|Interrupt)\b")


class Failure(Exception):
    """Processes did not succeed.

    Args:
        reason: Why, in a line.
        lines: The end of what the process printed that failed first.
    """

    def __init__(self, reason: str, lines: Sequence[str]) -> None:
        super().__init__(reason)
        self.reason, self.lines = reason, list(lines)


def run_processes(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], seconds: float) -> None:
    """Runs one process for each command, all at once; none of them is left when this returns or raises.

    Args:
        commands: Of each.
        environments: What is added to this process's, of each.
        seconds: After which they are ended.

    Raises:
        Failure: One has failed, or they did not end in time.
    """
    clean_up_on_sigterm()
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                # A session of its own: with a process end those that it has started.
                how = {**os.environ, **environment}
                started = subprocess.Popen(command, env=how, stdout=log, stderr=log, start_new_session=True)
                processes.append(started)
            while any(process.poll() is None for process in processes):
                failed = _failed(processes)
                if failed is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            failed = _failed(processes)
            running = [number for number, process in enumerate(processes) if process.poll() is None]
        finally:
            _end(processes)
        if failed is not None:
            lines = _last_lines(logs[failed])
            raise Failure(_reason(lines, processes[failed].returncode), lines)
        if running:
            raise Failure(f"it was ended after {seconds:.0f} s", _last_lines(logs[running[0]]))


def environments_of(ranks: int) -> list[dict[str, str]]:
    """What tells processes that they are one rank each, and NCCL that each of them has a host of its own.

    NCCL refuses two ranks on one GPU of one host. Nothing leaves the machine, which may have no network.
    """
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if ranks == 1:
        return [local]
    port = free_port()
    found = []
    for rank in range(ranks):
        # As many nodes of one rank: each takes the GPU that its node has.
        known = rank_environment(rank, 0, ranks, 1, "127.0.0.1", port)
        found.append({**local, **known, "TORCHELASTIC_RUN_ID": f"benchmark-{port}", "NCCL_HOSTID": f"rank{rank}"})
    return found


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    return next((number for number, process in enumerate(processes) if process.poll()), None)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            # Also where it has ended: what it has started may not have.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, stop)
        until = time.monotonic() + _GRACE
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(0.05)


def _last_lines(log: IO[bytes]) -> list[str]:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    # torch's profiler says when it begins and ends.
    return [line for line in lines if line.strip() and not line.startswith("USDT:")][-_KEPT_LINES:]


def _reason(lines: Sequence[str], code: int) -> str:
    errors = [line for line in lines if _OF_AN_ERROR.match(line)]
    said = (errors or lines or ["it printed nothing"])[-1].strip()
    ended = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    return f"{ended}: {said[:500]}"


def python(*arguments: str) -> list[str]:
    """A command that runs a module by this interpreter."""
    return [sys.executable, "-m", *arguments]


def read_json_if_there(path: Path) -> str | None:
    """What a process has written, if it has."""
    return path.read_text() if path.is_file() else None
