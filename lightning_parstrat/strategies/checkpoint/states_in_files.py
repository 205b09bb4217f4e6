"""Each rank's states for a resume are in its own file of a sharded checkpoint. The rest has the number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

RESUME = "resume"
"""The key of the ranks' states for a resume, among this package's entries of a checkpoint.

``ranks`` has the state of each rank, or their number if the states are in files. ``within_epoch`` says whether the
epoch's iterators had been made, and ``validation_is_due`` whether a resumed training validates before it trains.
"""


def ranks_of(own: Mapping[str, Any]) -> int:
    """The number of ranks whose states a checkpoint has, full or sharded. 0 if training cannot resume from it.

    Args:
        own: This package's entries of the checkpoint.
    """
    ranks = own.get(RESUME, {"ranks": 0})["ranks"]
    return ranks if isinstance(ranks, int) else len(ranks)


def restored_files(own: Mapping[str, Any], rank: int, size: int) -> Sequence[int]:
    """The ranks whose files one of several ranks reads.

    After the end of an epoch, another number of ranks restores nothing from them, and reads none.
    """
    ranks = range(ranks_of(own))
    if len(ranks) == size:
        return [rank]
    return ranks if ranks and own[RESUME]["within_epoch"] else ()


def with_states_of_all(own: Mapping[str, Any], read: Mapping[int, Any]) -> dict[str, Any]:
    """This package's entries as in a full checkpoint. States that were not read are None.

    Args:
        own: This package's entries of a sharded checkpoint.
        read: The states that this process has read from files of ranks, by the rank.
    """
    ranks = range(ranks_of(own))
    return {**own, RESUME: {**own[RESUME], "ranks": [read.get(rank) for rank in ranks]}} if ranks else dict(own)
