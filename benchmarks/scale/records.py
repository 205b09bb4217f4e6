"""What torch's checkpoints would have ranks send rank 0 and back, if a writer of ours did not compute it.

    python -m benchmarks.scale.records --output benchmarks/results/checkpoint_records.json

Each rank would send a record of each piece that it has written, and rank 0 would send the index to all. Here these are
torch's own objects, made by the layout that the package would save a model by, and pickled. Bytes are counted, and
processor seconds are measured: of reading all records, of making the index, and of reading it, as each rank does in a
load. ``gather_object`` has every rank send as many bytes as the one that sends most.
"""

import argparse
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.machine import write_result
from lightning_parstrat.core.bucket_cap import default_bucket_cap
from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, plan_buckets
from lightning_parstrat.distributed.checkpoint.folder import file_of
from lightning_parstrat.distributed.checkpoint.layout import CheckpointLayout, SavedTensor

SIZES = (8, 64, 1024)


class Model(NamedTuple):
    """A decoder, and how it is saved."""

    name: str
    strategy: str
    layers: int
    width: int
    itemsize: int
    entries: tuple[str, ...]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width = self.width
        yield "embedding", (50304, width)
        yield "positions", (2048, width)
        for layer in range(self.layers):
            for name, shape in {
                "first.weight": (width,),
                "first.bias": (width,),
                "attention.weight": (3 * width, width),
                "attention.bias": (3 * width,),
                "projection.weight": (width, width),
                "projection.bias": (width,),
                "second.weight": (width,),
                "second.bias": (width,),
                "up.weight": (4 * width, width),
                "up.bias": (4 * width,),
                "down.weight": (width, 4 * width),
                "down.bias": (width,),
            }.items():
                yield f"layers.{layer}.{name}", shape

    def layout(self, ranks: int) -> CheckpointLayout:
        """What each rank writes: of buckets, or of the rows of each parameter."""
        specs = [
            ParameterSpec(name=name, shape=shape, dtype="x", itemsize=self.itemsize, group=0)
            for name, shape in self.shapes()
        ]
        nbytes = sum(torch.Size(spec.shape).numel() for spec in specs) * self.itemsize
        cap = default_bucket_cap(nbytes, ranks, "cuda")
        slots: list[tuple[int, int, int, Sequence[int]]] = []
        if self.strategy == "zero1_custom":
            for bucket in plan_buckets(specs, LayoutPolicy(world_size=ranks, bucket_cap_bytes=cap)):
                slots += [(slot.parameter, slot.numel, slot.offset, bucket.bounds) for slot in bucket.slots]
        else:
            for number, spec in enumerate(specs):
                numel = torch.Size(spec.shape).numel()
                length = -(-spec.shape[0] // ranks) * (numel // spec.shape[0])
                slots.append((number, numel, 0, range(0, length * ranks + 1, length)))
        tensors = [
            SavedTensor(f"optimizer_states/0/state/{number}/{entry}", torch.float32, numel, offset, bounds)
            for entry in self.entries
            for number, numel, offset, bounds in slots
        ]
        return CheckpointLayout(tensors, range(ranks))


MODELS = (
    Model("350M fp32", "zero1_custom", 24, 1024, 4, ("weight", "exp_avg", "exp_avg_sq")),
    Model("7B bf16", "zero1_custom", 32, 4096, 2, ("weight", "exp_avg", "exp_avg_sq", "master_weights")),
    Model("7B fp32", "zero3_custom", 32, 4096, 4, ("weight", "exp_avg", "exp_avg_sq")),
)


def count(model: Model, ranks: int) -> dict[str, Any]:
    """Bytes and processor seconds of one save by so many ranks."""
    layout = model.layout(ranks)
    known = {
        one.name: TensorStorageMetadata(TensorProperties(dtype=one.dtype), torch.Size([one.numel]), [])
        for one in layout.tensors
    }
    records: list[list[WriteResult]] = [[] for _ in range(ranks)]
    for rank, piece, position in layout.placed([0] * ranks):
        name, place = piece.tensor.name, _StorageInfo(file_of(rank), position, piece.saved_bytes)
        records[rank].append(WriteResult(MetadataIndex(name, [piece.start]), piece.saved_bytes, place))
        known[name].chunks.append(ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.numel])))
    sent = [pickle.dumps(of_rank) for of_rank in records]
    began = time.process_time()
    received = [pickle.loads(content) for content in sent]
    read = time.process_time()
    index = Metadata(known, storage_data={one.index: one.storage_data for of_rank in received for one in of_rank})
    content = pickle.dumps(index)
    made = time.process_time()
    pickle.loads(content)
    loaded = time.process_time()
    return {
        "model": model.name,
        "strategy": model.strategy,
        "ranks": ranks,
        "records": sum(map(len, records)),
        "gathered_bytes": max(map(len, sent)) * ranks,
        "index_bytes": len(content),
        "seconds_to_read_records": read - began,
        "seconds_to_make_index": made - read,
        "seconds_to_read_index": loaded - made,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    options = parser.parse_args(arguments)
    counted = []
    for model in MODELS:
        for ranks in options.sizes:
            counted.append(count(model, ranks))
            print(counted[-1], flush=True)
    write_result({"counted": counted}, options.output)


if __name__ == "__main__":
    main()
