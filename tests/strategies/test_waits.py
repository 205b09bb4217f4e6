"""A rank that waits long says for whom, and where that rank is; it says nothing while all move."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from lightning_parstrat.distributed import comm
from lightning_parstrat.strategies.launch import waits
from lightning_parstrat.strategies.launch.waits import Sign, line_of_wait
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.parity import make_trainer
from tests.strategies.test_report import Listener
from tests.undisturbed import undisturbed

SOON = 0.6
STRATEGIES: dict[str, Any] = {
    "zero1_custom": ZeRO1Strategy,
    "ddp_tuned": TunedDDPStrategy,
    "zero3_custom": ZeRO3Strategy,
}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]


class Late(BoringModel):
    """Rank 1 comes late to one place, namely when rank 0 has said that it waits."""

    def __init__(self, where: str, lines: Listener) -> None:
        super().__init__()
        self.where, self.lines, self.threads = where, lines, [""]

    def comes_late(self, where: str) -> bool:
        if where != self.where or self.global_step != 2:
            return False
        store, before, deadline = dist.distributed_c10d._get_default_store(), len(self.lines.lines), time.time() + 30
        key = f"heard/{self.trainer.default_root_dir}"

        def tells() -> None:
            if until(lambda: len(self.lines.lines) > before):
                client.set(key, "heard")

        def until(done: Callable[[], bool]) -> bool:
            while not done() and time.time() < deadline:
                time.sleep(0.02)
            return done()

        if dist.get_rank() == 0:
            client = store.clone()
            threading.Thread(target=tells, daemon=True).start()
        else:
            until(lambda: store.check([key]))
        return True

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.threads = threads()
        if self.where == "moves":
            time.sleep(SOON / 3)
        self.comes_late("sleeps")
        if self.where == "is stopped" and self.global_step == 2 and self.global_rank == 1:
            # By another process, as this one does nothing then.
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.comes_late("logs"):
            self.log("logged", torch.tensor(1.0), sync_dist=True)
        if self.comes_late("own collective"):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        if self.comes_late("saves"):
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/late.ckpt")
        if self.comes_late("states"):
            self.optimizers().optimizer.state_dict()
        if self.comes_late("shows"):
            with self.trainer.strategy.full_parameters():
                assert self.layer.weight.shape == (2, 32)
        if self.comes_late("looks"):
            assert self.layer.weight.full_tensor().shape == (2, 32)


class Batches(IterableDataset[torch.Tensor]):
    def __init__(self, model: Late) -> None:
        self.model = model

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(100):
            self.model.comes_late("loads")
            yield torch.ones(32)


def fit(strategy: str, where: str, folder: str, after: float | None = SOON) -> tuple[list[str], list[str], list[str]]:
    """What this rank says in four steps, the threads there are in the last, and those that are left."""
    lines = Listener()
    model = Late(where, lines)
    waits.log.addHandler(lines)
    try:
        chosen = STRATEGIES[strategy](stall_warning_seconds=after)
        trainer = make_trainer(chosen, max_steps=4, limit_val_batches=0, default_root_dir=folder)
        trainer.fit(model, DataLoader(Batches(model), batch_size=1))
        assert trainer.global_step == 4
    finally:
        waits.log.removeHandler(lines)
    return lines.lines, model.threads, threads()


HERE = r"at test_waits\.py:\d+"
SLEEPS = rf"for rank 1, which is in `training_step` \(step 2, batch 2\) {HERE}\."
LATE = rf"for rank 1, which is in `on_train_batch_end` \(.*\) {HERE}\."
SAID = {
    ("zero1_custom", "sleeps"): rf"in `\w+` \(step 2, batch 2\) at \S+ {SLEEPS}",
    ("ddp_tuned", "sleeps"): rf"in `backward` \(step 2, batch 2\) at \S+ {SLEEPS}",
    ("ddp_tuned", "is stopped"): r"in .* for rank 1, which has given no sign of life for \d+ s or more .*stopped",
    ("zero1_custom", "logs"): rf"in `training_step` \(step 2, batch 2\) {HERE} {SLEEPS}",
    ("ddp_tuned", "own collective"): rf"in `training_step` \(step 2, batch 2\) {HERE} {SLEEPS}",
    ("zero1_custom", "saves"): rf"in `trainer\.save_checkpoint\(\)` \(step 2, .*\) {HERE} {LATE} ",
    ("zero1_custom", "states"): rf"in `optimizer\.state_dict\(\)` \(step 2, .*\) {HERE} {LATE} Call it on all",
    ("zero3_custom", "shows"): rf"in `strategy\.full_parameters\(\)` \(step 2, .*\) {HERE} {LATE} Enter it on all",
    ("zero3_custom", "looks"): rf"in `on_train_batch_end` \(step 2, .*\) {HERE} {LATE}",
    ("zero1_custom", "loads"): r"in the agreement on the next training batch \(step \d, .*\) at \S+ for rank 1, which ",
}
"""By strategy and where rank 1 is late: what rank 0 says."""


@pytest.mark.parametrize(
    ("strategy", "where"), slow_unless(lambda _, where: where in ("sleeps", "loads", "shows"), SAID)
)
@undisturbed
def test_a_rank_that_waits_in_training_says_for_whom(pool: RankPool, tmp_path: Path, strategy: str, where: str) -> None:
    (said, _, left), (_, _, left_on_1) = pool.run(2, fit, strategy, where, str(tmp_path))
    assert left == left_on_1 == []
    # On a busy machine a rank may wait long elsewhere, too.
    assert any(re.match(rf"{strategy}: rank 0 has waited \d+ s {SAID[strategy, where]}", line) for line in said), said


@undisturbed
def test_nothing_is_said_while_all_move_and_no_thread_is_left(pool: RankPool, tmp_path: Path) -> None:
    for after, threads_of_waits in ((SOON, ["lightning_parstrat waits"]), (None, [])):
        for said, during, left in pool.run(2, fit, "zero1_custom", "moves", "", after):
            assert (said, during, left) == ([], threads_of_waits, [])
    assert pool.run(1, fit, "zero1_custom", "moves", "")[0][1] == []


WAITING = Sign(9, "", "step 8", "`backward`", {"default": 5}, True, "train.py:3", "Call it.", 15.0)
BEHIND = WAITING._replace(within="`training_step`", launched={"default": 4}, waits=False, line="train.py:9")
UNSEEN = WAITING._replace(waits=False)
IS_BEHIND = "is in `training_step` (step 8) at train.py:9"
NO_SIGN = "has given no sign of life"
LINES: list[tuple[list[Sign | None], str]] = [
    ([WAITING, BEHIND], f" for rank 1, which {IS_BEHIND}. Call it."),
    ([WAITING, WAITING], ". All ranks are there, and none continues: "),
    ([WAITING, WAITING, BEHIND], f" for rank 2, which {IS_BEHIND}. "),
    ([WAITING, BEHIND, BEHIND._replace(number=7), WAITING], f" for ranks 1, 2, each of which {IS_BEHIND}. "),
    ([BEHIND, WAITING, WAITING], f" for rank 0, which {IS_BEHIND}. "),
    ([WAITING._replace(still=14.0), BEHIND], ""),
    ([WAITING, None], f" for rank 1, which {NO_SIGN} since training was set up."),
    ([WAITING, WAITING._replace(silent=20.0)], f" for rank 1, which {NO_SIGN} for 20 s or more (ended,"),
    (
        [WAITING, BEHIND._replace(ended="ended its training by ValueError", silent=9.0)],
        " for rank 1, which ended its training by V",
    ),
    ([WAITING, *(BEHIND._replace(line=str(n)) for n in range(6))], " at 3; 2 more, which are elsewhere."),
    # Another call of the same kind: by how many were launched.
    (
        [WAITING, WAITING._replace(launched={"default": 4})],
        " for rank 1, which is in `backward` (step 8) at train.py:3.",
    ),
    # If the stack shows no wait, it is one if others have launched less.
    ([UNSEEN, BEHIND], f" for rank 1, which {IS_BEHIND}. "),
    ([UNSEEN, BEHIND._replace(launched={"default": 5})], ""),
]
"""Where the ranks are, and what rank 0 says of them."""


def test_the_line_names_who_is_not_there() -> None:
    for signs, expected in LINES:
        _, line = line_of_wait(signs, 15.0)
        waits = [rank for rank, sign in enumerate(signs) if sign in (WAITING, UNSEEN)]
        named = f"ranks {', '.join(map(str, waits))} have" if len(waits) > 1 else f"rank {waits[:1] and waits[0]} has"
        begin = f"{named} waited 15 s in `backward` (step 8) at train.py:3" if expected else ""
        assert line.startswith(begin) and expected in line and bool(line) == bool(expected), (line, expected)


TORCH, COMM, USER = Path(torch.__file__).parent, Path(comm.__file__).parent, Path("/home/me/train.py")
STACKS: list[tuple[list[Path], bool, str]] = [
    ([USER], False, "train.py:1"),
    ([USER, TORCH / "distributed/distributed_c10d.py"], True, "train.py:1"),
    ([USER, COMM.parent / "zero1/reducer.py", COMM / "work.py", Path(threading.__file__)], True, "train.py:1"),
    ([COMM.parent / "zero1/reducer.py", COMM / "work.py"], True, "work.py:2"),
    # An operator on this rank's shards, and a hook that a collective calls.
    ([USER, TORCH / "distributed/tensor/_dispatch.py", TORCH / "_ops.py"], False, "train.py:1"),
    ([TORCH / "distributed/distributed_c10d.py", USER], False, "train.py:2"),
]
"""Files of a stack, whether it waits in a collective, and the line that is shown."""


def test_a_stack_shows_whether_it_waits_and_the_users_line() -> None:
    for files, is_wait, line in STACKS:
        frames = [(str(file), number) for number, file in enumerate(files, 1)]
        assert (waits._waits(frames), waits._line_of(frames)) == (is_wait, line), files


LOOKS_WHILE_GARBAGE_IS_COLLECTED = """
import itertools, sys, threading, time
from lightning_parstrat.strategies.launch.waits import _frames_of_thread

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

def large(depth, a=1, b=2, c=3, d=4, e=5, f=6, g=7):
    h, i, j = a, b, c
    return call_on(depth, 1, 2, 3)

def look(thread):
    while not ended.is_set():
        _frames_of_thread(thread)

callees, turn, ended = (small, large, large, small, small), itertools.count(), threading.Event()
sys.setswitchinterval(1e-5)
looks = threading.Thread(target=look, args=(threading.get_ident(),))
looks.start()
until = time.monotonic() + 3
while time.monotonic() < until and looks.is_alive():
    call_on(next(turn) % 5)
print("looked on" if looks.is_alive() else "ended early")
ended.set()
"""


@pytest.mark.slow
def test_looks_from_another_thread_change_nothing_in_the_one_looked_at() -> None:
    program = [sys.executable, "-c", LOOKS_WHILE_GARBAGE_IS_COLLECTED]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "looked on\n", "")
