"""Ranks that wait long say for whom, and where those are; calls that not all ranks make mix nothing up."""

import ctypes
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.distributed import zero1
from lightning_parstrat.distributed.comm import watch as watch_module
from lightning_parstrat.distributed.comm.agreement import all_gather_object, gather_object
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import Liveness, MissingRanksError
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.watch import Sign, Watch, begin_watch, end_watch, met, watching
from lightning_parstrat.distributed.torch_compat import collectives_launched, default_store
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.distributed.engines import adamw, backward, make_engine, perceptron, squared_error
from tests.pool import RankPool
from tests.scripts import clean_environment
from tests.undisturbed import undisturbed

SOON = 0.5


class Lines(logging.Handler):
    """What this rank has said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def watched(name: str, warn_after: float | None, act: Callable[[int, Lines], Any]) -> tuple[Any, list[str], list[str]]:
    """What ``act`` returns, what was said, and the threads that are left."""
    lines = Lines()
    watch_module.log.addHandler(lines)
    try:
        # The watch begins when all are here: who comes to what is tried much later than the others would be named, too.
        dist.barrier()
        begin_watch(Liveness(name), "zero1_custom", warn_after)
        result = act(dist.get_rank(), lines)
        end_watch("ended its training", wait=True)
    finally:
        end_watch()
        watch_module.log.removeHandler(lines)
    return result, lines.said, _watching_threads()


def _watching_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "watch" in thread.name]


def stays_away(until: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)


def has_key(name: str) -> Callable[[], bool]:
    store = default_store()
    return lambda: bool(store.check([name]))


def tells(lines: Lines, key: str) -> None:
    """Has other ranks go on when this one has said that it waits."""

    def tell() -> None:
        stays_away(lambda: bool(lines.said))
        if lines.said:
            store.set(key, "heard")

    store = default_store().clone()
    threading.Thread(target=tell, daemon=True).start()


def shows_gradients(engine: ShardedDataParallel) -> None:
    with engine.full_gradients():
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.requires_grad]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def adds_a_group(engine: ShardedDataParallel) -> None:
    engine.optimizers[0].add_param_group({"params": [engine.module.added]})
    assert len(engine.buckets) == 6


def gives_its_state(engine: ShardedDataParallel) -> dict[int, float]:
    state = engine.optimizers[0].state_dict()["state"]
    return {key: value["exp_avg"].sum().item() for key, value in state.items()}


CALLS: dict[str, Callable[[ShardedDataParallel], Any]] = {
    "optimizer.state_dict()": gives_its_state,
    "full_gradients()": shows_gradients,
    "optimizer.add_param_group()": adds_a_group,
}


def some_are_late(name: str, what: str, late: list[int], has_ended: bool) -> tuple[Any, list[str], list[str]]:
    """Some ranks come only when another one has said that it waits."""
    module = perceptron()
    # Beside the optimizer until it is added.
    module.added = nn.Parameter(torch.ones(7), requires_grad=False)
    optimizer = adamw([parameter for parameter in module.parameters() if parameter.requires_grad])
    module.added.requires_grad_(what == "optimizer.add_param_group()")
    engine = make_engine(module, optimizer)
    backward(engine, squared_error(module, dist.get_rank()))
    if what == "optimizer.state_dict()":
        optimizer.step()

    def act(rank: int, lines: Lines) -> Any:
        if has_ended:
            end_watch("ended its training", wait=True)
        if rank in late:
            stays_away(has_key(f"heard/{name}"))
        else:
            tells(lines, f"heard/{name}")
        return CALLS[what](engine)

    try:
        return watched(name, SOON, act)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("world_size", "what", "late", "has_ended", "who"),
    [
        (2, "optimizer.state_dict()", [1], False, "rank 1, which is "),
        (2, "optimizer.state_dict()", [0], False, "rank 0, which is "),
        (3, "optimizer.state_dict()", [1, 2], False, "ranks 1, 2, each of which is "),
        (2, "full_gradients()", [1], False, "rank 1, which is "),
        (2, "optimizer.add_param_group()", [1], False, "rank 1, which is "),
        # It is watched as long as somebody waits.
        (2, "optimizer.state_dict()", [1], True, "rank 1, which ended its training"),
    ],
)
@undisturbed
def test_a_rank_that_waits_names_who_has_not_come_and_where_it_is(
    pool: RankPool, world_size: int, what: str, late: list[int], has_ended: bool, who: str, tmp_path: Path
) -> None:
    found = pool.run(world_size, some_are_late, str(tmp_path), what, late, has_ended)
    # One of those that wait asks for all.
    ((_, (line,), _),) = [one for one in found if one[1]]
    asker = next(rank for rank in range(world_size) if rank not in late)
    at = r"test_watch\.py:\d+"
    there = "" if has_ended else rf"in at {at}"
    waits = rf"zero1_custom: rank {asker} has waited \d s in `{re.escape(what)}` at {at}"
    assert re.match(rf"{waits} for {who}{there}\. \w.* on all ranks", line), line
    assert all(result == found[0][0] and threads == [] for result, _, threads in found)


def waits_for_collective(name: str, how: str) -> tuple[Any, list[str], list[str]]:
    """Rank 0 waits within Gloo; rank 1 is late: in another collective, or in C code that holds Python's lock."""
    groups, heard = process_groups(), has_key(f"heard/{name}")

    def act(rank: int, lines: Lines) -> None:
        tells(lines, f"heard/{name}")
        if rank == 1 and how == "in another collective":
            dist.all_reduce(torch.ones(1), group=groups.gradients)
        elif how == "in another collective":
            threading.Thread(target=reduces, daemon=True).start()
        elif rank == 1:
            if how == "stops after the first line":
                stays_away(heard)
            else:
                stays_away(has_key(f"lightning_parstrat/waits/{name}/sign/1"))
            # Beyond the second line, after four times `SOON`; `PyDLL` keeps the lock.
            ctypes.PyDLL(None).usleep(3_000_000)
            stays_away(heard)
        with watching("`trainer.save_checkpoint()`"):
            dist.barrier(group=groups.control)

    def reduces() -> None:
        stays_away(heard)
        dist.all_reduce(torch.ones(1), group=groups.gradients)

    return watched(name, SOON, act)


@pytest.mark.parametrize("how", ["in another collective", "stopped", "stops after the first line"])
@undisturbed
def test_where_the_host_waits_in_c_it_is_said(pool: RankPool, how: str, tmp_path: Path) -> None:
    (_, said, _), (_, said_by_1, _) = pool.run(2, waits_for_collective, str(tmp_path), how)
    silent = r"for rank 1, which has given no sign of life for \d s \(ended, stopped, .*lock\) and was last in "
    if how == "in another collective":
        # Both wait, each in a collective of its own.
        by_0 = r"in `trainer.save_checkpoint\(\)` at test_watch\.py:\d+ for rank 1, which is in at test_watch\.py:\d+"
        by_1 = r"rank 1 has .* for rank 0, which is in `trainer.save_checkpoint\(\)` at test_watch\.py:\d+"
        assert said or said_by_1
        assert all(re.search(by_0, line) for line in said) and all(re.search(by_1, line) for line in said_by_1), said
    elif how == "stopped":
        assert re.search(silent, said[0]) and said_by_1 == [], said
    else:
        assert len(said) == 2 and said_by_1 == [], said
        assert "for rank 1, which is in at" in said[0] and re.search(silent, said[1]), said


def launched_after_a_save(name: str) -> tuple[dict[str, int], int]:
    """What this rank counts as launched after a full save, and what Gloo counts on the control group."""
    module = perceptron()
    optimizer = adamw(module.parameters())
    engine = make_engine(module, optimizer)
    backward(engine, squared_error(module, dist.get_rank()))
    optimizer.step()
    optimizer.state_dict()
    group = process_groups().control
    gather_object(dist.get_rank(), group)
    dist.all_reduce(torch.ones(1))
    return Watch(Liveness(name), "zero1_custom")._where().counts, collectives_launched(group)


def test_ranks_at_the_same_point_count_the_same_though_messages_between_two_are_not(pool: RankPool) -> None:
    found = pool.run(3, launched_after_a_save, "launched")
    assert len({by_gloo for _, by_gloo in found}) > 1
    launched = [launched for launched, _ in found]
    assert launched[0] == launched[1] == launched[2]
    assert launched[0]["launched by default"] > 0 and launched[0]["launched by control"] > 0


def ends_while_another_waits(name: str) -> str:
    module = perceptron()
    optimizer = adamw(module.parameters())
    make_engine(module, optimizer)
    store = default_store()
    timeout = store.timeout

    def act(rank: int, lines: Lines) -> str:
        if rank == 1:
            end_watch("ended its training by ValueError")
            return "ended"
        store.set_timeout(timedelta(seconds=2))
        try:
            optimizer.state_dict()
        except MissingRanksError as error:
            return str(error)
        finally:
            store.set_timeout(timeout)
        return "did not wait"

    return watched(name, SOON, act)[0]


@undisturbed
def test_a_rank_that_has_ended_is_named_and_so_does_the_error_of_the_timeout(pool: RankPool, tmp_path: Path) -> None:
    error, _ = pool.run(2, ends_while_another_waits, str(tmp_path))
    assert error.startswith("Not all ranks have come to `optimizer.state_dict()`. zero1_custom: rank 0 has waited ")
    assert "for rank 1, which ended its training by ValueError. Call it on all ranks" in error


def comes_at_another_point(name: str) -> str:
    """Rank 1 goes on to the next control message, which does not wait, before it comes."""
    module = perceptron()
    optimizer = adamw(module.parameters())
    make_engine(module, optimizer)
    messages = ControlMessages(make_collectives(process_groups().control, torch.device("cpu")))
    messages.signal = 1 + dist.get_rank()

    def act(rank: int, lines: Lines) -> str:
        if rank == 1:
            messages.launch()
        try:
            optimizer.state_dict()
        except RuntimeError as error:
            if rank == 0:
                messages.launch()
            return f"{error} {messages.latest().signal}"
        return "mixed up"

    return watched(name, SOON, act)[0]


def test_what_comes_at_different_points_is_an_error_and_nothing_is_mixed_up(pool: RankPool) -> None:
    for error in pool.run(2, comes_at_another_point, "apart"):
        assert "was called by all ranks, but at different points of the training" in error and error.endswith(" 3")


class Counted(PrefixStore):
    """Counts requests of this process."""

    requests: ClassVar[list[str]] = []

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)
        self.made_of = prefix, store

    def clone(self) -> "Counted":
        prefix, store = self.made_of
        return Counted(prefix, store.clone())


def _counted(name: str) -> Callable[..., Any]:
    def request(self: Counted, *arguments: Any) -> Any:
        Counted.requests.append(name)
        return getattr(PrefixStore, name)(self, *arguments)

    return request


for _name in ("add", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "set", "wait"):
    setattr(Counted, _name, _counted(_name))


def trains_without_waiting(name: str, warn_after: float | None, steps: int) -> list[str]:
    group = process_groups().control
    watch_module.PrefixStore = Counted  # type: ignore[misc]
    Counted.requests.clear()

    def act(rank: int, lines: Lines) -> list[str]:
        for _ in range(steps):
            with watching("a step"):
                all_gather_object(rank, group)
        # The first is written when training begins: by a thread.
        stays_away(lambda: bool(Counted.requests) or warn_after is None)
        return list(Counted.requests)

    try:
        return watched(name, warn_after, act)[0]
    finally:
        watch_module.PrefixStore = PrefixStore  # type: ignore[misc]


@pytest.mark.parametrize(
    ("warn_after", "steps", "requests"), [(3600.0, 5, ["set"]), (3600.0, 200, ["set"]), (None, 5, [])]
)
def test_steps_send_nothing(pool: RankPool, warn_after: float | None, steps: int, requests: list[str]) -> None:
    assert pool.run(2, trains_without_waiting, f"quiet {steps} {warn_after}", warn_after, steps) == [requests] * 2


def test_alone_nothing_is_watched(pool: RankPool) -> None:
    assert pool.run(1, alone) == [([], [])]


def alone() -> tuple[list[str], list[str]]:
    with met("`optimizer.state_dict()`", process_groups().control):
        pass
    threads: list[list[str]] = []
    _, said, left = watched("alone", SOON, lambda rank, lines: threads.append(_watching_threads()))
    return said, [*threads[0], *left]


WAITING = Sign(9, 0.0, "", "step 8", "`backward`", {"default": 5}, True, "train.py:3", 15.0)
LATE = WAITING._replace(within="`training_step`", counts={"default": 4}, waits=False, line="train.py:9")
UNSEEN = WAITING._replace(waits=False)
IS_LATE = "is in `training_step` (step 8) at train.py:9"
LINES: list[tuple[Sign, list[Sign | None] | None, str]] = [
    (WAITING, [LATE], f" for rank 1, which {IS_LATE}."),
    (WAITING, [WAITING], r". All ranks are there, and none goes on: "),
    (WAITING, [WAITING, LATE], f" for rank 2, which {IS_LATE}."),
    (WAITING, [LATE, LATE._replace(still=14.0, number=7), WAITING], f" for ranks 1, 2, each of which {IS_LATE}."),
    (WAITING, [None], " for rank 1, which has given no sign of life since training was set up."),
    (WAITING, [LATE._replace(line=str(n)) for n in range(6)], " at 3; 2 more, which are elsewhere."),
    # Another call of the same kind: by how many were launched.
    (WAITING, [WAITING._replace(counts={"default": 4})], " for rank 1, which is in `backward` (step 8) at train.py:3."),
    # Where the stack shows no wait, it is one if others have launched less.
    (UNSEEN, [LATE], f" for rank 1, which {IS_LATE}."),
    (UNSEEN, [LATE._replace(counts={"default": 5})], ""),
    (UNSEEN, [UNSEEN, LATE._replace(counts={"default": 6})], ""),
    (UNSEEN, None, ". Where the others are is not known: the store does not answer, which rank 0's process "),
]
"""Where rank 0 is, where the others are, and what it says of them."""


def lines_of_waits() -> list[str]:
    watch = Watch(Liveness("lines"), "ddp_tuned", 15.0)
    found = []
    for where, others, _ in LINES:
        now = None if others is None else [one and one._replace(at=time.time()) for one in (where, *others)]
        found.append(watch._line_of_wait(where, None, now))
    return found


def test_the_line_names_who_is_not_there(pool: RankPool) -> None:
    for line, (_, _, expected) in zip(pool.run(2, lines_of_waits)[0], LINES, strict=True):
        begin = "ddp_tuned: rank 0 has waited 15 s in `backward` (step 8) at train.py:3" if expected else ""
        assert line.startswith(begin) and expected in line and bool(line) == bool(expected), (line, expected)


def silences() -> list[float]:
    watch, now = Watch(Liveness("silences"), "ddp_tuned", 15.0), time.time()
    young, old = LATE._replace(at=now - 12), LATE._replace(at=now - 42)
    ended = old._replace(ended="ended its training")
    before = old._replace(number=8)
    pairs = [(young, None), (old, None), (ended, None), (None, None), (old, before), (young, young), (old, old)]
    return [round(watch._silence(sign, known)) for sign, known in pairs]


def test_a_rank_whose_signs_do_not_go_on_is_silent(pool: RankPool) -> None:
    # Where an earlier sign is known, its number counts, as clocks of nodes may differ.
    assert pool.run(2, silences)[0] == [0, 42, 0, 0, 0, 12, 42]


COMM, ZERO1 = Path(watch_module.__file__).parent, Path(zero1.__file__).parent
TORCH = Path(torch.__file__).parent
SHARDS, FUNCTIONAL = TORCH / "distributed/tensor", TORCH / "distributed/_functional_collectives.py"
USER = "/home/me/train.py"
STACKS: list[tuple[list[str | Path], bool, str]] = [
    ([USER], False, "train.py:1"),
    ([USER, TORCH / "distributed/distributed_c10d.py"], True, "train.py:1"),
    ([USER, ZERO1 / "reducer.py", COMM / "work.py", threading.__file__], True, "train.py:1"),
    ([USER, COMM / "agreement.py", COMM / "doubling.py"], True, "train.py:1"),
    ([ZERO1 / "reducer.py", COMM / "work.py"], True, "work.py:2"),
    ([USER, SHARDS / "_api.py", FUNCTIONAL, TORCH / "_ops.py", TORCH / "_library/autograd.py"], True, "train.py:1"),
    # An operator on this rank's shards.
    ([USER, SHARDS / "_dispatch.py", TORCH / "_ops.py"], False, "train.py:1"),
    # At work, though called by something that waits at times; and the watch itself.
    ([COMM / "watch.py", ZERO1 / "state_dict.py"], False, "state_dict.py:2"),
    ([TORCH / "distributed/distributed_c10d.py", USER], False, "train.py:2"),
    ([USER, COMM / "watch.py"], False, "train.py:1"),
]
"""Files of a stack, whether it waits in a collective, and the line that is shown."""


def test_a_stack_shows_whether_it_waits_and_the_users_line() -> None:
    for files, waits, line in STACKS:
        frames = [(str(file), number) for number, file in enumerate(files, 1)]
        assert (watch_module._waits(frames), watch_module._line_of(frames)) == (waits, line), files


def test_a_stack_is_that_of_the_thread() -> None:
    came, go = threading.Event(), threading.Event()

    def deeper(calls: int) -> None:
        if calls:
            deeper(calls - 1)
        else:
            came.set()
            go.wait(30)

    thread = threading.Thread(target=deeper, args=(300,))
    thread.start()
    assert came.wait(30) and thread.ident is not None
    frames = watch_module._frames_of_thread(thread.ident)
    assert frames[-1][0] == threading.__file__ and [file for file, _ in frames].count(__file__) == 301
    assert watch_module._line_of(frames).startswith("test_watch.py:")
    go.set()
    thread.join()
    assert watch_module._frames_of_thread(thread.ident) == []


LOOKS_WHILE_GARBAGE_IS_COLLECTED = """
import itertools, sys, threading, time
from lightning_parstrat.distributed.comm.watch import _frames_of_thread as stack_of_thread

class InCycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        # Long enough for the interpreter to let the other thread go on.
        for _ in range(50):
            pass

# Frames of several sizes: one that has ended is followed by another in the same memory, but not in the same place.
def call_on(depth, *values):
    InCycle()
    return callees[next(turn) % len(callees)](depth - 1) if depth else 0

def small(depth):
    return call_on(depth)

def middle(depth, a=1, b=2):
    return call_on(depth, 1, 2, 3)

def large(depth, a=1, b=2, c=3, d=4, e=5, f=6, g=7):
    h, i, j = a, b, c
    return call_on(depth)

def look(thread):
    while not ended.is_set():
        stack_of_thread(thread)

callees, turn, ended = (small, large, middle, large, middle, small, small), itertools.count(), threading.Event()
sys.setswitchinterval(1e-5)
looks = threading.Thread(target=look, args=(threading.get_ident(),))
looks.start()
until = time.monotonic() + 5
while time.monotonic() < until and looks.is_alive():
    call_on(next(turn) % 5)
print("looked on" if looks.is_alive() else "ended early")
ended.set()
"""


@pytest.mark.slow
def test_looks_from_another_thread_change_nothing_in_the_one_looked_at() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOOKS_WHILE_GARBAGE_IS_COLLECTED], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "looked on\n", "")


LOOKS_WHILE_THREADS_ENTER_PYTHON = """
import ctypes, threading, time
from lightning_parstrat.distributed.comm.watch import _frames_of_thread as stack_of_thread

system = ctypes.CDLL(None)
system.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def have_threads_enter():
    while True:
        # As torch's do, each of which makes itself known to Python without Python's lock.
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            assert system.pthread_create(ctypes.byref(thread), None, enter, None) == 0
        for thread in threads:
            system.pthread_join(thread, None)

for _ in range(3):
    threading.Thread(target=have_threads_enter, daemon=True).start()
until = time.monotonic() + 5
while time.monotonic() < until:
    assert stack_of_thread(threading.get_ident())
print("looked on", flush=True)
"""


@pytest.mark.slow
def test_looks_while_torchs_threads_enter_python_harm_nobody() -> None:
    # Ended by the program that looks: threads that enter Python while it ends would.
    program = LOOKS_WHILE_THREADS_ENTER_PYTHON + "import os; os._exit(0)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "looked on\n", "")


LOSES_THE_STORE = """
import os, signal, subprocess, sys, time
import torch.distributed as dist
from lightning_parstrat.distributed.comm.liveness import Liveness
from lightning_parstrat.distributed.comm.watch import begin_watch, end_watch

class Interpreter:
    def __del__(self):
        # Whatever is alive at the end is freed while the interpreter is torn down.
        print("is torn down", flush=True)
        time.sleep(6)

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
begin_watch(Liveness("training"), "zero1_custom", 1.5)
dist.barrier()
if rank == 0:
    # It serves the store: which does not answer, and is lost while rank 1 ends.
    subprocess.Popen(["sh", "-c", f"sleep 8; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(2)
end_watch("ended its training")
interpreter = Interpreter()
print("has ended its training", flush=True)
"""


@pytest.mark.slow
def test_a_store_that_is_lost_while_the_interpreter_is_torn_down_does_not_abort_the_process(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOSES_THE_STORE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": clean_environment()}
    ranks = [subprocess.Popen([sys.executable, str(path), str(rank), port], **pipes) for rank in range(2)]
    try:
        output = ranks[1].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == 0, output
    assert "has ended its training\n" in output and output.endswith("is torn down\n"), output
