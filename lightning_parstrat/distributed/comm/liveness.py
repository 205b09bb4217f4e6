"""Finds out which ranks are missing, when something went wrong that needed all of them."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.distributed.torch_compat import default_store

GRACE = timedelta(seconds=10)
"""How long ranks wait for each other: they notice a fault at different times, but soon."""


class MissingRanksError(RuntimeError):
    """Ranks did not take part in what all must take part in."""


class Liveness:
    """Which ranks are alive: they write to the store of the process group, which works when collectives do not.

    Args:
        name: The same on all ranks, and another one for each training: what ranks did alone is forgotten with it.
    """

    def __init__(self, name: str) -> None:
        self._store = PrefixStore(f"lightning_parstrat/liveness/{name}", default_store())
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._held: dict[str, int] = defaultdict(int)

    def missing(self, occasion: str, grace: timedelta | None = None) -> list[int]:
        """The ranks that do not call this within ``grace``.

        Each rank asks the store four times; those that wait in vain ask once more for each rank.

        Args:
            occasion: What for; ranks meet that call for the n-th time for the same occasion.
            grace: How long to wait for the others; by default :data:`GRACE`.
        """
        self._held[occasion] += 1
        call = f"{occasion}/{self._held[occasion]}"
        try:
            self._store.set(f"{call}/{self._rank}", "here")
            if self._store.add(f"{call}/count", 1) == self._world_size:
                self._store.set(f"{call}/all", "here")
            if self._store.check([f"{call}/over"]):
                # Who came in time waits no more.
                return [rank for rank in range(self._world_size) if rank != self._rank]
            # Stores of different kinds say in different ways that they have waited in vain.
            with suppress(RuntimeError):
                self._store.wait([f"{call}/all"], GRACE if grace is None else grace)
                return []
            self._store.set(f"{call}/over", "over")
            return [rank for rank in range(self._world_size) if not self._store.check([f"{call}/{rank}"])]
        except RuntimeError:
            # The store is where rank 0 is, and has gone with it.
            return [] if self._rank == 0 else [0]


_OF_A_COLLECTIVE = re.compile(
    r"connection (closed|reset|refused)|timed out|timeout|broken pipe|gloo|nccl|barrier", re.I
)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error may come of ranks that did not take part in a collective; Gloo's have no class of theirs."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _OF_A_COLLECTIVE.search(str(error)) is not None


def names_of(ranks: list[int]) -> str:
    """Ranks for a message: ``rank 3``, ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@contextmanager
def missing_ranks_named(liveness: Liveness, what: str) -> Iterator[None]:
    """Within it, an error of a collective that came of missing ranks says which.

    All ranks that are there must be within it, for the same thing; after an error they wait for each other for up to
    :data:`GRACE`.

    Args:
        liveness: Finds out who is missing.
        what: What is being done, for the message.

    Raises:
        MissingRanksError: In the place of a ``RuntimeError``, where ranks are missing.
    """
    try:
        yield
    except RuntimeError as error:
        missing = liveness.missing("fault") if is_of_a_collective(error) else []
        if not missing:
            raise
        raise MissingRanksError(f"{what}: {names_of(missing)} did not take part. {REMEDY}") from error


REMEDY = "Their output says why they ended or where they are stuck; what was saved before is there and whole."


def wait_for_all(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Returns when all ranks have come to this point. Collective; 2 messages per rank, all of them through rank 0.

    Args:
        group: Of Gloo.
        timeout: How long to wait; None for the group's own.

    Raises:
        RuntimeError: Not all have come in time, or one is dead; rank 0's says which.
    """
    dist.monitored_barrier(group, timeout, wait_all_ranks=True)
