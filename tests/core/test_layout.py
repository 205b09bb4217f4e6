import subprocess
import sys
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parstrat.core.layout import (
    BucketLayout,
    LayoutPolicy,
    ParameterSpec,
    Partition,
    ShardSlice,
    fingerprint,
    plan_buckets,
)

PARTITIONS: tuple[Partition, ...] = ("element", "parameter")
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(shape: tuple[int, ...], group: str = "float32", name: str = "p") -> ParameterSpec:
    return ParameterSpec(
        name=name, shape=shape, dtype=f"dtype{ITEMSIZES[group]}", itemsize=ITEMSIZES[group], group=group
    )


def specs_of(*shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [spec(shape, name=f"p{index}") for index, shape in enumerate(shapes)]


def alignment_of(bucket: BucketLayout, policy: LayoutPolicy) -> int:
    """In elements, at least one."""
    return max(1, policy.alignment_bytes // bucket.itemsize)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 700).map(lambda size: (size,))
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES))), max_size=12).map(
    lambda items: [spec(shape, group, f"p{index}") for index, (shape, group) in enumerate(items)]
)


def policies(*partitions: Partition) -> st.SearchStrategy[LayoutPolicy]:
    return st.builds(
        LayoutPolicy,
        world_size=st.integers(1, 8),
        bucket_cap_bytes=st.sampled_from((1, 64, 1000, 4096, 2**20)),
        partition=st.sampled_from(partitions or PARTITIONS),
        alignment_bytes=st.sampled_from((1, 16, 64, 256)),
    )


@given(parameter_lists, policies())
def test_every_element_is_owned_exactly_once(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    owners: dict[int, list[int]] = {index: [0] * spec.numel for index, spec in enumerate(parameters)}
    for bucket in plan_buckets(parameters, policy):
        for rank in range(policy.world_size):
            for piece in bucket.shard_slices(rank):
                for element in range(piece.parameter_start, piece.parameter_start + piece.numel):
                    owners[piece.parameter][element] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


@given(parameter_lists, policies())
def test_slices_name_the_element_that_lies_there(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    for bucket in plan_buckets(parameters, policy):
        contents: list[tuple[int, int] | None] = [None] * bucket.numel
        for slot in bucket.slots:
            contents[slot.offset : slot.offset + slot.numel] = [(slot.parameter, i) for i in range(slot.numel)]
        assert len(contents) == bucket.numel
        for rank in range(policy.world_size):
            shard = contents[rank * bucket.shard_numel : (rank + 1) * bucket.shard_numel]
            for piece in bucket.shard_slices(rank):
                expected = [(piece.parameter, piece.parameter_start + i) for i in range(piece.numel)]
                assert shard[piece.shard_start : piece.shard_start + piece.numel] == expected


@given(parameter_lists, policies())
def test_every_parameter_has_one_slot_of_its_size(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    slots = sorted((slot.parameter, slot.numel) for bucket in plan_buckets(parameters, policy) for slot in bucket.slots)
    assert slots == [(index, spec.numel) for index, spec in enumerate(parameters)]


@given(parameter_lists, policies())
def test_slots_and_shards_are_aligned_inside_the_bucket_and_apart(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    for bucket in plan_buckets(parameters, policy):
        alignment = alignment_of(bucket, policy)
        assert bucket.shard_numel > 0
        assert bucket.shard_numel % alignment == 0
        assert bucket.numel == bucket.shard_numel * policy.world_size
        filled = sorted((slot.offset, slot.offset + slot.numel) for slot in bucket.slots if slot.numel)
        assert all(start % alignment == 0 for start, _ in filled)
        assert all(end <= start for (_, end), (start, _) in pairwise(filled))
        assert not filled or filled[-1][1] <= bucket.numel


@given(parameter_lists, policies("element"))
def test_element_partition_pads_less_than_an_alignment_per_slot_and_one_per_rank(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    for bucket in plan_buckets(parameters, policy):
        alignment = alignment_of(bucket, policy)
        gaps_between_slots = (len(bucket.slots) - 1) * (alignment - 1)
        assert bucket.padding <= gaps_between_slots + alignment * policy.world_size


@pytest.mark.parametrize(
    ("shapes", "world_size", "partition", "offsets", "numel"),
    [
        # 16 float32 elements are 64 bytes: one aligned start.
        pytest.param([(5,), (3,)], 2, "element", [0, 16], 32, id="a gap after 5, and a tail after 16 + 3"),
        pytest.param([(16,), (16,)], 2, "element", [0, 16], 32, id="nothing to pad"),
        pytest.param([(33,)], 3, "element", [0], 48, id="a tail"),
        pytest.param([(5,), (40,)], 2, "parameter", [48, 0], 96, id="the largest goes first, the other beside it"),
        pytest.param([(5,)], 4, "parameter", [0], 64, id="fewer parameters than ranks"),
    ],
)
def test_padding_of_known_layouts(
    shapes: list[tuple[int, ...]], world_size: int, partition: Partition, offsets: list[int], numel: int
) -> None:
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=2**20, partition=partition)
    (bucket,) = plan_buckets(specs_of(*shapes), policy)
    assert [slot.offset for slot in bucket.slots] == offsets
    assert bucket.numel == numel
    assert bucket.padding == numel - sum(size for (size,) in shapes)


def test_slices_at_a_boundary_that_cuts_a_parameter() -> None:
    policy = LayoutPolicy(world_size=2, bucket_cap_bytes=2**20)
    (bucket,) = plan_buckets(specs_of((40,), (8,)), policy)
    assert bucket.shard_numel == 32
    assert bucket.shard_slices(0) == (ShardSlice(0, 0, 0, 32),)
    assert bucket.shard_slices(1) == (ShardSlice(0, 32, 0, 8), ShardSlice(1, 0, 16, 8))


@given(parameter_lists, policies("parameter"))
def test_parameter_partition_never_splits_a_parameter(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    for bucket in plan_buckets(parameters, policy):
        for slot in bucket.slots:
            if slot.numel:
                pieces = [bucket.slice_of(slot, rank) for rank in range(policy.world_size)]
                (whole,) = [piece for piece in pieces if piece is not None]
                assert (whole.parameter_start, whole.numel) == (0, slot.numel)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 3))
def test_parameter_partition_fills_no_shard_beyond_four_thirds_of_the_optimum(sizes: list[int], ranks: int) -> None:
    policy = LayoutPolicy(world_size=ranks, bucket_cap_bytes=2**20, partition="parameter", alignment_bytes=1)
    (bucket,) = plan_buckets(specs_of(*((size,) for size in sizes)), policy)
    optimum = min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(sizes))
    )
    assert optimum <= bucket.shard_numel
    assert 3 * bucket.shard_numel <= 4 * optimum


@given(parameter_lists, policies())
def test_groups_never_share_a_bucket(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    for bucket in plan_buckets(parameters, policy):
        (group,) = {parameters[slot.parameter].group for slot in bucket.slots}
        assert bucket.itemsize == ITEMSIZES[group]


@given(parameter_lists, policies())
def test_only_a_single_parameter_exceeds_the_cap(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    for bucket in plan_buckets(parameters, policy):
        size = sum(slot.numel for slot in bucket.slots) * bucket.itemsize
        assert size <= policy.bucket_cap_bytes or len(bucket.slots) == 1


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        pytest.param([10, 10, 10], 80, [[0, 1], [2]], id="exactly full"),
        pytest.param([10, 10, 10], 79, [[0], [1], [2]], id="one byte short"),
        pytest.param([1, 100, 1], 40, [[0], [1], [2]], id="a larger one stays alone"),
        pytest.param([10, 0, 10], 2**20, [[0, 1, 2]], id="room for all"),
    ],
)
def test_buckets_close_at_the_cap(sizes: list[int], cap: int, expected: list[list[int]]) -> None:
    policy = LayoutPolicy(world_size=2, bucket_cap_bytes=cap)
    buckets = plan_buckets(specs_of(*((size,) for size in sizes)), policy)
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == expected


@given(parameter_lists, policies())
def test_buckets_are_ordered_by_their_last_member(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    members = [[slot.parameter for slot in bucket.slots] for bucket in plan_buckets(parameters, policy)]
    assert members == sorted(members, key=max)
    assert all(indices == sorted(indices) for indices in members)


def test_a_group_left_open_long_ago_comes_before_one_that_fills_later() -> None:
    parameters = [spec((4,), group) for group in ("float32", "float64", "float32", "float64", "bfloat16")]
    buckets = plan_buckets(parameters, LayoutPolicy(world_size=2, bucket_cap_bytes=2**20))
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [[0, 2], [1, 3], [4]]


@given(parameter_lists, policies())
def test_planning_again_gives_the_same(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    again = [
        ParameterSpec(name=p.name, shape=p.shape, dtype=p.dtype, itemsize=p.itemsize, group=p.group) for p in parameters
    ]
    buckets = plan_buckets(parameters, policy)
    assert plan_buckets(again, policy) == buckets
    assert fingerprint(again, plan_buckets(again, policy)) == fingerprint(parameters, buckets)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_plan_and_fingerprint_do_not_depend_on_the_process(partition: Partition) -> None:
    # Ranks differ in the seed of `hash`, on which the order of sets depends.
    script = f"""
from lightning_parstrat.core.layout import *
names = ["float32", "float64", "bfloat16"]
specs = [
    ParameterSpec(name=f"p{{i}}", shape=(i * 37 % 50,), dtype="float32", itemsize=4, group=names[i % 3])
    for i in range(40)
]
policy = LayoutPolicy(world_size=3, bucket_cap_bytes=300, partition={partition!r})
plan = plan_buckets(specs, policy)
print(fingerprint(specs, plan), plan)
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
    assert "BucketLayout" in printed.pop()


BASE = [("w", (4, 6)), ("v", (6, 4)), ("b", (6,))]


@pytest.mark.parametrize(
    ("parameters", "policy"),
    [
        pytest.param([("w2", (4, 6)), *BASE[1:]], {}, id="a name"),
        pytest.param([("w", (6, 4)), *BASE[1:]], {}, id="a shape of the same size"),
        pytest.param([("w", (4, 7)), *BASE[1:]], {}, id="a size"),
        pytest.param(BASE[::-1], {}, id="the order"),
        pytest.param(BASE[:2], {}, id="the number"),
        pytest.param(BASE, {"bucket_cap_bytes": 100}, id="the cap"),
        pytest.param(BASE, {"world_size": 3}, id="the world size"),
        pytest.param(BASE, {"partition": "parameter"}, id="the partition"),
        pytest.param(BASE, {"alignment_bytes": 256}, id="the alignment"),
    ],
)
def test_fingerprint_differs_with(parameters: list[tuple[str, tuple[int, ...]]], policy: dict[str, Any]) -> None:
    def fingerprint_of(parameters: list[tuple[str, tuple[int, ...]]], **changes: Any) -> int:
        specs = [spec(shape, name=name) for name, shape in parameters]
        policy = LayoutPolicy(**{"world_size": 2, "bucket_cap_bytes": 2**20, **changes})
        return fingerprint(specs, plan_buckets(specs, policy))

    number = fingerprint_of(parameters, **policy)
    assert number != fingerprint_of(BASE)
    # It travels as int64, and its negative with it.
    assert 0 <= number < 2**62


def test_fingerprint_differs_with_the_itemsize() -> None:
    policy = LayoutPolicy(world_size=1, bucket_cap_bytes=2**20, alignment_bytes=1)
    numbers = {
        fingerprint([one], plan_buckets([one], policy)) for one in (spec((4,), group) for group in sorted(ITEMSIZES))
    }
    assert len(numbers) == len(ITEMSIZES)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("shapes", "owned"),
    [
        pytest.param([()], 1, id="0-d"),
        pytest.param([(0,)], 0, id="empty alone"),
        pytest.param([(3, 0, 2), (5,)], 5, id="empty beside another"),
        pytest.param([(2,), ()], 3, id="few"),
    ],
)
def test_small_parameters_are_planned(
    shapes: list[tuple[int, ...]], owned: int, world_size: int, partition: Partition
) -> None:
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=2**20, partition=partition)
    (bucket,) = plan_buckets(specs_of(*shapes), policy)
    assert len(bucket.slots) == len(shapes)
    assert bucket.shard_numel > 0
    pieces = [piece for rank in range(world_size) for piece in bucket.shard_slices(rank)]
    assert sum(piece.numel for piece in pieces) == owned
    assert all(piece.numel for piece in pieces)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_no_parameters_need_no_bucket(partition: Partition) -> None:
    assert plan_buckets([], LayoutPolicy(world_size=2, bucket_cap_bytes=1, partition=partition)) == ()


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((7,), 7), ((2, 3, 4), 24), ((0,), 0), ((5, 0), 0), ((1, 1), 1)])
def test_numel_is_the_product_of_the_shape(shape: tuple[int, ...], numel: int) -> None:
    assert spec(shape).numel == numel


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("world_size", 0, ">= 1"),
        ("world_size", -2, ">= 1"),
        ("bucket_cap_bytes", 0, ">= 1"),
        ("alignment_bytes", 0, ">= 1"),
        ("partition", "rows", "('element', 'parameter')"),
        ("partition", "auto", "('element', 'parameter')"),
    ],
)
def test_invalid_policy_names_the_value_and_what_is_allowed(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        LayoutPolicy(**{"world_size": 2, "bucket_cap_bytes": 1024, argument: value})
    message = str(error.value)
    assert f"{argument}: {value!r}" in message
    assert allowed in message
