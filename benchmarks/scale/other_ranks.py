"""What the ranks that are not played would say and write in a save, by the layout of their shards.

Where ranks say the same, nothing is to do. But each describes shards of its own, plans pieces of its own and writes a
file of its own: rank 0, which is played, has to be told as much as it would be, and a load has to find the files.
"""

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.scale.recorder import Recorder


class OtherRanks:
    """Speaks for them.

    Args:
        recorder: Is told how much they say.

    Attributes:
        strategy: The one that is played; None outside of a training.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.strategy: Any = None
        self._outline: Any = None
        self._kinds: dict[tuple[bool, str], WriteItem] = {}

    def note(self, value: Any) -> None:
        """Looks at an object that is broadcast: the outline of a sharded save says what is in it."""
        for part in value if isinstance(value, tuple) else ():
            if hasattr(part, "sources") and hasattr(part, "temporary"):
                self._outline = part

    def say(self, said: list[Any], rank: int) -> None:
        """Replaces, in what was gathered, what other ranks would say differently from ``rank``."""
        own = said[rank]
        say: Callable[[int], Any] | None = None
        if _describes_moves(own):
            say = _sharing_out(own, rank, len(said))
        elif isinstance(own, SavePlan):
            self._note_kinds(own)
            say = self._plan
        elif isinstance(own, list) and own and isinstance(own[0], WriteResult) and self._kinds:
            say = self._write
        if say is not None:
            with Recorder.not_counting_calls():
                said[:] = [own if other == rank else say(other) for other in range(len(said))]
            self._recorder.note_items(sum(map(_items, said)))

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

    def all_gather_object(self, original: Callable[..., None]) -> Callable[..., None]:
        """``dist.all_gather_object`` that has them speak."""

        def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
            original(object_list, obj, group)
            self.say(object_list, dist.get_rank(group))

        return all_gather_object

    @property
    def _slots(self) -> Mapping[Tensor, Any]:
        return {} if self.strategy is None else self.strategy._sharded_slots()

    def _parameters(self) -> list[Tensor]:
        """Of the optimizer, of which played models have one."""
        return [p for group in self.strategy.optimizers[0].param_groups for p in group["params"]]

    def _note_kinds(self, plan: SavePlan) -> None:
        for item in plan.items:
            self._kinds[_kind(self._outline.sources[item.index.fqn])] = item

    def _plan(self, rank: int) -> SavePlan:
        items = []
        named = dict(self.strategy.lightning_module.named_parameters())
        of_optimizer = self._parameters()
        for name, source in self._outline.sources.items():
            parameter = named[source.parameter] if source.optimizer is None else of_optimizer[source.parameter]
            slot = self._slots.get(parameter)
            elements = slice(0, 0) if slot is None else slot.elements_of(rank)
            if _length(elements):
                items.append(_item(self._kinds[_kind(source)], name, elements, slot.place.numel))
        return SavePlan(items)

    def _write(self, rank: int) -> list[WriteResult]:
        name = f"__{rank}_0.distcp"
        results = []
        with (Path(self._outline.temporary) / name).open("wb") as file:
            for item in self._plan(rank).items:
                start = file.tell()
                data = item.tensor_data
                if data is None:
                    raise AssertionError("a piece of a tensor was planned without saying which")
                torch.save(torch.zeros(data.chunk.sizes, dtype=data.properties.dtype), file)
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        return results


def _items(said: Any) -> int:
    """How many parts of tensors something that was said is about."""
    if isinstance(said, SavePlan):
        return len(said.items)
    return sum(len(one) if isinstance(one, dict) else 1 for one in said)


def _describes_moves(value: Any) -> bool:
    """Whether it is a rank's description of the state that moves into other buckets, by parameter and entry."""
    return isinstance(value, list) and all(isinstance(entries, dict) for entries in value) and any(value)


def _sharing_out(own: list[dict[str, Any]], rank: int, size: int) -> Callable[[int], Any]:
    """The others share out what this rank has nothing of, each about as much as this one has."""
    entries = next(filter(None, own))
    rest = [place for place, found in enumerate(own) if not found] or list(range(len(own)))
    # All of it is somebody's.
    number = max(sum(map(bool, own)), -(-len(rest) // (size - 1)))

    def describe(other: int) -> list[dict[str, Any]]:
        first = ((other - rank) % size - 1) * number
        described = {rest[(first + turn) % len(rest)] for turn in range(number)}
        return [entries if place in described else {} for place in range(len(own))]

    return describe


def _kind(source: Any) -> tuple[bool, str]:
    return source.optimizer is None, source.entry


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)


def _item(like: WriteItem, name: str, elements: slice, numel: int) -> WriteItem:
    if like.tensor_data is None:
        raise AssertionError("a piece of a tensor was planned without saying which")
    chunk = ChunkStorageMetadata(torch.Size([elements.start]), torch.Size([_length(elements)]))
    data = TensorWriteData(chunk, like.tensor_data.properties, torch.Size([numel]))
    return dataclasses.replace(like, index=MetadataIndex(name, torch.Size([elements.start])), tensor_data=data)
