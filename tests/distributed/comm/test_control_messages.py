"""Control messages: what all ranks hear is what they have said together, whatever their number."""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages, Said, WeightSum
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.torch_compat import default_store
from tests.pool import RankPool

ROUNDS = 5
WAYS = [(flags, late) for flags in (0, 1, 8, 300) for late in (False, True)]
"""How many flags a message has, and whether many are on their way at once."""


def control_messages() -> ControlMessages:
    return ControlMessages(make_collectives(process_groups().control, torch.device("cpu")))


def flags_of(rank: int, number: int, flags: int) -> bytes:
    return bytes((place + number) % 7 == rank for place in range(flags))


def exchanged() -> list[list[Said]]:
    return [heard_of(flags, late) for flags, late in WAYS]


def heard_of(flags: int, late: bool) -> list[Said]:
    messages, rank, heard = control_messages(), dist.get_rank(), []
    for number in range(ROUNDS):
        messages.signal = 1 << rank % 8 if number % 2 else 0
        messages.weigh = lambda number=number: WeightSum(0.1 * (rank + 1) + number, rank, number == rank)
        message = messages.launch(flags_of(rank, number, flags), 5 if number < 3 else 5 + (rank == 1))
        if not late:
            heard.append(message.wait())
            assert messages.latest() is heard[-1] and message.wait() is heard[-1]
        else:
            heard.append(message)
    assert (messages.launched, messages.control.traffic.small_reductions) == (
        ROUNDS,
        ROUNDS * (dist.get_world_size() > 1),
    )
    return [message.wait() for message in heard] if late else heard


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_all_ranks_hear_what_they_have_said_together(pool: RankPool, world_size: int) -> None:
    by_rank = pool.run(world_size, exchanged)
    # To the bit: what hosts decide by it must be the same everywhere.
    assert all(heard == by_rank[0] for heard in by_rank)
    ranks = range(world_size)
    for (flags, _), heard_in_order in zip(WAYS, by_rank[0], strict=True):
        for number, heard in enumerate(heard_in_order):
            said = [flags_of(rank, number, flags) for rank in ranks]
            assert heard.flags == bytes(max(column) for column in zip(*said, strict=True))
            assert heard.is_alike is (number < 3 or world_size == 1)
            assert heard.signal == (sum(1 << rank for rank in ranks) if number % 2 else 0)
            weight = sum(0.1 * (rank + 1) + number for rank in ranks)
            assert heard.weights == (pytest.approx(weight, rel=1e-15), sum(ranks), number in ranks)


def goes_on_meanwhile() -> bool:
    """Whether the message is seen through while nobody waits for it; rank 0 launches when all others have."""
    messages, rank, store = control_messages(), dist.get_rank(), default_store()
    launched = [f"goes on meanwhile/{other}" for other in range(1, dist.get_world_size())]
    if rank == 0:
        store.wait(launched, timedelta(seconds=60))
    message = messages.launch()
    if rank > 0:
        store.set(launched[rank - 1], "launched")
    deadline = time.monotonic() + 20
    while not message.has_arrived and messages._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = message.has_arrived or messages._thread is None
    message.wait()
    return arrived


@pytest.mark.parametrize("world_size", [2, 5, 6])
def test_the_host_goes_on_and_a_thread_sees_rounds_through(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, goes_on_meanwhile) == [True] * world_size


def left_and_begun_anew() -> list[Any]:
    """Rank 0 has said something that nobody else has when a training fails; the next one is not mixed up with it."""
    failed, rank = control_messages(), dist.get_rank()
    if rank == 0:
        failed.signal = 4
        failed.launch(b"\1\1")
    failed.close()
    messages = control_messages()
    messages.signal = 1
    heard = messages.launch(bytes([rank == 1, 0])).wait()
    return [heard.flags, heard.signal]


def test_what_a_failed_training_has_left_is_not_taken_for_a_message_of_the_next(pool: RankPool) -> None:
    assert pool.run(3, left_and_begun_anew) == [[b"\1\0", 1]] * 3


def kept_of_a_failed_training() -> bool:
    """Whether what it has left on its way keeps the process group from going when torch lets go of it."""
    group = dist.new_group(backend="gloo")
    messages = ControlMessages(make_collectives(group, torch.device("cpu")))
    if dist.get_rank() == 0:
        messages.launch()
    messages.close()
    dist.barrier()
    dist.destroy_process_group(group)
    known = weakref.ref(group)
    del messages, group
    gc.collect()
    return known() is not None


def test_what_a_failed_training_has_left_does_not_keep_the_process_group(pool: RankPool) -> None:
    assert pool.run(2, kept_of_a_failed_training) == [False, False]
