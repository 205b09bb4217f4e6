"""What the ranks that are not played would say and write in a save, by the layout of their shards.

Each writes a file of its own, which a load has to find, and tells rank 0 as much as it would be told.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.scale.recorder import Recorder, not_counting_calls
from lightning_parstrat.core.shard_groups import ShardPlace
from lightning_parstrat.distributed.checkpoint.dcp import FolderWriter, RunsOfRank
from lightning_parstrat.distributed.checkpoint.writing import Outline
from lightning_parstrat.distributed.engine.buckets import ParameterSlot
from lightning_parstrat.distributed.engine.cuts import Cut, Run, cut_in_bucket
from lightning_parstrat.distributed.engine.state import PartOfState, Shards, grouped_parameters

_SENT_BY_RANK_0: dict[int, Outline] = {}
"""By the number of ranks: rank 0 is played first."""
_PLANS_OF_RANK_0: dict[int, list[Any]] = {}


class OtherRanks:
    """Speaks for them, and tells the recorder how much they say; ``folder`` is where they write."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.folder: Path | None = None
        self._written: dict[int, Any] = {}
        self._slots: Mapping[int, ParameterSlot] = {}
        self._holders: Sequence[int] = ()

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
        return value if outline is None else (outline._replace(temporary=self.folder), None)

    def gather(self, obj: Any, object_gather_list: list[Any] | None = None, **kwargs: Any) -> None:
        """``dist.gather_object``, by which torch's checkpoints tell rank 0 what is planned and written."""
        group, nbytes = kwargs["group"], len(pickle.dumps(obj))
        received = nbytes * (group.size() - 1) if group.rank() == 0 else 0
        self._recorder.launch(group.number, "all_gather", 8 * (group.size() - 1))
        self._recorder.launch(group.number, "gather", received)
        self._recorder.note_metadata(received)
        if object_gather_list is not None:
            # Once the others have written, each says what it has.
            others = self._written if isinstance(obj, list) else {}
            object_gather_list[:] = [others.get(rank, obj) for rank in range(group.size())]

    def scatter(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None, **kwargs: Any
    ) -> None:
        """``dist.scatter_object_list``, by which rank 0 answers."""
        group = kwargs["group"]
        if scatter_object_input_list is not None:
            _PLANS_OF_RANK_0[group.size()] = scatter_object_input_list
        own = _PLANS_OF_RANK_0[group.size()][group.rank()]
        received = len(pickle.dumps(own)) if group.rank() else 0
        self._recorder.launch(group.number, "broadcast", 8 if group.rank() else 0)
        self._recorder.launch(group.number, "scatter", received)
        self._recorder.launch(group.number, "scatter", 8 if group.rank() else 0)
        self._recorder.note_metadata(received)
        scatter_object_output_list[0] = own

    def write_data(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``FolderWriter.write_data`` that has the others write theirs, where rank 0 is played."""

        def write(writer: Any, plan: SavePlan, planner: Any) -> Any:
            done = original(writer, plan, planner)
            with not_counting_calls():
                size = dist.get_world_size()
                for rank in range(1, size) if dist.get_rank() == 0 else ():
                    of_rank = RunsOfRank(self._runs_of(rank, size, writer._tensors))
                    theirs = FolderWriter(writer._temporary, writer._final, writer._tensors)
                    planned = of_rank.finish_plan(_PLANS_OF_RANK_0[size][rank])
                    self._written[rank] = original(theirs, planned, of_rank).value()
            return done

        return write

    def _runs_of(self, rank: int, size: int, tensors: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, Run]:
        """Zeros in place of what another rank writes. The optimizer has the parameters in the module's order."""
        runs, parameters = {}, (name for name in tensors if name.startswith("state_dict"))
        positions = {name: position for position, name in enumerate(parameters)}
        for name, (dtype, _) in tensors.items():
            slot = self._slots[positions[name] if name in positions else int(name.split("/")[3])]
            written = _cut_of(rank, size, slot).written
            if written.start < written.stop:
                runs[name] = Run(written.start, torch.zeros(written.stop - written.start, dtype=dtype))
        return runs

    def own_parts(self, original: Callable[..., list[PartOfState]]) -> Callable[..., list[PartOfState]]:
        """``_own_parts`` that remembers the places of parameters, of which others own other parts."""

        def own_parts(optimizer: Any, shards: Shards) -> list[PartOfState]:
            parameters = grouped_parameters(optimizer)
            self._slots = {number: shards.slots[one] for number, one in enumerate(parameters) if one in shards.slots}
            self._holders = shards.ranks
            return original(optimizer, shards)

        return own_parts

    def _parts_of(self, rank: int, size: int, like: PartOfState) -> list[PartOfState]:
        """What another rank describes: its elements, with the entries that this rank has."""
        if rank not in self._holders:
            return []
        cuts = {position: _cut_of(rank, size, slot).own for position, slot in self._slots.items()}
        return [like._replace(position=n, elements=own) for n, own in cuts.items() if own.start < own.stop]

    def gather_object(self, value: Any, group: Any) -> list[Any]:
        """``gather_object`` of the package: the others send what this rank would, and have the same, or their parts."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        is_root, size = group.rank() == 0, group.size()
        for other in range(1, size) if is_root else [0]:
            for message in (torch.tensor([content.numel()]), content):
                move = group.recv if is_root else group.send
                move([message.clone()], other, 0).wait()
            self._recorder.note_metadata(content.numel() if is_root else 0)
        if not is_root:
            return []
        is_state = isinstance(value, list) and value and isinstance(value[0], PartOfState)
        return [value, *(self._parts_of(rank, size, value[0]) if is_state else value for rank in range(1, size))]


def _cut_of(rank: int, size: int, slot: ParameterSlot) -> Cut:
    copies = slot.bucket.place.copies
    copy, shard = divmod(rank, size // copies)
    return cut_in_bucket(slot, ShardPlace(shard, copy, copies))
