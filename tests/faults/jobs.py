"""Jobs of several processes that may be killed at any point, and what they leave.

Processes are forked from one that has everything imported, so that a job starts in a moment.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=15)
"""Of the ranks' collectives."""


class Ended(NamedTuple):
    """How a rank ended: its exit code (negative for a signal), what it printed, and how long after the first."""

    exitcode: int
    output: str
    seconds_after_first: float


class Job:
    """Ranks that run one function, each in a process of its own.

    Args:
        folder: Where they meet and print.
        world_size: Number of ranks.
        function: What each runs, importable.
        arguments: What it is called with.
        tcp: Whether rank 0 holds the store by which they meet, rather than a file.
    """

    def __init__(
        self, folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any, tcp: bool = False
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning.pytorch", "lightning_parstrat", "tests.faults.trainings"])
        folder.mkdir(parents=True, exist_ok=True)
        meeting = folder / f"meeting-{time.monotonic_ns()}"
        self._outputs = [folder / f"{meeting.name}-rank-{rank}.txt" for rank in range(world_size)]
        self._processes = [
            context.Process(
                target=_run, args=(str(output), str(meeting), rank, world_size, tcp, function, arguments), daemon=True
            )
            for rank, output in enumerate(self._outputs)
        ]
        for process in self._processes:
            process.start()

    def kill(self, ranks: Sequence[int]) -> None:
        """Ends ranks as the kernel does when memory is short."""
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, rank: int, seconds: float) -> None:
        """Waits until one rank has ended, or for so long."""
        self._processes[rank].join(seconds)

    def wait(self, seconds: float) -> list[Ended]:
        """Waits until all have ended.

        Raises:
            AssertionError: Some have not in time; they are killed.
        """
        deadline = time.monotonic() + seconds
        ended: dict[int, float] = {}
        while len(ended) < len(self._processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if rank not in ended and not process.is_alive():
                    ended[rank] = time.monotonic()
            time.sleep(0.02)
        hanging = [rank for rank in range(len(self._processes)) if rank not in ended]
        self.kill(hanging)
        if hanging:
            shown = "\n".join(self._outputs[rank].read_text()[-2000:] for rank in hanging)
            raise AssertionError(f"ranks {hanging} hang after {seconds} seconds:\n{shown}")
        first = min(ended.values())
        return [
            Ended(process.exitcode or 0, output.read_text() if output.exists() else "", ended[rank] - first)
            for rank, (process, output) in enumerate(zip(self._processes, self._outputs, strict=True))
        ]


def _run(
    output: str, meeting: str, rank: int, world_size: int, tcp: bool, function: Callable[..., Any], arguments: Any
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    store = _tcp_store(meeting, rank, world_size) if tcp else dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    function(*arguments)
    dist.destroy_process_group()


def _tcp_store(meeting: str, rank: int, world_size: int) -> dist.Store:
    path = Path(meeting)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        path.with_suffix(".part").write_text(str(store.port))
        path.with_suffix(".part").rename(path)
        return store
    while not path.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), world_size, is_master=False)
