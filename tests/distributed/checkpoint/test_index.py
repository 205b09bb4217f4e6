"""Where pieces lie, by the layout: every element once, the same on all ranks, few words whatever the ranks."""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_parstrat.core.layout import LayoutPolicy, ParameterSpec, Partition, plan_buckets
from lightning_parstrat.distributed.checkpoint.index import (
    CheckpointIndex,
    IndexUnpickler,
    SplitBounds,
    StoredTensor,
    file_of,
)
from lightning_parstrat.distributed.checkpoint.writing import write_shard
from lightning_parstrat.distributed.checkpoint.zipped import elements_in, write_zipped, zipped_bytes

SIZES = [7, 300, 1, 64, 0, 129, 33, 2000]


def index_of(partition: Partition, world_size: int, sizes: Sequence[int] = SIZES) -> CheckpointIndex:
    """Of two entries for each parameter, in several buckets, and of two tensors that are replicated."""
    specs = [
        ParameterSpec(name=str(n), shape=(size,), dtype="float32", itemsize=4, group=0) for n, size in enumerate(sizes)
    ]
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=2048, partition=partition)
    buckets = plan_buckets(specs, policy)
    tensors = [
        StoredTensor(f"{entry}/{slot.parameter}", dtype, slot.numel, number, slot.offset)
        for entry, dtype in (("weight", torch.bfloat16), ("state", torch.float32))
        for number, bucket in enumerate(buckets)
        for slot in bucket.slots
    ]
    split, whole = range(0, 5 * world_size + 1, 5), range(-10, (world_size - 1) * 10 + 1, 10)
    tensors.append(StoredTensor("split", torch.int64, 5 * world_size - 3, len(buckets), 0))
    tensors.append(StoredTensor("whole", torch.int64, 10, len(buckets) + 1, 0))
    return CheckpointIndex(tensors, [*(bucket.bounds for bucket in buckets), split, whole], (range(world_size),))


def loaded(index: CheckpointIndex) -> CheckpointIndex:
    found: CheckpointIndex = IndexUnpickler(io.BytesIO(pickle.dumps(index))).load()
    return found


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_every_element_is_in_one_piece(partition: Partition, world_size: int) -> None:
    written, index = index_of(partition, world_size), loaded(index_of(partition, world_size))
    for name, tensor in written.tensors.items():
        pieces = index.pieces_between(name, 0, tensor.numel)
        assert pieces == [p for s in range(world_size) for p in written.in_part(s).values() if p.name == name]
        ends = [piece.start + piece.numel for piece in pieces]
        assert [piece.start for piece in pieces] == [0, *ends][: len(pieces)] and [0, *ends][-1] == tensor.numel
        # Those alone that have any of what is asked for.
        middle = tensor.numel // 2
        expected = [piece for piece in pieces if piece.start < middle + 3 and piece.start + piece.numel > middle]
        assert index.pieces_between(name, middle, min(middle + 3, tensor.numel)) == expected


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_pieces_of_a_file_follow_each_other(partition: Partition) -> None:
    index = index_of(partition, 3)
    for shard in range(3):
        pieces = list(index.in_part(shard).values())
        ends = [piece.position + piece.length for piece in pieces]
        assert all(0 <= piece.position - end < 64 for piece, end in zip(pieces, [0, *ends[:-1]], strict=True))
        assert {piece.file for piece in pieces} == {f"__{shard}_0.distcp"}
        assert index.file_sizes()[f"__{shard}_0.distcp"] == ends[-1]


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("copies", [2, 3])
def test_ranks_that_hold_the_same_write_equal_parts_of_it(partition: Partition, copies: int) -> None:
    one = index_of(partition, 3)
    _, (_, tensors, cuts, _) = one.__reduce__()
    bounds = [cut if isinstance(cut, range) else cut.bounds() for _, cut in cuts]
    groups = [range(3 * copy, 3 * copy + 3) for copy in range(copies)]
    index = loaded(
        CheckpointIndex([StoredTensor(*one) for one in tensors], [SplitBounds(b, copies) for b in bounds], groups)
    )
    for shard in range(3):
        of_holders = [index.of_rank(group[shard]) for group in groups]
        for name, piece in one.in_part(shard).items():
            # In the order of the copies, they are what one rank writes where there is one copy.
            parts = [part for pieces in of_holders for part in pieces if part.name == name]
            ends = [part.start + part.numel for part in parts]
            assert [part.start for part in parts] == [piece.start, *ends[:-1]] and ends[-1] == piece.start + piece.numel
            assert index.pieces_between(name, piece.start, piece.start + piece.numel) == parts
    sizes = index.file_sizes()
    assert {file_of(rank) for rank in range(3 * copies)} >= sizes.keys()
    assert sizes == {name: size for first in range(4) for name, size in index.file_sizes(first, 4).items()}


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_it_does_not_grow_with_the_number_of_ranks(partition: Partition) -> None:
    few, many = (pickle.dumps(index_of(partition, world_size)) for world_size in (64, 1024))
    assert len(many) < len(few) + 200


def test_elsewhere_it_is_an_index_of_torchs() -> None:
    index = index_of("element", 3)
    metadata = pickle.loads(pickle.dumps(index))
    assert isinstance(metadata, Metadata)
    assert metadata.state_dict_metadata.keys() == index.tensors.keys()
    assert len(metadata.storage_data) == sum(len(index.in_part(shard)) for shard in range(3))


def test_one_of_another_format_is_refused() -> None:
    function, (version, *others) = index_of("element", 2).__reduce__()
    for other in (version - 1, version + 1):
        with pytest.raises(ValueError, match=f"another lightning-parstrat: its format is {other}"):
            function(other, *others)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 300, 70_000])
def test_a_piece_is_what_torch_loads(dtype: torch.dtype, numel: int) -> None:
    elements = (torch.arange(numel) % 2).to(dtype)
    file = io.BytesIO(bytes(64))
    file.seek(64)
    write_zipped(elements, file)
    content = file.getvalue()[64:]
    assert len(content) == zipped_bytes(elements.nbytes)
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), elements.view(torch.uint8))
    for piece in (content, saved_by_torch(elements)):
        begin = elements_in(io.BytesIO(bytes(64) + piece), 64, len(piece)) - 64
        assert piece[begin : begin + elements.nbytes] == bytes(elements.view(torch.uint8).tolist())


def saved_by_torch(elements: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(elements, file)
    return file.getvalue()


def test_a_file_is_as_long_as_the_index_says(tmp_path: Path) -> None:
    index = index_of("element", 2)
    for shard in range(2):
        path = tmp_path / file_of(shard)
        own, begins = b"what it alone says", index.end_of(shard)
        write_shard(path, index.of_rank(shard), lambda piece: torch.zeros(piece.numel, dtype=piece.dtype), own, begins)
        assert 0 <= begins - index.file_sizes()[path.name] < 64
        assert path.read_bytes()[begins:] == own
