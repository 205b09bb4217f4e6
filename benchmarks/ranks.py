"""Starts the ranks of a benchmark, as torchrun would, and ends them together."""

import contextlib
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, NoReturn

COMMAND_VARIABLE = "PARSTRAT_BENCHMARK_COMMAND"
_SECONDS_OF_GRACE = 10.0


def rank_environment(
    node: int, local_rank: int, nodes: int, ranks_per_node: int, address: str, port: int
) -> dict[str, str]:
    """The variables by which a rank finds the others."""
    return {
        "RANK": str(node * ranks_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"benchmark-{os.getpid()}",
        # Otherwise each rank computes with as many threads as the machine has cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A result file names the command that the user typed.
        COMMAND_VARIABLE: command_line(),
    }


def own_command() -> list[str]:
    """What starts this program once more, as a module or a script, with the same arguments."""
    return [sys.executable, *sys.orig_argv[1:]]


def command_line() -> str:
    """What the user typed."""
    return os.environ.get(COMMAND_VARIABLE) or shlex.join(["python", *sys.orig_argv[1:]])


class RankGroup:
    """Processes that succeed together: when one fails, the others are ended. Leaving the context leaves none behind.

    Args:
        shown: Whether the first one prints to the terminal. What others print is kept.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files = contextlib.ExitStack()
        self._logs: list[IO[bytes] | None] = []

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *_: object) -> None:
        for stop in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                # Also if it has ended: what it has started may not have.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, stop)
            self._wait_until(lambda: not self.running())
        self._files.close()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None = None
    ) -> None:
        """Starts one more rank; ``prepare`` runs in it before the command does."""
        log: IO[bytes] | None = None
        if self._processes or not self._shown:
            log = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            # A rank may have children of its own, such as loader workers, which end with its session.
            start_new_session=True,
            preexec_fn=prepare,
        )
        self._processes.append(process)
        self._logs.append(log)

    def wait(self) -> int:
        """Waits for all ranks, and shows what those have printed that fail; the exit code of the first, or 0."""
        failed = self.first_failed()
        if failed is None:
            return 0
        self._wait_until(lambda: not self.running())
        for rank, process in enumerate(self._processes):
            if process.poll() != 0 and self._logs[rank] is not None:
                lines = self.last_lines(rank, 20)
                print(f"rank {rank}, exit code {process.poll()}:", *lines, sep="\n  ", file=sys.stderr)
        return self.code(failed)

    def first_failed(self, seconds: float = math.inf) -> int | None:
        """Waits until all have ended, one has failed, or so long; the number of the one that has failed."""
        deadline = time.monotonic() + seconds
        while True:
            failed = next((number for number, process in enumerate(self._processes) if process.poll()), None)
            if failed is not None or not self.running() or time.monotonic() > deadline:
                return failed
            time.sleep(0.05)

    def running(self) -> list[int]:
        """The numbers of those that have not ended."""
        return [number for number, process in enumerate(self._processes) if process.poll() is None]

    def code(self, number: int) -> int:
        """The exit code of one that has ended; negative for a signal."""
        return int(self._processes[number].returncode)

    def last_lines(self, number: int, count: int) -> list[str]:
        """The end of what one has printed that is not shown."""
        log = self._logs[number]
        if log is None:
            return []
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
        # torch's profiler says when it begins and ends.
        return [line for line in lines if line.strip() and not line.startswith("USDT:")][-count:]

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS_OF_GRACE
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.05)


def run_local_ranks(command: Sequence[str], ranks: int, extra: Mapping[str, str] | None = None) -> int:
    """Runs ``command`` as that many ranks on this machine; returns the exit code."""
    clean_up_on_sigterm()
    port = free_port()
    with RankGroup() as group:
        for rank in range(ranks):
            group.start(command, {**rank_environment(0, rank, 1, ranks, "127.0.0.1", port), **(extra or {})})
        return group.wait()


def become_ranks(nodes: int, devices: int) -> None:
    """Returns in each rank. A process that nobody started as a rank starts them all, and ends with them.

    Lightning starts further ranks when the first distributed strategy is set up; here all exist from the beginning, so
    that what runs before it, or without any communication, runs on all of them at the same time.
    """
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ or nodes > 1 or devices == 1:
        return
    sys.exit(run_local_ranks(own_command(), devices))


def global_rank() -> int:
    """This process's rank among all."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def clean_up_on_sigterm() -> None:
    """Turns the signal into an exception, which passes through whoever has to clean up."""
    signal.signal(signal.SIGTERM, _raise_exit)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _raise_exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
