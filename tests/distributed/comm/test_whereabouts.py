"""What the stack of a thread shows, and that a look at it from another thread changes nothing."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed import zero1
from lightning_parstrat.distributed.comm import watch
from lightning_parstrat.distributed.comm.whereabouts import (
    Place,
    collective_of,
    shown,
    stack_of_error,
    stack_of_thread,
)

COMM, ZERO1 = Path(watch.__file__).parent, Path(zero1.__file__).parent
C10D = dist.distributed_c10d.__file__
TORCH = Path(torch.__file__).parent
SHARDS, FUNCTIONAL = TORCH / "distributed/tensor", TORCH / "distributed/_functional_collectives.py"


def frames(*places: tuple[Path | str, str]) -> list[Place]:
    return [Place(str(file), function, 7) for file, function in places]


USER = ("/home/me/train.py", "training_step")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([USER], ""),
        (
            [USER, (C10D, "wrapper"), (C10D, "all_gather_object"), (C10D, "wrapper"), (C10D, "all_gather")],
            "`all_gather_object`",
        ),
        ([USER, (ZERO1 / "reducer.py", "finish"), (COMM / "work.py", "wait")], "the exchange of gradients"),
        (
            [
                USER,
                (ZERO1 / "reducer.py", "finish"),
                (COMM / "control_messages.py", "wait"),
                (COMM / "work.py", "wait"),
            ],
            "the control message",
        ),
        (
            [
                (ZERO1 / "replanning.py", "plan"),
                (COMM / "agreement.py", "all_gather_object"),
                (C10D, "all_gather_object"),
            ],
            "`all_gather_object` for the planning of buckets",
        ),
        ([USER, (COMM / "agreement.py", "any_rank"), (COMM / "work.py", "wait")], "an agreement"),
        (
            [USER, (COMM / "agreement.py", "wait_for_all"), (COMM / "rounds_exchange.py", "wait")],
            "a meeting of all ranks",
        ),
        (
            [
                USER,
                (SHARDS / "_api.py", "full_tensor"),
                (TORCH / "autograd/function.py", "apply"),
                (SHARDS / "_redistribute.py", "forward"),
                (FUNCTIONAL, "wait_tensor"),
                (TORCH / "_ops.py", "__call__"),
                (TORCH / "_library/autograd.py", "forward_no_grad"),
                (TORCH / "_ops.py", "redispatch"),
            ],
            "`full_tensor`",
        ),
        # An operator on this rank's shards.
        ([USER, (SHARDS / "_dispatch.py", "dispatch"), (TORCH / "_ops.py", "__call__")], ""),
        # At work, though called by something that waits at times.
        ([(COMM / "watch.py", "within"), (ZERO1 / "state_dict.py", "cut")], ""),
        ([(C10D, "all_reduce"), USER], ""),
        ([USER, (COMM / "watch.py", "begin")], ""),
    ],
)
def test_a_stack_shows_which_collective_is_waited_in(stack: list[tuple[Path | str, str]], expected: str) -> None:
    assert collective_of(frames(*stack)) == expected


@contextmanager
def thread_in(call: Callable[[Callable[[], object]], object]) -> Iterator[int]:
    """Another thread, within ``call``; ended when it is left."""
    came, go = threading.Event(), threading.Event()

    def wait_here() -> None:
        came.set()
        go.wait(30)

    thread = threading.Thread(target=call, args=(wait_here,))
    thread.start()
    assert came.wait(30) and thread.ident is not None
    try:
        yield thread.ident
    finally:
        go.set()
        thread.join()


def test_a_stack_is_that_of_the_thread() -> None:
    with thread_in(lambda wait: wait()) as thread:
        stack = stack_of_thread(thread)
        assert re.search(r"`wait_here` \(test_whereabouts\.py, line \d+\)", shown(stack)), stack
        assert stack[0].function == "_bootstrap" and stack[-1].file == threading.__file__
        own = stack_of_thread(threading.get_ident())
        assert "test_a_stack_is_that_of_the_thread" in [place.function for place in own]
        assert "wait_here" not in [place.function for place in own]
    assert stack_of_thread(thread) == []


def test_of_a_deep_stack_the_innermost_calls_are_known() -> None:
    def deeper(calls: int, wait: Callable[[], object]) -> None:
        deeper(calls - 1, wait) if calls else wait()

    with thread_in(lambda wait: deeper(300, wait)) as thread:
        functions = [place.function for place in stack_of_thread(thread)]
    assert "wait_here" in functions
    assert len(functions) == 100 and functions[0] == "deeper"


@pytest.mark.parametrize("folder", ["mit Maß", "速い", "🙂", r"x64", "line 3 in f", 'a "name"'])
def test_a_file_may_have_any_name(folder: str, tmp_path: Path) -> None:
    file = tmp_path / folder / "train.py"
    file.parent.mkdir()
    file.write_text("def größe(wait):\n    wait()\n")
    defined: dict[str, Callable[[Callable[[], object]], object]] = {}
    exec(compile(file.read_text(), str(file), "exec"), defined)
    with thread_in(defined["größe"]) as thread:
        assert Place(str(file), "größe", 2) in stack_of_thread(thread)


LOOKS_WHILE_GARBAGE_IS_COLLECTED = """
import itertools, sys, threading, time
from lightning_parstrat.distributed.comm.whereabouts import stack_of_thread

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
from lightning_parstrat.distributed.comm.whereabouts import stack_of_thread

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


def test_the_stack_of_an_error_is_where_it_was_raised() -> None:
    assert raised_by(lambda: 1 // 0)[-1].function == "<lambda>"


def raised_by(action: Callable[[], object]) -> list[Place]:
    try:
        action()
    except ZeroDivisionError as error:
        return stack_of_error(error)
    raise AssertionError("nothing was raised")
