"""Agreement between ranks for which the host waits: values of any kind, flags and extremes."""

import socket
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm.collectives import Collectives, Tag
from lightning_parstrat.distributed.comm.work import Exchange, marked

T = TypeVar("T")


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """The value of the group's first rank, on all of them. Collective. It is pickled, and works on host memory."""
    holder = [value]
    dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Each rank's value, on all ranks. Collective. Values are pickled, in host memory."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Each rank's value on rank 0, nothing elsewhere. Collective. Values are in host memory.

    Values are pickled, but not those of a single rank. Rank 0 receives one after the other, in two messages each.
    """
    if dist.get_rank(group) > 0:
        dist.send_object_list([value], group=group, group_dst=0)
        return []
    values = [value]
    for source in range(1, dist.get_world_size(group)):
        received: list[Any] = [None]
        dist.recv_object_list(received, group=group, group_src=source)
        values += received
    return values


def extremes_over_ranks(number: int, control: Collectives) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers. Collective: one all-reduce of 16 bytes."""
    # The smallest is minus the largest negative: one all-reduce by MAX gives both.
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    with marked("lightning_parstrat: agree between ranks"):
        control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    largest, smallest = extremes.tolist()
    return largest, -smallest


def all_have_same(number: int, control: Collectives) -> bool:
    """Whether all ranks have the same number. Collective: one all-reduce of 16 bytes."""
    largest, smallest = extremes_over_ranks(number, control)
    return largest == smallest


def check_agreement(control: Collectives, number: int) -> None:
    """Compares a number over all ranks. Collective: one all-reduce of 16 bytes.

    Raises:
        ValueError: The ranks have different numbers, that is, different parameters or plans.
    """
    if not all_have_same(number, control):
        raise ValueError(
            "The ranks do not have the same parameters in the same order, so they cannot share their optimizer state."
            " Build the same module and the same optimizers on every rank (check code that depends on the rank)."
        )


def topology_of_ranks(node: Hashable, control: Collectives) -> Topology:
    """Which ranks share a node. Collective: one all-reduce of 8 bytes a rank.

    Args:
        node: This rank's node, such as its number. Two ranks share a node if their hosts have one name, too: containers
            may have the same name on different nodes, or different names on one node.
        control: Works on host memory.
    """
    keys = torch.zeros(control.world_size, dtype=torch.int64)
    # Each rank fills its own element of zeros, so that a sum collects all of them.
    keys[control.rank] = digest((socket.gethostname(), node))
    control.all_reduce(keys).wait()
    return Topology.of(keys.tolist())


def wait_for_all(control: Collectives) -> None:
    """Returns when all ranks have called it. Collective: some bytes, over existing connections.

    Raises:
        RuntimeError: Ranks did not arrive within the group's timeout, or have ended.
    """
    here = torch.zeros(1, dtype=torch.uint8)
    with marked("lightning_parstrat: wait for all ranks"):
        Exchange(control.doubling(here, lambda lower, _: lower, Tag.BARRIER)).wait()


def all_or_none(
    action: Callable[[], T],
    control: Collectives | None,
    error: Callable[[dict[int, str]], Exception],
    shows_own: bool = False,
) -> T:
    """Returns an action's result, if the action succeeds on all ranks. If it fails on one, all raise. Collective.

    If one rank raised alone, the others would wait for it in the next collective. If nothing fails, it costs one small
    reduction.

    Args:
        action: Called on each rank. It may be collective only if it succeeds on all ranks or on none.
        control: Collectives of the ranks. None is for one process alone, which raises its own error unchanged.
        error: Makes the error, given what has failed on which ranks.
        shows_own: Whether a rank whose action has failed raises its own error instead.
    """
    result, failure = _tried(action)
    failures: list[str | None] = []
    if control is not None and any_rank(failure is not None, control):
        failures = all_gather_object(None if failure is None else repr(failure), control.group)
    if failure is not None and (control is None or shows_own):
        raise failure
    if failures:
        raise error({rank: text for rank, text in enumerate(failures) if text is not None}) from failure
    return cast(T, result)


def _tried(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """An action's result, and None. Or None, and the error that it raised."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def from_first_rank(ask: Callable[[], T], group: dist.ProcessGroup, error: Callable[[str], Exception]) -> T:
    """Rank 0's result, on all ranks. If rank 0 fails, all raise. Collective.

    Args:
        ask: Called on rank 0 alone.
        group: The group of the ranks. It works on host memory.
        error: Makes the error, given what has failed on rank 0.
    """
    answer, failure = _tried(ask) if dist.get_rank(group) == 0 else (None, None)
    answer, text = broadcast_object((answer, None if failure is None else repr(failure)), group)
    if text is not None:
        raise error(text) from failure
    return cast(T, answer)


def any_rank(flag: bool, control: Collectives) -> bool:
    """Whether the flag is set on any rank. Collective. The host waits."""
    return any_rank_for_each([flag], control)[0]


def any_rank_for_each(flags: Sequence[bool], control: Collectives) -> list[bool]:
    """For each flag, whether it is set on any rank. Collective: 4 bytes per flag. The host waits."""
    combined = torch.tensor(flags, dtype=torch.int32)
    with marked("lightning_parstrat: agree between ranks"):
        control.all_reduce(combined, op=dist.ReduceOp.MAX).wait()
    return [bool(flag) for flag in combined.tolist()]
