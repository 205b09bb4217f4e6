"""Makes of a sharded checkpoint what earlier versions would have written."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from lightning_parstrat.distributed.checkpoint.index import CheckpointIndex, IndexUnpickler, file_of
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY
from lightning_parstrat.strategies.checkpoint.states_in_files import with_files, with_states_of_all
from lightning_parstrat.strategies.data.positions import LOADERS


class _EarlierIndex:
    """Pickled as an index of format 1: of one copy, without a word on copies."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._function, (_, self._tensors, cuts, groups) = index.__reduce__()
        assert {copies for copies, _ in cuts} == {1}
        self._cuts, (self._ranks,) = [cut for _, cut in cuts], groups

    def __reduce__(self) -> Any:
        return self._function, (1, self._tensors, self._cuts, self._ranks)


def become_format_2(path: Path) -> None:
    """Rewrites a folder of format 3: random numbers of all ranks in one place, nothing of them in the ranks' files."""
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    own = checkpoint.skeleton[CHECKPOINT_KEY]
    ranks = with_files(own)
    assert own["format"] == 3 and len(ranks) > 1
    own = {**with_states_of_all(own, {rank: checkpoint.own_of(rank) for rank in ranks}, None), "format": 2}
    del own[LOADERS]
    torch.save({**checkpoint.skeleton, CHECKPOINT_KEY: own}, path / "checkpoint.pt")
    with open(path / ".metadata", "rb") as file:
        index = IndexUnpickler(file).load()
    for rank in ranks:
        os.truncate(path / file_of(rank), index.file_sizes()[file_of(rank)])
    (path / ".metadata").write_bytes(pickle.dumps(_EarlierIndex(index)))
