"""Who writes which elements, by the layout: each element once, and as many bytes as torch saves."""

import io
from collections import defaultdict

import pytest
import torch

from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, Partition, plan_buckets
from lightning_parstrat.distributed.checkpoint.layout import (
    CheckpointLayout,
    Piece,
    SavedTensor,
    saved_bytes,
    split_bounds,
)

SIZES = [7, 300, 1, 64, 0, 129, 33, 2000]


def layout_of(partition: Partition, shards: int, copies: int) -> CheckpointLayout:
    """Of two entries for each parameter, in several buckets, and of two tensors that are replicated."""
    specs = [
        ParameterSpec(name=str(n), shape=(size,), dtype="float32", itemsize=4, group=0) for n, size in enumerate(SIZES)
    ]
    buckets = plan_buckets(specs, LayoutPolicy(world_size=shards, bucket_cap_bytes=2048, partition=partition))
    ranks = shards * copies
    tensors = [
        SavedTensor(f"{entry}/{slot.parameter}", dtype, slot.numel, slot.offset, split_bounds(bucket.bounds, copies))
        for entry, dtype in (("weight", torch.bfloat16), ("state", torch.float32))
        for bucket in buckets
        for slot in bucket.slots
    ]
    tensors.append(SavedTensor("split", torch.int64, 5 * ranks - 3, 0, range(0, 5 * ranks + 1, 5)))
    tensors.append(SavedTensor("whole", torch.int64, 10, 0, range(-10 * (ranks - 1), 11, 10)))
    # Rank r of each copy has shard r.
    return CheckpointLayout(tensors, [copy * shards + shard for shard in range(shards) for copy in range(copies)])


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize(("shards", "copies"), [(1, 1), (2, 1), (3, 2), (8, 3), (64, 1)])
def test_every_element_is_written_once_and_rank_0_knows_where(partition: Partition, shards: int, copies: int) -> None:
    layout, ranks = layout_of(partition, shards, copies), shards * copies
    placed: dict[int, list[tuple[Piece, int]]] = defaultdict(list)
    for rank, piece, position in layout.placed([10 * rank for rank in range(ranks)]):
        placed[rank].append((piece, position))
    pieces = [piece for rank in range(ranks) for piece in layout.of_rank(rank)]
    for tensor in layout.tensors:
        end = 0
        for piece in sorted((piece for piece in pieces if piece.tensor == tensor), key=lambda piece: piece.start):
            assert piece.start == end
            end += piece.numel
        assert end == tensor.numel
    for rank in range(ranks):
        end = 10 * rank
        assert [piece for piece, _ in placed[rank]] == layout.of_rank(rank)
        for piece, position in placed[rank]:
            assert position == end
            end += piece.saved_bytes


def test_a_piece_is_as_long_as_torch_saves_it() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for numel in (1, 63, 64, 255, 256, 300, 65_535, 65_536, 70_000):
            file = io.BytesIO(bytes(13))
            file.seek(13)
            torch.save(torch.arange(numel).to(dtype), file)
            assert saved_bytes(dtype, numel) == len(file.getvalue()) - 13, (dtype, numel)
