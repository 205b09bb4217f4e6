"""Each rank's states for a resume are in its own file of a sharded checkpoint. The rest has the number of ranks."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives

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
    """The ranks whose files one of several ranks reads. The ranks divide them.

    After the end of an epoch, another number of ranks restores nothing from them, and reads none.
    """
    ranks = range(ranks_of(own))
    return ranks[rank::size] if len(ranks) == size or (ranks and own[RESUME]["within_epoch"]) else ()


def with_states_of_all(own: Mapping[str, Any], read: Mapping[int, Any], control: Collectives | None) -> dict[str, Any]:
    """This package's entries as in a full checkpoint. States that no rank needs are None.

    Collective if there are several ranks, and another number of ranks has saved.

    Args:
        own: This package's entries of a sharded checkpoint.
        read: The states that this process has read from files of ranks, by the rank.
        control: The group of the ranks that load it. None for one process alone.
    """
    ranks = ranks_of(own)
    if not ranks:
        return dict(own)
    if control is not None and ranks != control.world_size:
        read = dict(ChainMap(*all_gather_object(dict(read), control.group)))
    return {**own, RESUME: {**own[RESUME], "ranks": [read.get(rank) for rank in range(ranks)]}}
