"""Ranks wait for each other in the store: before a collective that needs all, or to find missing ranks after one."""

import json
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import watching
from lightning_parstrat.distributed.torch_compat import default_store

GRACE = timedelta(seconds=10)
"""How long ranks wait for each other. They notice a fault at different times, within seconds."""


_LONGEST_PAUSE = 0.25


class NoCollectivesError(RuntimeError):
    """The launched collectives cannot complete: ranks are missing, or have launched different collectives."""


class MissingRanksError(NoCollectivesError):
    """Ranks did not take part in a collective."""


def store_under(prefix: str) -> Any:
    """The default process group's store, for keys of this package under a prefix."""
    return PrefixStore(f"lightning_parstrat/{prefix}", default_store())


class Liveness:
    """Which ranks are alive. They write to the process group's store, which works when collectives do not.

    Args:
        name: The same on all ranks and different for each training. Calls are counted, and after a fault the ranks'
            counts may differ.

    Attributes:
        found: The ranks that the first rank of the last call to decide found missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._store = store_under(f"liveness/{name}")
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._held: dict[str, int] = defaultdict(int)
        self.found: list[int] = []

    def missing(self, occasion: str, grace: timedelta | None = GRACE, point: str = "") -> list[int]:
        """The ranks that do not call this within ``grace``.

        All ranks that are alive should call it. It costs five requests to the store, and one more per check for others.
        If ranks are missing, it costs one more per rank.

        Args:
            occasion: Name of the occasion. The n-th calls of all ranks for it belong together.
            grace: How long to wait for the others. None for the store's timeout.
            point: The point of the training, and the action there.

        Returns:
            Their numbers. If other ranks have given up before this rank's call, it gets all the others.

        Raises:
            RuntimeError: Ranks came with different points. Raised on all ranks.
        """
        self._held[occasion] += 1
        call = f"{occasion}/{self._held[occasion]}"
        try:
            self._store.set(f"{call}/{self._rank}", "here")
            # The rank that sets it first gets its own point back.
            if self._store.compare_set(f"{call}/point", "", point or "-").decode() != (point or "-"):
                self._store.set(f"{call}/apart", "yes")
            longest = self._store.timeout if grace is None else grace
            absent = self._wait_for_others(call, longest.total_seconds())
            # The first rank to write it decides for all: a rank that comes meanwhile must not make ranks differ.
            self.found = json.loads(self._store.compare_set(f"{call}/missing", "", json.dumps(absent)))
            is_apart = self._store.check([f"{call}/apart"])
        except RuntimeError:
            # Rank 0's process serves the store, so the store ends with it.
            return [] if self._rank == 0 else [0]
        if is_apart:
            raise RuntimeError(
                f"{occasion} was called by all ranks, but at different points of the training or on different"
                " objects. Call it on all ranks in the same order as everything else that needs all ranks."
            )
        if self._rank in self.found:
            # The others have continued without this rank: it must not count on them either.
            return [rank for rank in range(self._world_size) if rank != self._rank]
        return list(self.found)

    def _wait_for_others(self, call: str, seconds: float) -> list[int]:
        """Waits until the last rank has come, or a rank has written the missing ranks.

        Returns:
            The ranks that are missing after that time.
        """
        began = time.monotonic()
        if self._store.add(f"{call}/count", 1) == self._world_size:
            return []
        # Not by `wait`: no signal would be handled within it, and torch logs each timeout of it.
        while not self._store.check([f"{call}/missing"]):
            waited = time.monotonic() - began
            if waited > seconds:
                return [rank for rank in range(self._world_size) if not self._store.check([f"{call}/{rank}"])]
            time.sleep(min(0.001 + waited / 4, _LONGEST_PAUSE))
        return []


# Keyed by the default group, whose end frees them: a reference to the store would keep its port.
_OF_TRAININGS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Liveness]" = weakref.WeakKeyDictionary()


def begin_liveness(name: str) -> Liveness:
    """From now on, ranks wait for each other under a new name. It must be the same on all. Not collective."""
    liveness = Liveness(name)
    if dist.group.WORLD is not None:
        _OF_TRAININGS[dist.group.WORLD] = liveness
    return liveness


@contextmanager
def met(what: str, group: dist.ProcessGroup, advice: str = "", of: str = "") -> Iterator[None]:
    """As :func:`watching`, but it begins only when all ranks have come, at the same point of the training.

    It is for calls that a user may make on some ranks only. Without it, other collectives on the other ranks would
    answer those calls, and mix up the results. Here, nothing is sent before all ranks have come. It costs each rank
    some five requests to the store. Rank 0's process serves them one after the other, so use it for rare calls.

    Args:
        what: The user's call.
        group: The group by which the call communicates.
        advice: What to do if some ranks have not come.
        of: The subject of the call, which must be the same on all ranks.

    Raises:
        MissingRanksError: Ranks did not come within the store's timeout, that of the default group.
        RuntimeError: They came at different points of the training, or with another subject.
    """
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1:
        yield
        return
    with watching(what, advice):
        liveness = _OF_TRAININGS.get(world) or begin_liveness("")
        # Ranks of other stages have another group, with another count.
        point = small_reductions_of(group) if group.size() == dist.get_world_size() else ""
        missing = liveness.missing(what, None, f"{point} {of}")
        if missing:
            raise MissingRanksError(f"{what}: {names_of(missing)} did not come. {advice}".rstrip())
        yield


# Gloo raises plain RuntimeErrors: only their text separates them from others.
_OF_A_COLLECTIVE = re.compile(
    r"connection (closed|reset|refused)|timed out|timeout|broken pipe|gloo|nccl|barrier", re.I
)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error may be due to ranks that did not take part in a collective. Gloo's errors have no own class."""
    if isinstance(error, dist.DistError):
        return True
    # The exact class: subclasses, such as out of memory, have nothing to do with other ranks.
    return type(error) is RuntimeError and _OF_A_COLLECTIVE.search(str(error)) is not None


def ends_collectives(error: BaseException) -> bool:
    """Whether an error means that launched collectives cannot complete, even if all ranks are alive."""
    return isinstance(error, (dist.DistError, NoCollectivesError))


def names_of(ranks: list[int]) -> str:
    """Ranks for a message: ``rank 3``, ``ranks 1, 2``."""
    # A rank that hangs may make thousands wait. One line must still be enough.
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
