"""The formulas of ``tests/accounting.py``, beside the way of every element; and who owns what."""

from bisect import bisect_right
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.layout import (
    BucketLayout,
    LayoutPolicy,
    ParameterSpec,
    Partition,
    owned_bytes,
    parameter_bytes,
    plan_buckets,
)
from lightning_parstrat.core.shard_groups import ShardGroups
from tests.accounting import StepTraffic, step_traffic

GROUPS = {"bfloat16": 2, "float32": 4, "complex128": 16}


def plan(sizes: list[tuple[int, str]], world_size: int, cap: int, partition: Partition) -> tuple[BucketLayout, ...]:
    specs = [
        ParameterSpec(
            name=f"p{index}", shape=(size,), dtype=f"dtype{GROUPS[group]}", itemsize=GROUPS[group], group=group
        )
        for index, (size, group) in enumerate(sizes)
    ]
    return plan_buckets(specs, LayoutPolicy(world_size=world_size, bucket_cap_bytes=cap, partition=partition))


plans = st.builds(
    plan,
    sizes=st.lists(st.tuples(st.integers(0, 300), st.sampled_from(sorted(GROUPS))), max_size=8),
    world_size=st.integers(1, 8),
    cap=st.sampled_from((1, 500, 2**20)),
    partition=st.sampled_from(("element", "parameter")),
)


@given(plans)
def test_traffic_is_that_of_every_element_on_its_way(buckets: tuple[BucketLayout, ...]) -> None:
    reduced, gathered, owned = Counter[int](), Counter[int](), Counter[int]()
    for bucket in buckets:
        for element in range(bucket.numel):
            # Every rank sends it to the one that sums it, which sends it to its owner; then back the same way.
            middle = element * bucket.world_size // bucket.numel
            owner = bisect_right(bucket.bounds, element) - 1
            for source in set(range(bucket.world_size)) - {middle}:
                reduced[source] += bucket.itemsize
                gathered[middle] += bucket.itemsize
            if owner != middle:
                reduced[middle] += bucket.itemsize
                gathered[owner] += bucket.itemsize
            owned[owner] += bucket.itemsize * any(
                slot.offset <= element < slot.offset + slot.numel for slot in bucket.slots
            )
    collectives = sum(1 for bucket in buckets if bucket.world_size > 1)
    world_size = buckets[0].world_size if buckets else 1
    for rank in range(world_size):
        expected = StepTraffic(collectives, reduced[rank], collectives, gathered[rank])
        assert step_traffic(buckets, rank) == expected
        assert owned_bytes(buckets, rank) == owned[rank]
    assert parameter_bytes(buckets) == owned.total()


def test_shard_groups_send_within_the_group_and_a_shard_between() -> None:
    # 1000 float32 elements in two shards of 512 (padding included), of which each of two holders sums one half.
    buckets = plan([(1000, "float32")], 2, 2**20, "element")
    shard = buckets[0].shard_numel(0) * 4
    chosen = ShardGroups(((0, 1), (2, 3)))
    for rank in range(4):
        assert step_traffic(buckets, rank, shard_groups=chosen) == StepTraffic(1, shard, 1, shard, 1, shard)
        wide = [buckets[0]._replace(itemsize=8)]
        assert step_traffic(buckets, rank, shard_groups=chosen, summed=wide).all_reduce_bytes == 2 * shard
    # Each of several micro-batches is reduced.
    thrice = step_traffic(buckets, 0, shard_groups=chosen, micro_batches=3)
    assert thrice == StepTraffic(3, 3 * shard, 1, shard, 3, 3 * shard)
