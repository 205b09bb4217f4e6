"""Agreement between ranks that the host waits for: values of any kind, flags and extremes."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.profiling import marked


def broadcast_object(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """The value of one of the group's ranks, on all of them. Collective; pickled; works on host memory."""
    holder = [value]
    dist.broadcast_object_list(holder, group=group, group_src=source)
    return holder[0]


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Each rank's value, on all ranks. Collective; pickled; works on host memory."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Each rank's value on rank 0, nothing elsewhere. Collective; pickled but where alone; works on host memory.

    Rank 0 receives one after the other, in two messages each.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        return [value, *(receive_object(other, group) for other in range(1, size))]
    send_object(value, 0, group)
    return []


def send_object(value: Any, destination: int, group: dist.ProcessGroup) -> None:
    """Sends a value to a rank of the group, which receives it: two messages; pickled; works on host memory."""
    dist.send_object_list([value], group=group, group_dst=destination)


def receive_object(source: int, group: dist.ProcessGroup) -> Any:
    """The value that a rank of the group sends to this one: see :func:`send_object`."""
    received: list[Any] = [None]
    dist.recv_object_list(received, group=group, group_src=source)
    return received[0]


def extremes_over_ranks(number: int, control: Collectives) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers. Collective; one all-reduce of 16 bytes."""
    # The smallest is minus the largest negative: one all-reduce by MAX gives both.
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    with marked("lightning_parstrat: agree between ranks"):
        control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    largest, smallest = extremes.tolist()
    return largest, -smallest


def check_agreement(control: Collectives, number: int) -> None:
    """Compares a number over all ranks. Collective; one all-reduce of 16 bytes.

    Raises:
        ValueError: The ranks have different numbers, that is, different parameters or plans.
    """
    largest, smallest = extremes_over_ranks(number, control)
    if largest != smallest:
        raise ValueError(
            "The ranks do not have the same parameters in the same order, so they cannot share their optimizer state."
            " Build the same module and the same optimizers on every rank (check code that depends on the rank)."
        )


def topology_of_ranks(node: str, control: Collectives) -> Topology:
    """Which ranks share a node. Collective; one all-reduce of 8 bytes per rank.

    Args:
        node: Name of this rank's node: the same on all of its ranks, different on other nodes.
        control: Works on host memory.
    """
    keys = torch.zeros(control.world_size, dtype=torch.int64)
    # Each rank fills its own place of zeros, so that a sum collects all of them. sha256, as `hash()` of a string
    # differs between processes; without its two highest bits it fits int64.
    keys[control.rank] = int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big") >> 2
    control.all_reduce(keys).wait()
    return Topology.of(keys.tolist())


def any_rank(flag: bool, control: Collectives) -> bool:
    """Whether the flag is set on any rank. Collective; the host waits."""
    return any_rank_for_each([flag], control)[0]


def any_rank_for_each(flags: Sequence[bool], control: Collectives) -> list[bool]:
    """For each flag, whether it is set on any rank. Collective; the host waits; 4 bytes per flag."""
    combined = torch.tensor(flags, dtype=torch.int32)
    with marked("lightning_parstrat: agree between ranks"):
        control.all_reduce(combined, op=dist.ReduceOp.MAX).wait()
    return [bool(flag) for flag in combined.tolist()]
