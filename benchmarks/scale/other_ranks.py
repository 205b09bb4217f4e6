"""What the ranks that are not played would say and write in a save, by the layout of their shards.

Each writes a file of its own, which a load has to find, and tells rank 0 as much as it would be told.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale.recorder import Recorder, not_counting_calls
from lightning_parstrat.distributed.checkpoint.index import StoredPiece, file_of
from lightning_parstrat.distributed.checkpoint.writing import Outline

_SENT_BY_RANK_0: dict[int, Outline] = {}
"""By the number of ranks: rank 0 is played first."""


class OtherRanks:
    """Speaks for them, and tells the recorder how much they say; ``folder`` is where they write."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.folder: Path | None = None
        self._index: Any = None

    def broadcast(self, original: Callable[..., None]) -> Callable[..., None]:
        """``dist.broadcast_object_list``: what this rank receives is what it would have sent itself."""

        def broadcast_object_list(object_list: list[Any], src: int | None = None, *args: Any, **kwargs: Any) -> None:
            group = kwargs.get("group") or (args[0] if args else None) or dist.group.WORLD
            if group.rank() != (kwargs.get("group_src", src) or 0):
                object_list[:] = [self._hear(value, group.size()) for value in object_list]
                self._recorder.note_metadata(len(pickle.dumps(object_list)))
            elif isinstance(object_list[0], tuple) and isinstance(object_list[0][0], Outline):
                _SENT_BY_RANK_0[group.size()] = object_list[0][0]
            original(object_list, group_src=group.rank(), group=group)

        return broadcast_object_list

    def _hear(self, value: Any, size: int) -> Any:
        outline = _SENT_BY_RANK_0.get(size) if value == (None, None) else None
        return value if outline is None else (outline._replace(temporary=str(self.folder)), None)

    def write_shard(self, original: Callable[..., None]) -> Callable[..., None]:
        """``write_shard`` that has them write theirs."""

        def write(path: Path, pieces: list[Any], part_of: Any, own: bytes, own_begins: int) -> None:
            original(path, pieces, part_of, own, own_begins)
            with not_counting_calls():
                # Rank 0 has a load before it; others look whether the next has written.
                rank, size = dist.get_rank(), dist.get_world_size()
                for other in range(size) if rank == 0 else [(rank + 1) % size]:
                    file = path.parent / file_of(other)
                    if not file.exists():
                        original(file, self._index.of_rank(other), _zeros_of, own, self._index.end_of(other))

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
        is_root = group.rank() == 0
        for other in range(1, group.size()) if is_root else [0]:
            for message in (torch.tensor([content.numel()]), content):
                move = group.recv if is_root else group.send
                move([message.clone()], other, 0).wait()
            self._recorder.note_metadata(content.numel() if is_root else 0)
        return [value] * group.size() if is_root else []


def _zeros_of(piece: StoredPiece) -> torch.Tensor:
    return torch.zeros(piece.numel, dtype=piece.dtype)
