from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parstrat.core.layout import (
    BucketLayout,
    LayoutPolicy,
    ParameterSpec,
    Partition,
    ShardSlice,
    even_bounds,
    fingerprint,
    group_by_cap,
    parts_of,
    plan_buckets,
)

MIB = 2**20
PARTITIONS: tuple[Partition, ...] = ("element", "parameter")
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(
    shape: tuple[int, ...], group: str = "float32", name: str = "p", partition: Partition = "element"
) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=shape,
        dtype=f"dtype{ITEMSIZES[group]}",
        itemsize=ITEMSIZES[group],
        group=group,
        partition=partition,
    )


def specs_of(*shapes: tuple[int, ...], partition: Partition = "element") -> list[ParameterSpec]:
    return [spec(shape, name=f"p{index}", partition=partition) for index, shape in enumerate(shapes)]


def alignment_of(bucket: BucketLayout, policy: LayoutPolicy) -> int:
    """In elements, at least one."""
    return max(1, policy.alignment_bytes // bucket.itemsize)


def padding_of(bucket: BucketLayout) -> int:
    return bucket.numel - sum(slot.numel for slot in bucket.slots)


def slices_of(bucket: BucketLayout, rank: int) -> list[ShardSlice]:
    """What a rank owns, in the order of the slots."""
    return [piece for slot in bucket.slots if (piece := bucket.slice_of(slot, rank)).numel]


def owners_of(buckets: Sequence[BucketLayout]) -> dict[int, int]:
    """The rank that owns each parameter, where each has one and is not empty."""
    return {
        piece.parameter: rank
        for bucket in buckets
        for rank in range(bucket.world_size)
        for piece in slices_of(bucket, rank)
    }


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 700).map(lambda size: (size,))


def lists_of(*partitions: Partition) -> st.SearchStrategy[list[ParameterSpec]]:
    one = st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES)), st.sampled_from(partitions))
    return st.lists(one, max_size=12).map(
        lambda items: [spec(shape, group, f"p{index}", cut) for index, (shape, group, cut) in enumerate(items)]
    )


def policies() -> st.SearchStrategy[LayoutPolicy]:
    return st.builds(
        LayoutPolicy,
        world_size=st.integers(1, 8),
        bucket_cap_bytes=st.sampled_from((1, 64, 1000, 4096, 2**20)),
        alignment_bytes=st.sampled_from((1, 16, 64, 256)),
    )


@given(lists_of(*PARTITIONS), policies())
def test_every_plan_owns_every_element_once_in_aligned_slots_of_its_group(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    buckets = plan_buckets(parameters, policy)
    owned: dict[int, list[int]] = {index: [] for index in range(len(parameters))}
    for bucket in buckets:
        alignment = alignment_of(bucket, policy)
        assert bucket.numel > 0 and bucket.world_size == policy.world_size
        assert (bucket.bounds[0], bucket.bounds[-1]) == (0, bucket.numel)
        assert all(bound % alignment == 0 for bound in bucket.bounds)
        assert all(start <= end for start, end in pairwise(bucket.bounds))
        filled = sorted((slot.offset, slot.offset + slot.numel) for slot in bucket.slots if slot.numel)
        assert all(start % alignment == 0 for start, _ in filled)
        assert all(end <= start for (_, end), (start, _) in pairwise(filled))
        assert not filled or filled[-1][1] <= bucket.numel
        # It can be cut into equal aligned parts.
        equal = even_bounds(bucket.numel, policy.world_size)
        assert len(equal) == policy.world_size + 1 and equal[-1] == bucket.numel and equal.step % alignment == 0
        if all(parameters[slot.parameter].partition == "element" for slot in bucket.slots):
            # A range, so that a plan for many ranks takes no more memory than one for few.
            assert isinstance(bucket.bounds, range) and bucket.bounds == equal
            assert padding_of(bucket) <= (len(bucket.slots) - 1) * (alignment - 1) + alignment * policy.world_size
        (group,) = {parameters[slot.parameter].group for slot in bucket.slots}
        assert bucket.itemsize == ITEMSIZES[group]
        size = sum(slot.numel for slot in bucket.slots) * bucket.itemsize
        last = bucket.slots[-1].numel * bucket.itemsize
        assert size <= policy.bucket_cap_bytes or (size - last) * 32 <= policy.bucket_cap_bytes
        contents: list[tuple[int, int] | None] = [None] * bucket.numel
        for slot in bucket.slots:
            contents[slot.offset : slot.offset + slot.numel] = [(slot.parameter, i) for i in range(slot.numel)]
        assert len(contents) == bucket.numel
        for rank in range(policy.world_size):
            shard = contents[bucket.bounds[rank] : bucket.bounds[rank + 1]]
            assert len(shard) == bucket.shard_numel(rank)
            for piece in slices_of(bucket, rank):
                elements = range(piece.parameter_start, piece.parameter_start + piece.numel)
                assert shard[piece.shard_start : piece.shard_start + piece.numel] == [
                    (piece.parameter, element) for element in elements
                ]
                owned[piece.parameter] += elements
    assert all(sorted(elements) == list(range(parameters[index].numel)) for index, elements in owned.items())
    members = [[slot.parameter for slot in bucket.slots] for bucket in buckets]
    assert members == sorted(members, key=max) and all(indices == sorted(indices) for indices in members)
    slots = sorted((slot.parameter, slot.numel) for bucket in buckets for slot in bucket.slots)
    assert slots == [(index, spec.numel) for index, spec in enumerate(parameters)]
    again = [replace(spec) for spec in parameters]
    assert plan_buckets(again, policy) == buckets
    assert fingerprint(again, buckets) == fingerprint(parameters, buckets)


@given(lists_of("parameter"), policies(), st.integers(1, 1000))
def test_parameter_partition_leaves_parameters_whole_in_their_order_and_pads_little(
    parameters: list[ParameterSpec], policy: LayoutPolicy, world_size: int
) -> None:
    policy = replace(policy, world_size=world_size)
    for bucket in plan_buckets(parameters, policy):
        alignment = alignment_of(bucket, policy)
        filled = sorted((slot for slot in bucket.slots if slot.numel), key=lambda slot: slot.offset)
        owner_of = {}
        for slot in filled:
            ((owner, start, stop),) = parts_of(bucket.bounds, slot.offset, slot.offset + slot.numel)
            owner_of[slot.parameter] = owner
            assert bucket.slice_of(slot, owner) == ShardSlice(
                slot.parameter, 0, start - bucket.bounds[owner], stop - start
            )
        by_offset = [slot.parameter for slot in filled]
        assert by_offset == sorted(by_offset, key=lambda parameter: (owner_of[parameter], parameter))
        assert padding_of(bucket) <= len(filled) * (alignment - 1) + alignment * world_size
        # What makes equal parts of it is the last rank's.
        ends = [slot.offset + slot.numel for slot in filled]
        assert bucket.bounds[world_size - 1] - max(ends, default=0) < alignment


def test_buckets_close_at_the_cap() -> None:
    for sizes, cap, expected in (
        ([10, 10, 10], 80, [[0, 1], [2]]),
        ([10, 10, 10], 79, [[0], [1], [2]]),
        # A larger one stays alone.
        ([1, 100, 1], 40, [[0], [1], [2]]),
        ([10, 0, 10], 2**20, [[0, 1, 2]]),
    ):
        buckets = plan_buckets(specs_of(*((size,) for size in sizes)), LayoutPolicy(world_size=2, bucket_cap_bytes=cap))
        assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == expected


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from((1, 1000, 2**20)),
    st.booleans(),
)
def test_parameter_partition_gives_no_rank_more_than_four_thirds_of_the_optimum(
    sizes: list[int], world_size: int, cap: int, two_groups: bool
) -> None:
    names = ("float32", "bfloat16") if two_groups else ("float32",)
    parameters = [
        spec((size,), names[index % len(names)], f"p{index}", "parameter") for index, size in enumerate(sizes)
    ]
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=cap, alignment_bytes=1)
    owners = owners_of(plan_buckets(parameters, policy))

    def fullest(owner_of: Sequence[int]) -> int:
        return max(sum(s for s, o in zip(sizes, owner_of, strict=True) if o == rank) for rank in range(world_size))

    optimum = min(map(fullest, product(range(world_size), repeat=len(sizes))))
    assert optimum <= fullest([owners[index] for index in range(len(sizes))]) <= optimum * 4 / 3


BASE: list[Any] = [("w", (4, 6)), ("v", (6, 4)), ("b", (6,))]


def test_fingerprints_differ_with_whatever_a_plan_depends_on() -> None:
    def fingerprint_of(parameters: list[Any], **changes: Any) -> int:
        cut = changes.pop("partition", "element")
        specs = [spec(shape, *more, name=name, partition=cut) for name, shape, *more in parameters]
        policy = LayoutPolicy(**{"world_size": 2, "bucket_cap_bytes": 2**20, **changes})
        return fingerprint(specs, plan_buckets(specs, policy))

    numbers = [
        fingerprint_of(BASE),
        *(fingerprint_of([changed, *BASE[1:]]) for changed in (("w2", (4, 6)), ("w", (6, 4)), ("w", (4, 7)))),
        fingerprint_of(BASE[::-1]),
        fingerprint_of(BASE[:2]),
        fingerprint_of(BASE, bucket_cap_bytes=100),
        fingerprint_of(BASE, world_size=3),
        fingerprint_of(BASE, partition="parameter"),
        fingerprint_of(BASE, alignment_bytes=256),
        *(fingerprint_of([("w", (4,), group)], alignment_bytes=1) for group in sorted(ITEMSIZES)),
    ]
    # They travel as int64, and their negatives with them.
    assert len(set(numbers)) == len(numbers) and all(0 <= number < 2**62 for number in numbers)


def test_no_norm_between_matrices_travels_alone() -> None:
    parameters = specs_of(*((256_000 * 16,), (2048,)) * 4)
    assert group_by_cap(parameters, 8 * MIB) == [[0], [1, 2], [3, 4], [5, 6], [7]]
