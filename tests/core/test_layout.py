import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
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
    even_bounds,
    fingerprint,
    parts_of,
    plan_buckets,
)
from lightning_parstrat.core.update_cost import newton_schulz

PARTITIONS: tuple[Partition, ...] = ("element", "parameter")
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(
    shape: tuple[int, ...], group: str = "float32", name: str = "p", update_cost: float | None = None
) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=shape,
        dtype=f"dtype{ITEMSIZES[group]}",
        itemsize=ITEMSIZES[group],
        group=group,
        update_cost=update_cost,
    )


def specs_of(*shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [spec(shape, name=f"p{index}") for index, shape in enumerate(shapes)]


def alignment_of(bucket: BucketLayout, policy: LayoutPolicy) -> int:
    """In elements, at least one."""
    return max(1, policy.alignment_bytes // bucket.itemsize)


def owners_of(buckets: Sequence[BucketLayout]) -> dict[int, int]:
    """The rank that owns each parameter, where each has one and is not empty."""
    return {
        piece.parameter: rank
        for bucket in buckets
        for rank in range(bucket.world_size)
        for piece in bucket.shard_slices(rank)
    }


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 700).map(lambda size: (size,))
update_costs = st.none() | st.integers(0, 1000) | st.floats(0, 1e15)
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES)), update_costs), max_size=12).map(
    lambda items: [spec(shape, group, f"p{index}", cost) for index, (shape, group, cost) in enumerate(items)]
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
            shard = contents[bucket.bounds[rank] : bucket.bounds[rank + 1]]
            assert len(shard) == bucket.shard_numel(rank)
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
        assert bucket.numel > 0
        assert bucket.world_size == policy.world_size
        assert (bucket.bounds[0], bucket.bounds[-1]) == (0, bucket.numel)
        assert all(bound % alignment == 0 for bound in bucket.bounds)
        assert all(start <= end for start, end in pairwise(bucket.bounds))
        filled = sorted((slot.offset, slot.offset + slot.numel) for slot in bucket.slots if slot.numel)
        assert all(start % alignment == 0 for start, _ in filled)
        assert all(end <= start for (_, end), (start, _) in pairwise(filled))
        assert not filled or filled[-1][1] <= bucket.numel


@given(parameter_lists, policies("element"))
def test_element_partition_cuts_equal_shards_whatever_updates_cost(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    buckets = plan_buckets(parameters, policy)
    for bucket in buckets:
        # A range, so that a plan for many ranks takes no more memory than one for few.
        assert isinstance(bucket.bounds, range)
        assert {bucket.shard_numel(rank) for rank in range(policy.world_size)} == {bucket.numel // policy.world_size}
    assert plan_buckets([replace(spec, update_cost=None) for spec in parameters], policy) == buckets


@given(parameter_lists, policies("element"))
def test_element_partition_pads_less_than_an_alignment_per_slot_and_one_per_rank(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    for bucket in plan_buckets(parameters, policy):
        alignment = alignment_of(bucket, policy)
        gaps_between_slots = (len(bucket.slots) - 1) * (alignment - 1)
        assert bucket.padding <= gaps_between_slots + alignment * policy.world_size


@given(parameter_lists, policies("parameter"), st.integers(1, 1000))
def test_parameter_partition_pads_less_than_an_alignment_per_slot_and_one_per_rank(
    parameters: list[ParameterSpec], policy: LayoutPolicy, world_size: int
) -> None:
    for bucket in plan_buckets(parameters, replace(policy, world_size=world_size)):
        alignment = alignment_of(bucket, policy)
        filled = sum(1 for slot in bucket.slots if slot.numel)
        assert bucket.padding <= filled * (alignment - 1) + alignment * world_size
        # What makes equal parts of it is the last rank's.
        ends = [slot.offset + slot.numel for slot in bucket.slots if slot.numel]
        assert bucket.bounds[world_size - 1] - max(ends, default=0) < alignment


@given(parameter_lists, policies())
def test_any_bucket_can_be_cut_into_equal_aligned_parts(parameters: list[ParameterSpec], policy: LayoutPolicy) -> None:
    for bucket in plan_buckets(parameters, policy):
        equal = even_bounds(bucket.numel, policy.world_size)
        assert len(equal) == policy.world_size + 1 and equal[-1] == bucket.numel
        assert equal.step % alignment_of(bucket, policy) == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_parts_are_those_of_the_ranks_that_have_each_element(lengths: list[int], data: st.DataObject) -> None:
    bounds = tuple(accumulate(lengths, initial=0))
    stop = data.draw(st.integers(0, bounds[-1]))
    start = data.draw(st.integers(0, stop))
    owner_of = [rank for rank, length in enumerate(lengths) for _ in range(length)]
    parts = list(parts_of(bounds, start, stop))
    assert [rank for rank, first, end in parts for _ in range(first, end)] == owner_of[start:stop]
    assert [element for part in parts for element in range(part.start, part.stop)] == list(range(start, stop))
    # One for each rank that has any.
    assert len(parts) == len(set(owner_of[start:stop]))


def test_a_thousand_ranks_take_no_more_room_than_their_three_parameters() -> None:
    policy = LayoutPolicy(world_size=1000, bucket_cap_bytes=2**30, partition="parameter")
    (bucket,) = plan_buckets(specs_of((1000, 1000), (17,), (500, 1000)), policy)
    # But for what makes equal parts of it: less than an aligned start for each rank.
    assert bucket.numel == 1_504_000 < 1_000_000 + 32 + 500_000 + 16 * 1000
    assert len(bucket.bounds) == 1001
    assert [bucket.shard_numel(rank) for rank in range(4)] == [1_000_000, 500_000, 32, 0]
    assert not any(bucket.shard_numel(rank) for rank in range(3, 999))
    assert bucket.shard_slices(999) == ()


@pytest.mark.parametrize(
    ("shapes", "world_size", "partition", "offsets", "bounds"),
    [
        # 16 float32 elements are 64 bytes: one aligned start.
        pytest.param([(5,), (3,)], 2, "element", [0, 16], [0, 16, 32], id="a gap after 5, and a tail after 16 + 3"),
        pytest.param([(16,), (16,)], 2, "element", [0, 16], [0, 16, 32], id="nothing to pad"),
        pytest.param([(33,)], 3, "element", [0], [0, 16, 32, 48], id="a tail"),
        pytest.param([(5,), (40,)], 2, "parameter", [48, 0], [0, 48, 64], id="the first rank has the largest"),
        pytest.param([(5,), (40,), (9,)], 2, "parameter", [48, 0, 64], [0, 48, 96], id="a rank's own in their order"),
        pytest.param([(5,)], 4, "parameter", [0], [0, 16, 16, 16, 64], id="the last rank pads"),
        pytest.param([(0,)], 2, "parameter", [0], [0, 0, 32], id="nothing but an empty one"),
    ],
)
def test_known_layouts(
    shapes: list[tuple[int, ...]], world_size: int, partition: Partition, offsets: list[int], bounds: list[int]
) -> None:
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=2**20, partition=partition)
    (bucket,) = plan_buckets(specs_of(*shapes), policy)
    assert [slot.offset for slot in bucket.slots] == offsets
    assert list(bucket.bounds) == bounds
    assert bucket.padding == bounds[-1] - sum(size for (size,) in shapes)


def test_slices_at_a_boundary_that_cuts_a_parameter() -> None:
    policy = LayoutPolicy(world_size=2, bucket_cap_bytes=2**20)
    (bucket,) = plan_buckets(specs_of((40,), (8,)), policy)
    assert list(bucket.bounds) == [0, 32, 64]
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


@given(parameter_lists, policies("parameter"))
def test_parameter_partition_places_a_ranks_parameters_side_by_side_in_their_order(
    parameters: list[ParameterSpec], policy: LayoutPolicy
) -> None:
    buckets = plan_buckets(parameters, policy)
    owners = owners_of(buckets)
    for bucket in buckets:
        filled = [slot for slot in bucket.slots if slot.numel]
        by_offset = [slot.parameter for slot in sorted(filled, key=lambda slot: slot.offset)]
        assert by_offset == sorted(by_offset, key=lambda parameter: (owners[parameter], parameter))


def shares(parameters: Sequence[ParameterSpec]) -> list[float]:
    """What the ranks are to have about as much of: the share of the update costs plus that of the elements."""
    costs = [spec.numel if spec.update_cost is None else spec.update_cost for spec in parameters]
    numels = [spec.numel for spec in parameters]
    return [cost / sum(costs) + numel / sum(numels) for cost, numel in zip(costs, numels, strict=True)]


def loads_of(weights: Sequence[float], owners: Sequence[int], world_size: int) -> list[float]:
    return [
        sum(weight for weight, owner in zip(weights, owners, strict=True) if owner == rank)
        for rank in range(world_size)
    ]


sizes = st.integers(1, 400)
sizes_and_costs = (
    st.lists(st.tuples(sizes, st.none()), min_size=1, max_size=6)
    | st.lists(st.tuples(sizes, st.integers(1, 10**12)), min_size=1, max_size=6)
    | st.lists(st.tuples(sizes, st.floats(1e-9, 1e-3)), min_size=1, max_size=6)
)


@settings(max_examples=100)
@given(sizes_and_costs, st.integers(1, 3), st.sampled_from((1, 1000, 2**20)), st.booleans())
def test_parameter_partition_gives_no_rank_more_than_four_thirds_of_the_optimum(
    items: list[tuple[int, float | None]], world_size: int, cap: int, two_groups: bool
) -> None:
    names = ("float32", "bfloat16") if two_groups else ("float32",)
    parameters = [
        spec((size,), names[index % len(names)], f"p{index}", cost) for index, (size, cost) in enumerate(items)
    ]
    policy = LayoutPolicy(world_size=world_size, bucket_cap_bytes=cap, partition="parameter", alignment_bytes=1)
    owners = owners_of(plan_buckets(parameters, policy))
    weights = shares(parameters)
    optimum = min(
        max(loads_of(weights, choice, world_size)) for choice in product(range(world_size), repeat=len(parameters))
    )
    fullest = max(loads_of(weights, [owners[index] for index in range(len(parameters))], world_size))
    assert optimum * (1 - 1e-9) <= fullest <= optimum * 4 / 3 * (1 + 1e-9)


@pytest.mark.parametrize("cap", [1, 100, 2**20])
def test_all_buckets_together_are_balanced_not_each_alone(cap: int) -> None:
    policy = LayoutPolicy(world_size=4, bucket_cap_bytes=cap, partition="parameter")
    buckets = plan_buckets(specs_of(*[(16,)] * 8), policy)
    owned = [sum(piece.numel for bucket in buckets for piece in bucket.shard_slices(rank)) for rank in range(4)]
    assert owned == [32] * 4


@given(parameter_lists, policies("parameter"), st.sampled_from((2.0**-80, 2.0**-10, 2.0**10)))
def test_the_unit_of_the_update_costs_does_not_matter(
    parameters: list[ParameterSpec], policy: LayoutPolicy, unit: float
) -> None:
    # Whole numbers, so that no cost is so small that it cannot be scaled exactly.
    costs = [round(spec.numel if spec.update_cost is None else spec.update_cost) for spec in parameters]
    plans = [
        plan_buckets(
            [replace(spec, update_cost=cost * scale) for spec, cost in zip(parameters, costs, strict=True)], policy
        )
        for scale in (1.0, unit)
    ]
    assert plans[0] == plans[1]


MUON_SHAPES = [(64, 4096), (512, 512), (4096, 64), (64, 64, 64)]
"""As many elements each; Newton-Schulz costs twelve times as much for the square one as for the others."""


@pytest.mark.parametrize("cap", [1, 2**30])
@pytest.mark.parametrize(
    ("steps", "groups"),
    [
        pytest.param(None, [{0, 2}, {1, 3}], id="by elements"),
        pytest.param(5, [{1}, {0, 2, 3}], id="by what Newton-Schulz costs"),
    ],
)
def test_a_costly_update_leaves_its_owner_less_else_to_own(steps: int | None, groups: list[set[int]], cap: int) -> None:
    parameters = [
        spec(shape, name=f"p{index}", update_cost=None if steps is None else newton_schulz(shape, steps))
        for index, shape in enumerate(MUON_SHAPES)
    ]
    policy = LayoutPolicy(world_size=2, bucket_cap_bytes=cap, partition="parameter")
    owners = owners_of(plan_buckets(parameters, policy))
    assert [{index for index, owner in owners.items() if owner == rank} for rank in range(2)] == groups


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
    again = [replace(spec) for spec in parameters]
    buckets = plan_buckets(parameters, policy)
    assert plan_buckets(again, policy) == buckets
    assert fingerprint(again, plan_buckets(again, policy)) == fingerprint(parameters, buckets)


@pytest.mark.parametrize(("partition", "update_cost"), [("element", None), ("parameter", None), ("parameter", True)])
def test_plan_and_fingerprint_do_not_depend_on_the_process(partition: Partition, update_cost: bool | None) -> None:
    # Ranks differ in the seed of `hash`, on which the order of sets depends.
    script = f"""
from lightning_parstrat.core.layout import *
names = ["float32", "float64", "bfloat16"]
specs = [
    ParameterSpec(
        name=f"p{{i}}",
        shape=(i * 37 % 50,),
        dtype="float32",
        itemsize=4,
        group=names[i % 3],
        update_cost={update_cost!r} and i * 29 % 31 / 7,
    )
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


def test_fingerprint_differs_where_update_costs_give_parameters_to_other_ranks() -> None:
    policy = LayoutPolicy(world_size=2, bucket_cap_bytes=2**20, partition="parameter")
    numbers = set()
    for costs in ((None, None), (1.0, 100.0)):
        parameters = [spec((4,), name=f"p{index}", update_cost=cost) for index, cost in enumerate(costs)]
        numbers.add(fingerprint(parameters, plan_buckets(parameters, policy)))
    assert len(numbers) == 2


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
    assert bucket.numel > 0
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
