"""Small tensors and control messages: hosts combine them, with the same bits on all ranks."""

import gc
import math
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives, doubling_steps, small_reductions_of
from lightning_parstrat.distributed.comm.control_messages import Content, ControlMessages, WeightSum
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.torch_compat import default_store
from tests.comparing import assert_same
from tests.pool import RankPool

ROUNDS = 5
WAYS = [(flags, waits_later) for flags in (0, 1, 8, 300) for waits_later in (False, True)]
"""Numbers of flags; and whether several messages are in flight at once."""
VALUES = [
    (dtype, shape) for dtype in (torch.int32, torch.int64, torch.float32, torch.float64) for shape in ((), (3,), (2, 5))
]


def test_every_rank_receives_from_each_rank_once_and_in_the_same_order() -> None:
    for size in (*range(1, 40), 47, 64, 96, 100, 1000, 1024):
        steps, known = [doubling_steps(rank, size) for rank in range(size)], [[rank] for rank in range(size)]
        left = [list(of_rank) for of_rank in steps]
        while any(left):
            # Two ranks exchange when both have come to that step. A rank sends what it knew before.
            received = {}
            for rank, of_rank in enumerate(left):
                if of_rank and of_rank[0][2]:
                    (peer, sends, _), *_ = of_rank
                    if left[peer] and left[peer][0] == (rank, True, sends):
                        lower, higher = known[min(rank, peer)], known[max(rank, peer)]
                        received[rank] = lower if rank > peer and not sends else [*lower, *higher]
            assert received, "ranks wait for each other in a circle"
            senders = {left[rank][0][0] for rank in received}
            for rank in received.keys() | senders:
                left[rank].pop(0)
            known = [received.get(rank, before) for rank, before in enumerate(known)]
        assert sorted(known[0]) == list(range(size)) and all(ranks == known[0] for ranks in known)
        # A rank sends at most log2(N) messages, and one more to a rank beyond the largest power of two.
        most = max(sum(sends for _, sends, _ in of_rank) for of_rank in steps)
        assert most == int(math.log2(size)) + (not math.log2(size).is_integer())


def control() -> Collectives:
    return make_collectives(process_groups().control, torch.device("cpu"))


def values_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(dtype)


def reduced() -> tuple[list[tuple[Tensor, Tensor]], list[float], tuple[int, int]]:
    """Sums and maxima; those with a NaN of one rank; and the counts of reductions, by collectives and by group."""
    collectives, rank, size = control(), dist.get_rank(), dist.get_world_size()
    before, in_flight = small_reductions_of(collectives.group), []
    for dtype, shape in VALUES:
        total, largest = values_of(rank, dtype, shape), values_of(rank, dtype, shape)
        in_flight.append((collectives.all_reduce(total), total))
        in_flight.append((collectives.all_reduce(largest, op=dist.ReduceOp.MAX), largest))
    for culprit in range(size):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            value = torch.tensor(math.nan if rank == culprit else float(rank))
            in_flight.append((collectives.all_reduce(value, op=op), value))
    # Two ranks have nothing to send on, so one may wait in any order.
    for work, _ in in_flight[::-1] if rank == 0 and size == 2 else in_flight:
        work.wait()
        work.wait()
        assert work.is_completed()
    found = [value for _, value in in_flight]
    numbers, of_nan = found[: 2 * len(VALUES)], found[2 * len(VALUES) :]
    counted = small_reductions_of(collectives.group) - before
    return list(zip(numbers[::2], numbers[1::2], strict=True)), [float(one) for one in of_nan], counted


def flags_of(rank: int, number: int, flags: int) -> bytes:
    return bytes((index + number) % 7 == rank for index in range(flags))


def exchanged(flags: int, waits_later: bool) -> list[Content]:
    messages, rank = ControlMessages(control()), dist.get_rank()
    before = small_reductions_of(messages.control.group)
    launched: list[Any] = []
    for number in range(ROUNDS):
        messages.signal = 1 << rank % 8 if number % 2 else 0
        messages.weigh = lambda number=number: WeightSum(0.1 * (rank + 1) + number, rank, number == rank)
        message = messages.launch(flags_of(rank, number, flags), 5 if number < 3 else 5 + (rank == 1))
        launched.append(message)
        if not waits_later:
            assert messages.latest() is message.wait() is message.wait()
    several = dist.get_world_size() > 1
    assert messages.launched == ROUNDS
    assert small_reductions_of(messages.control.group) - before == ROUNDS * several
    return [message.wait() for message in launched]


def combined() -> tuple[Any, list[list[Content]]]:
    return reduced(), [exchanged(*way) for way in WAYS]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_what_ranks_combine_is_the_same_on_all(pool: RankPool, world_size: int) -> None:
    by_rank, ranks = pool.run(world_size, combined), range(world_size)
    reductions = 2 * (len(VALUES) + world_size) if world_size > 1 else 0
    for (numbers, of_nan, counted), messages in by_rank:
        for (dtype, shape), (total, largest) in zip(VALUES, numbers, strict=True):
            stacked = torch.stack([values_of(rank, dtype, shape) for rank in ranks])
            torch.testing.assert_close(total, stacked.sum(0, dtype=dtype), rtol=1e-6, atol=1e-3)
            assert torch.equal(largest, stacked.amax(0))
        assert len(of_nan) == 2 * world_size and all(map(math.isnan, of_nan))
        assert counted == reductions
        # To the bit: what hosts decide by it must be the same everywhere.
        assert_same(numbers, by_rank[0][0][0])
        assert messages == by_rank[0][1]
    for (flags, _), in_order in zip(WAYS, by_rank[0][1], strict=True):
        for number, message in enumerate(in_order):
            own = [flags_of(rank, number, flags) for rank in ranks]
            assert message.flags == bytes(max(column) for column in zip(*own, strict=True))
            assert message.is_alike is (number < 3 or world_size == 1)
            assert message.signal == (sum(1 << rank for rank in ranks) if number % 2 else 0)
            weight = sum(0.1 * (rank + 1) + number for rank in ranks)
            assert message.weights == (pytest.approx(weight, rel=1e-15), sum(ranks), number in ranks)


def arrives_by_itself() -> bool:
    """Whether a message arrives though no rank waits for it; rank 0 launches after all others."""
    messages, rank, store = ControlMessages(control()), dist.get_rank(), default_store()
    launched = [f"arrives by itself/{other}" for other in range(1, dist.get_world_size())]
    if rank == 0:
        store.wait(launched, timedelta(seconds=60))
    message = messages.launch()
    if rank > 0:
        store.set(launched[rank - 1], "launched")
    deadline = time.monotonic() + 20
    while not message.is_completed() and messages._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = message.is_completed() or messages._thread is None
    message.wait()
    return arrived


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_message_arrives_while_the_host_computes(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, arrives_by_itself) == [True] * world_size


def after_a_failed_training() -> tuple[list[Any], bool]:
    """The first message after a training in which rank 0 alone has sent one; and whether that one keeps its group."""
    rank = dist.get_rank()
    failed = ControlMessages(control())
    if rank == 0:
        failed.signal = 4
        failed.launch(b"\1\1")
    failed.close()
    messages = ControlMessages(control())
    messages.signal = 1
    combined = messages.launch(bytes([rank == 1, 0])).wait()
    group = dist.new_group(backend="gloo")
    failed = ControlMessages(make_collectives(group, torch.device("cpu")))
    if rank == 0:
        failed.launch()
    failed.close()
    dist.barrier()
    dist.destroy_process_group(group)
    known = weakref.ref(group)
    del failed, group
    gc.collect()
    return [combined.flags, combined.signal], known() is not None


def test_a_message_of_a_failed_training_reaches_no_other_and_keeps_no_group(pool: RankPool) -> None:
    assert pool.run(3, after_a_failed_training) == [([b"\1\0", 1], False)] * 3
