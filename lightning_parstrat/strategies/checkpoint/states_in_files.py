"""What a rank needs to go on, in a sharded checkpoint: in that rank's own file, and the rest says of how many ranks."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.resume import RNG
from lightning_parstrat.strategies.data.positions import LOADERS

_OF_RANKS = {RNG: "states", LOADERS: "ranks"}
"""Which part of an entry is a list with an item for each rank."""

_COUNT = "ranks"
"""Among what all ranks say together of their random numbers: how many they are."""


def left_to_files(entries: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """What all ranks say together.

    Args:
        entries: What a full checkpoint would have, with one rank's states or all.
        ranks: How many write theirs.
    """
    within_epoch = {key: {"within_epoch": entries[key]["within_epoch"]} for key in _OF_RANKS}
    return {**within_epoch, RNG: {**within_epoch[RNG], _COUNT: ranks}}


def own_states(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank says alone, given what a full checkpoint of one rank would have."""
    return {key: entries[key][name][0] for key, name in _OF_RANKS.items()}


def ranks_of(random: Mapping[str, Any]) -> int:
    """Of how many ranks a checkpoint has random numbers, whether full or sharded."""
    return int(random[_COUNT]) if _COUNT in random else len(random["states"])


def with_files(own: Mapping[str, Any]) -> range:
    """The ranks whose files have to be read."""
    return range(own[RNG][_COUNT])


def restored_files(own: Mapping[str, Any], rank: int, size: int) -> Sequence[int]:
    """Of :func:`with_files` those that one of several ranks reads, which share them out.

    With another number of ranks, after an epoch's end, nothing of them is restored, and none is read.
    """
    ranks = with_files(own)
    return ranks[rank::size] if len(ranks) == size or own[LOADERS]["within_epoch"] else ()


def with_states_of_all(own: Mapping[str, Any], read: Mapping[int, Any], control: Collectives | None) -> dict[str, Any]:
    """This package's entries as a full checkpoint has them, but that a rank knows its own alone where that will do.

    Collective where there are several ranks, and another number of them than has saved.

    Args:
        own: This package's entries of a sharded checkpoint.
        read: What ranks have said alone, by the rank: what this process has read of their files.
        control: Of the ranks that load it; None for one process alone.
    """
    ranks, filled = ranks_of(own[RNG]), dict(own)
    if control is not None and ranks != control.world_size:
        # Without random numbers, which another number of ranks does not restore.
        places = {rank: {RNG: None, LOADERS: said[LOADERS]} for rank, said in read.items()}
        read = dict(ChainMap(*all_gather_object(places, control.group)))
    for key, name in _OF_RANKS.items():
        # Where none was read, loaders have no list: they begin anew.
        known = range(ranks if read or key == RNG else 0)
        of_ranks = [read[rank][key] if rank in read else None for rank in known]
        filled[key] = {name: of_ranks, "within_epoch": own[key]["within_epoch"]}
    return filled
