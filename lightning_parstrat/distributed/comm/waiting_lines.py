"""The line that a rank says when it waits: in what, since when, and where those are that have not come."""

import time
from collections import defaultdict
from typing import NamedTuple

from lightning_parstrat.distributed.comm.heartbeats import Beats
from lightning_parstrat.distributed.comm.liveness import names_of
from lightning_parstrat.distributed.comm.whereabouts import Beat, Whereabouts, clock_time


class Wait(NamedTuple):
    """A rank that makes no progress.

    Attributes:
        speaker: What the line begins with.
        rank: Which it is.
        where: Where it is.
        advice: What to do, where it is known.
        period: Seconds between heartbeats.
    """

    speaker: str
    rank: int
    where: Whereabouts
    advice: str
    period: float


_PLACES_NAMED = 4

_ALL_THERE = (
    "All ranks are there, and none goes on: a connection or a disk is slow or cut off, or they wait for different parts"
)
_NO_STORE = (
    "Where the others are is not known: the store does not answer, which rank 0's process or its launcher serves. It is"
    " stopped, or cannot be reached"
)


def line_of_wait(wait: Wait, before: Beats | None, now: Beats | None) -> str:
    """What is to be said of a wait; empty where it is not sure to be one.

    Args:
        wait: The rank's.
        before: Heartbeats of all ranks some time before, to see whose go on; None where they are not known.
        now: Their heartbeats; None where the store does not answer.
    """
    where = wait.where
    is_sure = where.collective or now is None or any(beat and beat.where.has_not_launched_as(where) for beat in now)
    if not is_sure:
        return ""
    elsewhere = _NO_STORE if now is None else _elsewhere(wait, before, now)
    unseen = "for something unknown" if now is None else "for a collective that others have not launched"
    what = f"in {where.collective}" if where.collective else unseen
    within = f", in {where.phase}" if where.phase else ""
    since = f"{where.still:.0f} s, since {clock_time(where.still)}"
    return (
        f"{wait.speaker}, rank {wait.rank}: has waited {since}, {what}{within}, at {where.stack}."
        f" {elsewhere or _ALL_THERE}. {wait.advice}".rstrip()
    )


def _elsewhere(wait: Wait, before: Beats | None, now: Beats) -> str:
    """Which ranks are not there, and where each of them is; empty if all are."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    said: dict[str, str] = {}
    for rank, beat in enumerate(now):
        if rank == wait.rank:
            continue
        known = before[rank] if before else None
        silent = _silence(beat, known, wait.period, compared=before is not None)
        if beat and not silent and not beat.ended and beat.where.is_with(wait.where):
            continue
        # Those at the same place are named together, however long they have been there.
        same = "?" if beat is None else f"{bool(silent)}{beat.ended}{beat.where._replace(still=0.0)}"
        ranks_of[same].append(rank)
        said.setdefault(same, _described(beat, silent))
    shown = [f"{names_of(ranks)}: {said[same]}" for same, ranks in list(ranks_of.items())[:_PLACES_NAMED]]
    left = sum(map(len, list(ranks_of.values())[_PLACES_NAMED:]))
    more = [f"{left} more are elsewhere"] if left else []
    return "Not there: " + "; ".join([*shown, *more]) if ranks_of else ""


def _silence(beat: Beat | None, known: Beat | None, period: float, compared: bool) -> float:
    """For how many seconds a rank has given no sign, where it should have; else 0."""
    if beat is None or beat.ended:
        return 0.0
    age = max(time.time() - beat.at, period)
    # Clocks of nodes may differ, so a beat's number counts where an earlier one is known.
    has_gone_on = known is None or known.number < beat.number if compared else age < 3 * period
    return 0.0 if has_gone_on else age


def _described(beat: Beat | None, silent: float) -> str:
    if beat is None:
        return "no sign of life since training was set up"
    if beat.ended:
        return beat.ended
    if silent:
        return (
            f"no sign of life for {silent:.0f} s (ended, stopped, cut off, or in C code that keeps Python's lock),"
            f" at its last heartbeat {beat.where}"
        )
    return str(beat.where)
