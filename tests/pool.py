"""A pool of processes, started once per session, that runs functions as the ranks of a process group.

On CPU that is Gloo's; on a GPU, which all ranks share, NCCL's. Rendezvous is by file, so that no port is fixed. A call
that takes too long ends with every rank's stack, and the pool is started afresh; an exception on a rank is raised here
with its traceback.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import devices

DEFAULT_TIMEOUT = 90.0
SECONDS_TO_END = 5.0


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class RankPool:
    """``run(world_size, function, *args)`` calls ``function(*args)`` on that many ranks and returns what they return.

    ``function`` must be importable (defined at the top of a test module) and finds its rank in torch.distributed.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backend: The process group's; by default as Lightning chooses it.
    """

    def __init__(self, device: str = "cpu", backend: str | None = None) -> None:
        self.device = device
        self._backend = backend
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        # Forked from a process that has imported what takes long to import, and done nothing else.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lightning.pytorch", "lightning_parstrat.strategies.zero1"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._joined = 0
        self._rendezvous = 0

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[Any]:
        dead = [
            f"{rank} ({process.exitcode})" for rank, (process, _) in enumerate(self._ranks) if not process.is_alive()
        ]
        if dead:
            warnings.warn(f"After the last test ranks have ended, with exit codes: {', '.join(dead)}", stacklevel=2)
            self._stop()
        for rank in range(len(self._ranks), world_size):
            self._ranks.append(self._start(rank))
        if self._joined != world_size:
            self._joined = world_size
            self._rendezvous += 1
        rendezvous = self._folder / f"rendezvous-{self._rendezvous}"
        for _, connection in self._ranks[:world_size]:
            connection.send((world_size, str(rendezvous), function, args, timeout))
        results = self._collect(world_size, timeout)
        failed = {rank: error for rank, (error, _) in results.items() if error is not None}
        if failed:
            # After an exception on one rank the others may still wait for it in a collective.
            self._stop()
            raise RankError("\n".join(f"--- rank {rank}\n{error}" for rank, error in sorted(failed.items())))
        return [results[rank][1] for rank in range(world_size)]

    def rejoin(self) -> None:
        """Makes a new process group before the next run: an error may have ended NCCL's."""
        self._joined = 0

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[str | None, Any]]:
        deadline = time.monotonic() + timeout
        results: dict[int, tuple[str | None, Any]] = {}
        while len(results) < world_size:
            for rank in range(world_size):
                process, connection = self._ranks[rank]
                if rank in results:
                    continue
                if connection.poll(0.02):
                    try:
                        results[rank] = connection.recv()
                    except EOFError:
                        process.join(1.0)
                        stack = (self._folder / f"stack-{rank}").read_text()
                        results[rank] = (f"the process died with exit code {process.exitcode}\n{stack}", None)
            if any(error is not None for error, _ in results.values()):
                # The others get a moment to fail for the same reason, so that all causes are shown.
                deadline = min(deadline, time.monotonic() + 2.0)
            if time.monotonic() > deadline:
                for rank in set(range(world_size)) - set(results):
                    results[rank] = (f"no answer in time; its stack:\n{self._stack(rank)}", None)
        return results

    def _stack(self, rank: int) -> str:
        process, _ = self._ranks[rank]
        path = self._folder / f"stack-{rank}"
        if process.is_alive() and path.exists():
            if dumped := path.read_text():
                return dumped
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.3)
            return path.read_text() or "(none: it was stopped, or is held in the kernel)"
        return "(the process is gone)"

    def _start(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(rank, theirs, str(self._folder), self.device, self._backend), daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        """Lets the ranks end by themselves, so that what measures them can write what it has seen."""
        for _, connection in self._ranks:
            connection.close()
        deadline = time.monotonic() + SECONDS_TO_END
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self._stop()

    def _stop(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()
        self._joined = 0


def _serve(rank: int, connection: Connection, folder: str, device: str, backend: str | None) -> None:
    stack = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115  (open as long as the process lives)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    # A crash in C++ shows its stack, too; torch prints those of C++'s own threads to stderr.
    faulthandler.enable(file=stack, all_threads=True)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    _keep_handlers_of_faults()
    torch.set_num_threads(1)
    # What was imported is no garbage: a collection that a test asks for looks at the test's own objects.
    gc.freeze()
    joined = None
    while True:
        try:
            world_size, rendezvous, function, args, timeout = connection.recv()
        except EOFError:
            return
        stack.seek(0)
        stack.truncate()
        # Before collectives time out, after which ranks are elsewhere.
        faulthandler.dump_traceback_later(timeout / 2, file=stack)
        try:
            if joined != rendezvous:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    _forget_meshes()
                devices.become(device, rank)
                chosen = backend or devices.backend()
                dist.init_process_group(
                    chosen,
                    init_method=f"file://{rendezvous}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=60),
                    # As Lightning does: NCCL then makes its communicators at once, and splits off those of groups.
                    device_id=devices.device() if chosen == "nccl" else None,
                )
                joined = rendezvous
            result: tuple[str | None, Any] = (None, function(*args))
        except BaseException:
            result = (traceback.format_exc(), None)
        faulthandler.cancel_dump_traceback_later()
        connection.send(result)


def _keep_handlers_of_faults() -> None:
    """A Trainer that is done resets all signal handlers that Python does not know, `faulthandler`'s among them."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    faults = {signal.SIGUSR2, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    _SignalConnector._valid_signals = staticmethod(lambda: signal.valid_signals() - faults)


def _forget_meshes() -> None:
    """Operators on DTensors are cached with the mesh that they were first called on: its groups have been destroyed."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
