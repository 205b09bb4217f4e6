"""What ``tests/accounting.py`` says that a step sends, beside every element on its way; and who owns what."""

from bisect import bisect_right
from collections import Counter

import pytest
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
from lightning_parstrat.core.topology import Topology
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
            # Everybody sends it to who sums it up, who sends it to its owner; the same way home.
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
        expected = StepTraffic(collectives, reduced[rank], collectives, gathered[rank], 0)
        assert step_traffic(buckets, rank) == expected
        assert owned_bytes(buckets, rank) == owned[rank]
    assert parameter_bytes(buckets) == owned.total()


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("keys", ["aabb", "abab", "aabbcc", "aaaabbbb"])
def test_in_two_levels_a_node_sends_each_bucket_once_less_its_own_part(keys: str, partition: Partition) -> None:
    topology = Topology.of(keys)
    nodes, ranks = len(set(keys)), len(keys)
    buckets = plan([(480, "float32"), (96, "bfloat16"), (7, "float32")], ranks, 2**20, partition)
    size = sum(bucket.numel * bucket.itemsize for bucket in buckets)
    by_rank = [step_traffic(buckets, rank, topology) for rank in range(ranks)]
    # What is passed on to owners of whole parameters goes flatly, as much as each element's way is long.
    flat = [step_traffic(buckets, rank) for rank in range(ranks)]
    passed_on = sum(one.reduce_scatter_bytes for one in flat) - (ranks - 1) * size
    per_node = ranks // nodes
    assert sum(one.reduce_scatter_bytes for one in by_rank) == (
        (per_node - 1) * nodes * size + (nodes - 1) * size + passed_on
    )
    between = sum(one.between_nodes_bytes for one in by_rank)
    assert 0 <= between - 2 * (nodes - 1) * size <= 2 * passed_on
    if partition == "element":
        # Nobody is a hot spot.
        assert passed_on == 0 and len(set(by_rank)) == 1


@pytest.mark.parametrize(("keys", "groups"), [("aabb", (0, 1)), ("abab", (0, 2))])
def test_shard_groups_send_within_the_group_and_a_shard_between(keys: str, groups: tuple[int, int]) -> None:
    # 1000 float32 elements in two shards of 512 (padding included), of which each of two holders sums one half.
    others = tuple(rank for rank in range(4) if rank not in groups)
    buckets = plan([(1000, "float32")], 2, 2**20, "element")
    shard = buckets[0].shard_numel(0) * 4
    chosen = ShardGroups((groups, others))
    for rank in range(4):
        expected = StepTraffic(1, shard, 1, shard, shard, 1, shard)
        assert step_traffic(buckets, rank, Topology.of(keys), shard_groups=chosen) == expected
        wide = [buckets[0]._replace(itemsize=8)]
        assert step_traffic(buckets, rank, shard_groups=chosen, summed=wide).all_reduce_bytes == 2 * shard
    # Where micro-batches are reduced, gradients go out each time.
    thrice = step_traffic(buckets, 0, shard_groups=chosen, micro_batches=3)
    assert thrice == StepTraffic(3, 3 * shard, 1, shard, 0, 3, 3 * shard)
