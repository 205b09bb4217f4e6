"""What the ranks that are not played would say and write in a save, by the layout of their shards.

Where ranks say the same, nothing is to do. But each describes shards of its own, plans pieces of its own and writes a
file of its own: rank 0, which is played, has to be told as much as it would be, and a load has to find the files.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale.recorder import Recorder
from lightning_parstrat.distributed.checkpoint.index import StoredPiece, file_of
from lightning_parstrat.distributed.checkpoint.writing import Outline

_SENT_BY_RANK_0: dict[int, Outline] = {}
"""By the number of ranks."""


class OtherRanks:
    """Speaks for them.

    Args:
        recorder: Is told how much they say.

    Attributes:
        strategy: The one that is played; None outside of a training.
        folder: Where they write.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.strategy: Any = None
        self.folder: Path | None = None
        self._index: Any = None

    def note(self, value: Any, size: int) -> None:
        """Rank 0, which is played, sends all others an object: whoever of them is played later receives it."""
        if isinstance(value, tuple) and isinstance(value[0], Outline):
            _SENT_BY_RANK_0[size] = value[0]

    def hear(self, value: Any, size: int) -> Any:
        """What rank 0 would send to the rank that is played, which would itself send ``value``."""
        outline = _SENT_BY_RANK_0.get(size)
        if value != (None, None) or outline is None:
            return value
        return outline._replace(temporary=str(self.folder)), None

    def count_told(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """``tell`` that counts what rank 0 then plans to collect."""

        def tell(optimizer: Any, *args: Any) -> list[Any]:
            told = original(optimizer, *args)
            with Recorder.not_counting_calls():
                entries = (len(entries) for state in told for entries in state.by_slot().values())
                self._recorder.note_items(sum(entries) if dist.get_rank() == 0 else 0)
            return told

        return tell

    def write_shard(self, original: Callable[..., None]) -> Callable[..., None]:
        """``write_shard`` that has them write theirs, and counts what is in the index."""

        def write(path: Path, pieces: list[Any], part_of: Any, own: bytes, own_begins: int) -> None:
            original(path, pieces, part_of, own, own_begins)
            index = self._index
            self._recorder.note_items(len(index.tensors) if dist.get_rank() == 0 else 0)
            with Recorder.not_counting_calls():
                # Rank 0 has a load before it; others look whether the next has written.
                rank, size = dist.get_rank(), dist.get_world_size()
                for other in range(size) if rank == 0 else [(rank + 1) % size]:
                    file = path.parent / file_of(other)
                    if not file.exists():
                        original(file, index.of_rank(other), _zeros_of, own, index.end_of(other))

        return write

    def note_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``CheckpointPieces.index`` whose result is kept."""

        def index(*args: Any) -> Any:
            self._index = original(*args)
            return self._index

        return index

    def gather_object(self, value: Any, group: Any) -> list[Any]:
        """``gather_object`` of the package: the others send what this rank would, and have the same."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.tensor([content.numel()])
        for other in range(1, group.size()) if group.rank() == 0 else [0]:
            for message in (sizes, content):
                if group.rank() == 0:
                    group.recv([torch.empty_like(message)], other, 0).wait()
                else:
                    group.send([message], other, 0).wait()
            self._recorder.note_metadata(content.numel() if group.rank() == 0 else 0)
        return [value] * group.size() if group.rank() == 0 else []


def _zeros_of(piece: StoredPiece) -> torch.Tensor:
    return torch.zeros(piece.numel, dtype=piece.dtype)
