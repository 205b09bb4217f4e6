"""What a rank needs to go on, in a sharded checkpoint: in that rank's own file, and the rest says of how many ranks."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_parstrat.distributed.comm.agreement import all_gather_object, any_rank
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.strategies.checkpoint.resume import RNG
from lightning_parstrat.strategies.data.positions import LOADERS

_OF_RANKS = {RNG: ("states",), LOADERS: ("ranks", "stateful")}
"""Which parts of an entry are lists with an item for each rank."""

_COUNT = "ranks"
"""Among what all ranks say together of their random numbers: how many they are."""


def left_to_files(entries: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """What all ranks say together.

    Args:
        entries: What a full checkpoint would have, with one rank's states or all.
        ranks: How many write theirs.
    """
    together = {
        key: {name: value for name, value in entries[key].items() if name not in names}
        for key, names in _OF_RANKS.items()
    }
    together[RNG][_COUNT] = ranks
    return together


def own_states(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank says alone, given what a full checkpoint of one rank would have."""
    return {key: {name: entries[key][name][0] for name in names} for key, names in _OF_RANKS.items()}


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
    """This package's entries as a full checkpoint has them, but for random numbers that are other ranks'.

    Collective where there are several ranks: they agree whether each goes on where it stood, which takes nothing of the
    others. Else they gather where loaders stood: among other ranks some hundred bytes of each, mostly.

    Args:
        own: This package's entries of a sharded checkpoint.
        read: What ranks have said alone, by the rank: what this process has read of their files.
        control: Of the ranks that load it; None for one process alone.
    """
    states = {key: {each: of_rank[key] for each, of_rank in read.items()} for key in _OF_RANKS}
    ranks, loaders = ranks_of(own[RNG]), states[LOADERS]
    if control is not None and any_rank(not _go_on_alone(loaders, ranks, control), control):
        states[LOADERS] = dict(ChainMap(*all_gather_object(loaders, control.group)))
    elif control is not None:
        # Nobody looks at the others' but to see that they are there.
        states[LOADERS] = dict.fromkeys(range(ranks), loaders[control.rank])
    return _with_states(own, ranks, states)


def _go_on_alone(loaders: Mapping[int, Mapping[str, Any]], ranks: int, control: Collectives) -> bool:
    """Whether this rank's loaders take nothing of where others stood: it is one of as many, and knows its own place."""
    return (
        ranks == control.world_size and list(loaders) == [control.rank] and None not in loaders[control.rank]["ranks"]
    )


def _with_states(
    own: Mapping[str, Any], ranks: int, states: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Puts each rank's states into the lists of a full checkpoint; those of ranks that were not read are None.

    Where none was read, loaders have no list: they begin anew.
    """
    filled = dict(own)
    for key, names in _OF_RANKS.items():
        known = range(0 if key == LOADERS and not states[key] else ranks)
        of_ranks = {name: [states[key].get(rank, {}).get(name) for rank in known] for name in names}
        together = {name: value for name, value in own[key].items() if not (key == RNG and name == _COUNT)}
        filled[key] = {**of_ranks, **together}
    return filled
