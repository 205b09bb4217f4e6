"""Each rank's states for a resume are in its own file of a sharded checkpoint. The rest has the number of ranks."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.data.positions import LOADERS
from lightning_parstrat.strategies.data.random_numbers import RNG

_OF_RANKS = {RNG: "states", LOADERS: "ranks"}
"""The part of an entry that is a list with an item for each rank."""

_COUNT = "ranks"
"""The key of the number of ranks, within the entry on random numbers."""


def left_to_files(entries: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The part of these entries that is the same for all ranks.

    Args:
        entries: The entries of a full checkpoint, with the states of one rank or of all.
        ranks: The number of ranks that write their states.
    """
    within_epoch = {key: {"within_epoch": entries[key]["within_epoch"]} for key in _OF_RANKS}
    return {**within_epoch, RNG: {**within_epoch[RNG], _COUNT: ranks}}


def own_states(entries: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's states, from the entries of a full checkpoint of this rank alone."""
    return {key: entries[key][name][0] for key, name in _OF_RANKS.items()}


def ranks_of(random: Mapping[str, Any]) -> int:
    """The number of ranks whose random numbers a checkpoint has, full or sharded."""
    return int(random[_COUNT]) if _COUNT in random else len(random["states"])


def with_files(own: Mapping[str, Any]) -> range:
    """The ranks whose files must be read."""
    return range(own[RNG][_COUNT])


def restored_files(own: Mapping[str, Any], rank: int, size: int) -> Sequence[int]:
    """The files of :func:`with_files` that one of several ranks reads. The ranks divide them.

    After the end of an epoch, another number of ranks restores nothing from them, and reads none.
    """
    ranks = with_files(own)
    return ranks[rank::size] if len(ranks) == size or own[LOADERS]["within_epoch"] else ()


def with_states_of_all(own: Mapping[str, Any], read: Mapping[int, Any], control: Collectives | None) -> dict[str, Any]:
    """This package's entries as in a full checkpoint. If that suffices, a rank gets its own states alone.

    Collective if there are several ranks, and another number of ranks has saved.

    Args:
        own: This package's entries of a sharded checkpoint.
        read: The states that this process has read from files of ranks, by the rank.
        control: The group of the ranks that load it. None for one process alone.
    """
    ranks, filled = ranks_of(own[RNG]), dict(own)
    if control is not None and ranks != control.world_size:
        # Without random numbers, because another number of ranks does not restore them.
        places = {rank: {RNG: None, LOADERS: said[LOADERS]} for rank, said in read.items()}
        read = dict(ChainMap(*all_gather_object(places, control.group)))
    for key, name in _OF_RANKS.items():
        # If no file was read, loaders have no list, and begin their samples again.
        known = range(ranks if read or key == RNG else 0)
        of_ranks = [read[rank][key] if rank in read else None for rank in known]
        filled[key] = {name: of_ranks, "within_epoch": own[key]["within_epoch"]}
    return filled
