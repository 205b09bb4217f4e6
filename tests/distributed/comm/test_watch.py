"""Ranks that wait long say for whom, and where those are; calls that not all ranks make mix nothing up."""

import ctypes
import logging
import re
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

from lightning_parstrat.distributed.comm import heartbeats as heartbeats_module
from lightning_parstrat.distributed.comm import watch as watch_module
from lightning_parstrat.distributed.comm.agreement import all_gather_object, gather_object
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import Liveness, MissingRanksError
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.comm.watch import Watch, begin_watch, end_watch, met, watching
from lightning_parstrat.distributed.torch_compat import collectives_launched, default_store
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from tests.distributed.engines import adamw, backward, make_engine, perceptron, squared_error
from tests.pool import RankPool
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

    # By the name of who asks: on a busy machine the rank may well be found here.
    def stays_away() -> bool:
        return bool(store.check([name]))

    return stays_away


def idiom(name: str, late: list[int], seconds: float) -> tuple[Any, list[str], list[str]]:
    """Some ranks come to ``state_dict()`` only when another one has said that it waits."""
    module = perceptron()
    optimizer = adamw(module.parameters())
    engine = make_engine(module, optimizer)
    backward(engine, squared_error(module, dist.get_rank()))
    optimizer.step()
    heard = f"heard/{name}"

    def act(rank: int, lines: Lines) -> Any:
        if rank in late:
            began = time.monotonic()
            stays_away(has_key(heard))
            assert time.monotonic() - began < seconds
        else:
            threading.Thread(target=tells, args=(lines, heard), daemon=True).start()
        state = optimizer.state_dict()["state"]
        return {key: value["exp_avg"].sum().item() for key, value in state.items()}

    return watched(name, SOON, act)


def tells(lines: Lines, key: str) -> None:
    store = default_store().clone()
    stays_away(lambda: bool(lines.said))
    if lines.said:
        store.set(key, "heard")


@pytest.mark.parametrize(
    ("world_size", "late", "who"),
    [
        (2, [1], "rank 1"),
        (2, [0], "rank 0"),
        (3, [1], "rank 1"),
        (3, [1, 2], "ranks 1, 2"),
    ],
)
@undisturbed
def test_a_rank_that_waits_names_who_has_not_come_and_where_it_is(
    pool: RankPool, world_size: int, late: list[int], who: str, tmp_path: Path
) -> None:
    found = pool.run(world_size, idiom, str(tmp_path), late, 20.0)
    said = [line for _, lines, _ in found for line in lines]
    asker = next(rank for rank in range(world_size) if rank not in late)
    # One of those that wait asks for all.
    assert len(said) == 1, said
    assert said[0].startswith(f"zero1_custom, rank {asker}: has waited ") or world_size == 3
    assert ", in a meeting of all ranks, in `optimizer.state_dict()`, at " in said[0]
    assert re.search(rf"Not there: {who}: for \d s, at .*`stays_away` \(test_watch.py, line \d+\)\.", said[0]), said
    assert said[0].endswith("Call it on all ranks, and save what it returns on rank 0.")
    states = [state for state, _, _ in found]
    assert states[0] and all(state == states[0] for state in states) and all(v == v for v in states[0].values())
    assert [threads for _, _, threads in found] == [[]] * world_size


def shows_gradients(engine: ShardedDataParallel) -> None:
    with engine.full_gradients():
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.requires_grad]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def adds_a_group(engine: ShardedDataParallel) -> None:
    engine.optimizers[0].add_param_group({"params": [engine.module.added]})
    assert len(engine.buckets) == 6


CALLS = {"full_gradients()": shows_gradients, "optimizer.add_param_group()": adds_a_group}


def one_is_late(name: str, what: str) -> tuple[Any, list[str], list[str]]:
    module = perceptron()
    # Beside the optimizer until it is added.
    module.added = nn.Parameter(torch.ones(7), requires_grad=False)
    optimizer = adamw([parameter for parameter in module.parameters() if parameter.requires_grad])
    module.added.requires_grad_(what == "optimizer.add_param_group()")
    engine = make_engine(module, optimizer)
    backward(engine, squared_error(module, dist.get_rank()))
    heard = f"heard/{name}"

    def act(rank: int, lines: Lines) -> None:
        if rank == 0:
            threading.Thread(target=tells, args=(lines, heard), daemon=True).start()
        else:
            stays_away(has_key(heard))
        CALLS[what](engine)

    try:
        return watched(name, SOON, act)
    finally:
        engine.close()


@pytest.mark.parametrize("what", CALLS)
@undisturbed
def test_other_calls_of_the_engine_are_watched(pool: RankPool, what: str, tmp_path: Path) -> None:
    (_, said, threads), by_1 = pool.run(2, one_is_late, str(tmp_path), what)
    assert len(said) == 1 and f"in `{what}`, at " in said[0]
    assert re.search(r"rank 1: for \d s, at .*`stays_away`", said[0]), said
    assert by_1 == (None, [], []) and threads == []


def waits_for_collective(name: str, does_not_answer: bool) -> tuple[Any, list[str], list[str]]:
    """Rank 0 waits within Gloo; rank 1 is late, in C code that holds Python's lock or in another collective."""
    groups, heard = process_groups(), f"heard/{name}"

    def act(rank: int, lines: Lines) -> None:
        threading.Thread(target=tells, args=(lines, heard), daemon=True).start()
        if rank == 0:
            threading.Thread(target=reduces, args=(has_key(heard),), daemon=True).start()
        elif does_not_answer:
            stays_away(has_key(f"lightning_parstrat/heartbeats/{name}/beat/1"))
            # `PyDLL` keeps the lock.
            ctypes.PyDLL(None).usleep(2_500_000)
            stays_away(has_key(heard))
        else:
            dist.all_reduce(torch.ones(1), group=groups.gradients)
        with watching("`trainer.save_checkpoint()`"):
            dist.barrier(group=groups.control)

    def reduces(somebody_was_heard: Callable[[], bool]) -> None:
        stays_away(somebody_was_heard)
        if not does_not_answer:
            dist.all_reduce(torch.ones(1), group=groups.gradients)

    return watched(name, SOON, act)


AT = r" at .*`act` \(test_watch\.py, line \d+\) > "


@undisturbed
def test_where_the_host_waits_in_c_it_asks_and_answers(pool: RankPool, tmp_path: Path) -> None:
    (_, said, _), (_, said_by_1, _) = pool.run(2, waits_for_collective, str(tmp_path), False)
    # Both wait, each in a collective of its own: one of them speaks.
    (line,) = [*said, *said_by_1]
    other = "1: waiting in `all_reduce`" if said else "0: waiting in `barrier`"
    assert re.search(rf"Not there: rank {other}, .*for \d s,{AT}", line), line


@undisturbed
def test_a_rank_that_cannot_answer_is_shown_at_its_last_heartbeat(pool: RankPool, tmp_path: Path) -> None:
    (_, said, _), (_, said_by_1, _) = pool.run(2, waits_for_collective, str(tmp_path), True)
    where = r"Not there: rank 1: no sign of life for \d s \(ended, stopped, .*lock\), at its last heartbeat "
    assert said and re.search(where, said[0]), said
    assert said_by_1 == []


def stops_when_it_was_named(name: str) -> tuple[Any, list[str], list[str]]:
    """Rank 0 waits for rank 1, and goes on waiting when that one has stopped after the first line."""
    group, heard = process_groups().control, f"heard/{name}"

    def act(rank: int, lines: Lines) -> None:
        if rank == 0:
            threading.Thread(target=tells, args=(lines, heard), daemon=True).start()
        else:
            stays_away(has_key(heard))
            # Beyond the second line, after four times `SOON`; `PyDLL` keeps Python's lock.
            ctypes.PyDLL(None).usleep(3_000_000)
        dist.barrier(group=group)

    return watched(name, SOON, act)


@undisturbed
def test_a_rank_that_stops_after_the_first_line_is_told_from_one_that_is_late(pool: RankPool, tmp_path: Path) -> None:
    (_, said, _), (_, said_by_1, _) = pool.run(2, stops_when_it_was_named, str(tmp_path))
    assert len(said) == 2 and said_by_1 == [], said
    assert re.search(r"Not there: rank 1: for \d s, at .*`stays_away`", said[0]), said
    assert re.search(r"Not there: rank 1: no sign of life for \d s ", said[1]), said


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
    launched = Watch(Liveness(name), "zero1_custom")._beat("").where.launched
    return launched, collectives_launched(group)


def test_ranks_at_the_same_point_count_the_same_though_messages_between_two_are_not(pool: RankPool) -> None:
    found = pool.run(3, launched_after_a_save, "launched")
    assert len({by_gloo for _, by_gloo in found}) > 1
    launched = [launched for launched, _ in found]
    assert launched[0] == launched[1] == launched[2]
    assert launched[0]["default"] > 0 and launched[0]["control"] > 0


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
    assert error.startswith("Not all ranks have come to `optimizer.state_dict()`. zero1_custom, rank 0: has waited ")
    assert "Not there: rank 1: ended its training by ValueError. Call it on all ranks" in error


def saves_after_training(name: str) -> tuple[Any, list[str], list[str]]:
    module = perceptron()
    optimizer = adamw(module.parameters())
    make_engine(module, optimizer)
    heard = f"heard/{name}"

    def act(rank: int, lines: Lines) -> int:
        end_watch("ended its training", wait=True)
        if rank == 0:
            threading.Thread(target=tells, args=(lines, heard), daemon=True).start()
        else:
            stays_away(has_key(heard))
        return len(optimizer.state_dict()["param_groups"])

    return watched(name, SOON, act)


@undisturbed
def test_after_training_it_is_watched_as_long_as_somebody_waits(pool: RankPool, tmp_path: Path) -> None:
    (groups, said, threads), by_1 = pool.run(2, saves_after_training, str(tmp_path))
    assert groups == 1 and by_1 == (1, [], []) and threads == []
    assert len(said) == 1 and "Not there: rank 1: ended its training. Call it on all ranks" in said[0]


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
    heartbeats_module.PrefixStore = Counted  # type: ignore[misc]
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
        heartbeats_module.PrefixStore = PrefixStore  # type: ignore[misc]


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
