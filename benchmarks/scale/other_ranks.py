"""What the ranks that are not played would say and write in a save, by the layout of their shards.

Where ranks say the same, nothing is to do. But each describes shards of its own, plans pieces of its own and writes a
file of its own: rank 0, which is played, has to be told as much as it would be, and a load has to find the files.
"""

import dataclasses
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

    Attributes:
        strategy: The one that is played; None outside of a training.
    """

    def __init__(self) -> None:
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
        if _describes_shards(own):
            say = self._describing(own)
        elif isinstance(own, SavePlan):
            self._note_kinds(own)
            say = self._plan
        elif isinstance(own, list) and own and isinstance(own[0], WriteResult) and self._kinds:
            say = self._write
        if say is not None:
            with Recorder.not_counting_calls():
                said[:] = [own if other == rank else say(other) for other in range(len(said))]

    def gather_object(self, original: Callable[..., None]) -> Callable[..., None]:
        """``dist.gather_object`` that has them speak."""

        def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
            original(obj, object_gather_list, *args, **kwargs)
            if object_gather_list:
                self.say(object_gather_list, dist.get_rank(kwargs.get("group")))

        return gather_object

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

    def _describing(self, own: Mapping[int, Any]) -> Callable[[int], Any]:
        slots = [self._slots[parameter] for parameter in self._parameters() if parameter in self._slots]
        entries = next(iter(own.values()))

        def describe(rank: int) -> dict[int, Any]:
            return {index: entries for index, slot in enumerate(slots) if _length(slot.elements_of(rank))}

        return describe

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


def _describes_shards(value: Any) -> bool:
    """Whether it is a rank's description of its shards, by position and entry."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(key, int) and isinstance(entries, dict) for key, entries in value.items())


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
