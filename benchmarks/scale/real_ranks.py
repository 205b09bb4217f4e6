"""Real ranks over Gloo, forked from one process that has loaded everything, to be counted as played ones are.

    python -m benchmarks.scale.real_ranks --sizes 2 8 32 --strategies zero1_custom ddp

A process that is forked shares the memory of what its parent has loaded, so that 64 ranks fit on a small machine.
Prints sockets and CPU time of a rank, and what it has launched, by which played ranks are checked.
"""

import argparse
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.scale.events import Kind
from benchmarks.scale.fake_ranks import silence
from benchmarks.scale.models import small
from benchmarks.scale.playing import following_operations, naming_groups
from benchmarks.scale.recorder import Recorder
from benchmarks.scale.training import SETTLED, StrategyName, Training, fit
from benchmarks.scale.wires import GLOO

_SECONDS = 600


class Counted(NamedTuple):
    """What one rank has cost.

    Attributes:
        sockets: That are open in the settled steps, those to the store among them.
        cpu_seconds: Of all threads, in a settled step.
        step_seconds: That a settled step has taken.
        launches: By the code in Python, in all of the training: threads launch where a step has ended. DDP's reducer
            launches in C++.
    """

    sockets: int
    cpu_seconds: float
    step_seconds: float
    launches: dict[str, int]


class _Clock(Callback):
    """Reads the process's clock and counts its sockets around the settled steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sockets = 0
        self.began = self.seconds = 0.0
        self.began_at = self.step_seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == SETTLED:
            self.began, self.began_at = time.process_time(), time.perf_counter()
        elif batch_idx == SETTLED + self.steps:
            self.seconds = (time.process_time() - self.began) / self.steps
            self.step_seconds = (time.perf_counter() - self.began_at) / self.steps
            self.sockets = open_sockets()


def open_sockets() -> int:
    """Sockets of this process; pairs that it has with itself count twice."""
    links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink() and _is_open(entry))
    return sum(link.startswith("socket:") for link in links)


def _is_open(entry: os.DirEntry[str]) -> bool:
    # The folder's own descriptor is gone by now.
    return os.path.lexists(entry.path)


_KINDS: dict[str, Kind] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


@contextmanager
def counting_launches(recorder: Recorder, rank: int, size: int) -> Iterator[None]:
    """Within it, what Python launches by any process group of this process is counted."""
    numbers: dict[dist.ProcessGroup, int] = {}

    def number_of(group: dist.ProcessGroup) -> int:
        if group not in numbers:
            numbers[group] = recorder.add_group()
            if group is dist.group.WORLD:
                recorder.name_groups({numbers[group]: "world"})
        return numbers[group]

    def counted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            peer = args[1] if name in ("send", "recv") else None
            recorder.launch(number_of(group), _KINDS[name], 0, 0, rank, size, peer)
            return launch(group, *args, **kwargs)

        return launched

    with ExitStack() as stack:
        for name in _KINDS:
            launch = counted(name, getattr(dist.ProcessGroup, name))
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, launch))
        for patch in (*naming_groups(recorder, number_of), *following_operations(recorder)):
            stack.enter_context(patch)
        yield


def run(training: Training, size: int) -> list[Counted]:
    """Trains on so many real ranks, and returns what each has cost.

    Raises:
        RuntimeError: A rank has failed; what it said is in the message.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(size)
        results = [Path(folder) / f"{rank}.json" for rank in range(size)]
        children = [
            _forked(lambda rank=rank: _rank(training, rank, size, listener), results[rank]) for rank in range(size)
        ]
        try:
            _wait_for(children, results)
        finally:
            for child in children:
                _end(child)
        return [Counted(**json.loads(result.read_text())) for result in results]


def _forked(count: Callable[[], Counted], result: Path) -> int:
    """The number of a process that writes what it has counted, or why not."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        result.write_text(json.dumps(count()._asdict()))
        code = 0
    except BaseException:
        result.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        # Not by `exit`: what the parent has registered is the parent's.
        os._exit(code)


def _rank(training: Training, rank: int, size: int, listener: socket.socket) -> Counted:
    torch.set_num_threads(1)
    # Lightning gives each process all cores of its node; ranks that play nodes share one.
    os.environ["OMP_NUM_THREADS"] = "1"
    recorder = Recorder(GLOO)
    recorder.keeps_events = False
    port = listener.getsockname()[1]
    served = {"master_listen_fd": os.dup(listener.fileno())} if rank == 0 else {}
    listener.close()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=_SECONDS), **served)
    clock = _Clock(training.steps)
    with counting_launches(recorder, rank, size):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        fit(training, recorder, rank, size, SETTLED + training.steps + 1, callbacks=[clock])
        launches = sum((counters.launches for counters in recorder.counters.values()), Counter())
        # Rank 0 serves the store.
        dist.barrier()
    return Counted(clock.sockets, clock.seconds, clock.step_seconds, dict(launches))


def _wait_for(children: Sequence[int], results: Sequence[Path]) -> None:
    deadline = time.monotonic() + _SECONDS
    running = set(children)
    while running and time.monotonic() < deadline:
        time.sleep(0.05)
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.discard(child)
                if status:
                    said = [error.read_text() for error in (r.with_suffix(".error") for r in results) if error.exists()]
                    raise RuntimeError(f"A rank has ended by status {status}. {''.join(said[:1])}")
    if running:
        raise RuntimeError(f"{len(running)} of {len(children)} ranks have not ended within {_SECONDS} s.")


def _end(child: int) -> None:
    try:
        if not os.waitpid(child, os.WNOHANG)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    except ChildProcessError:
        # It has been waited for.
        return


def allow_many_files() -> None:
    """Full meshes of several groups need more files than shells allow by default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs each strategy on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--strategies", choices=get_args(StrategyName), nargs="+", default=["zero1_custom", "ddp"])
    parser.add_argument("--ranks-per-node", type=int, default=8, help="how many behave as if they shared a node")
    parser.add_argument("--cap-mb", type=float, default=0.25, help="size of a bucket in MiB")
    parser.add_argument("--steps", type=int, default=8, help="settled steps to count")
    parser.add_argument("--output", type=Path, help="where to write what was counted; by default it is printed")
    asked = parser.parse_args(arguments)
    silence()
    allow_many_files()
    found: dict[str, Any] = {}
    for strategy in asked.strategies:
        training = Training(strategy, small(), asked.cap_mb, asked.steps, ranks_per_node=asked.ranks_per_node)
        found[strategy] = {}
        for size in asked.sizes:
            ranks = run(training, size)
            mean = sum(one.cpu_seconds for one in ranks) / size
            print(
                f"{strategy}, {size} ranks: {ranks[0].sockets} sockets, {mean * 1e3:.1f} ms CPU a step", file=sys.stderr
            )
            found[strategy][size] = [one._asdict() for one in ranks]
    result = json.dumps(found)
    if asked.output is None:
        print(result)
    else:
        asked.output.write_text(result)


if __name__ == "__main__":
    main()
