from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.layout import BucketLayout, LayoutPolicy, ParameterSpec, Partition, plan_buckets
from lightning_parstrat.core.memory import (
    BucketMemory,
    HeldBytes,
    StepTraffic,
    held_between_micro_batches,
    held_bytes,
    owned_bytes,
    parameter_bytes,
    step_traffic,
)
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology

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


def send_everything(buckets: tuple[BucketLayout, ...]) -> tuple[Counter[int], Counter[int]]:
    """Per rank, the bytes sent when every element takes the way of its bucket, out and home, one by one."""
    reduced, gathered = Counter[int](), Counter[int]()
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
    return reduced, gathered


@given(plans)
def test_traffic_is_that_of_every_element_on_its_way(buckets: tuple[BucketLayout, ...]) -> None:
    reduced, gathered = send_everything(buckets)
    collectives = sum(1 for bucket in buckets if bucket.world_size > 1)
    for rank in range(buckets[0].world_size if buckets else 1):
        expected = StepTraffic(collectives, reduced[rank], collectives, gathered[rank], 0)
        assert step_traffic(buckets, rank) == expected


@given(plans)
def test_all_ranks_together_send_every_bucket_to_all_but_one_and_less_than_once_more(
    buckets: tuple[BucketLayout, ...],
) -> None:
    world_size = buckets[0].world_size if buckets else 1
    traffic = [step_traffic(buckets, rank) for rank in range(world_size)]
    size = sum(bucket.numel * bucket.itemsize for bucket in buckets)
    even = sum(bucket.numel * bucket.itemsize for bucket in buckets if bucket.is_even)
    out = sum(one.reduce_scatter_bytes for one in traffic) - (world_size - 1) * size
    home = sum(one.all_gather_bytes for one in traffic) - (world_size - 1) * size
    assert out == home and 0 <= out <= size - even


@given(plans)
def test_owned_bytes_are_those_of_the_parameters_elements_in_the_shard(buckets: tuple[BucketLayout, ...]) -> None:
    counted = Counter[int]()
    for bucket in buckets:
        for slot in bucket.slots:
            for element in range(slot.offset, slot.offset + slot.numel):
                counted[bisect_right(bucket.bounds, element) - 1] += bucket.itemsize
    world_size = buckets[0].world_size if buckets else 1
    owned = [owned_bytes(buckets, rank) for rank in range(world_size)]
    assert owned == [counted[rank] for rank in range(world_size)]
    assert sum(owned) == parameter_bytes(buckets)


@pytest.mark.parametrize(
    ("sizes", "world_size", "partition", "sent", "owned"),
    [
        # 1000 float32 elements on 4 ranks: 256 each, the last rank's shard ends in 24 elements of padding.
        ([(1000, "float32")], 4, "element", [(1, 3072, 1, 3072)] * 4, [1024, 1024, 1024, 928]),
        # 1000 float32 elements are padded to 1024, the last 16 of which are the last rank's; who owns all others gets
        # the other half of them, and hands it on.
        ([(1000, "float32")], 2, "parameter", [(1, 2048, 1, 2048 + 1984), (1, 2048 + 1984, 1, 2048)], [4000, 0]),
        (
            [(1000, "float32"), (32, "float32")],
            3,
            "parameter",
            # 1056 elements, 352 of which each sums up: owned are 1008, 32, and 16 of padding.
            [
                (1, 2 * 1408, 1, 2 * 1408 + 4 * (1008 - 352)),
                (1, 2 * 1408 + 1408, 1, 2 * 1408 + 128),
                (1, 2 * 1408 + 1408 - 64, 1, 2 * 1408),
            ],
            [4000, 128, 0],
        ),
        ([(32, "float32"), (64, "bfloat16")], 2, "element", [(2, 128, 2, 128)] * 2, [128, 128]),
        ([(1000, "float32")], 1, "element", [(0, 0, 0, 0)], [4000]),
        ([(1000, "float32")], 1, "parameter", [(0, 0, 0, 0)], [4000]),
        ([], 2, "element", [(0, 0, 0, 0)] * 2, [0, 0]),
    ],
)
def test_known_plans(
    sizes: list[tuple[int, str]],
    world_size: int,
    partition: Partition,
    sent: list[tuple[int, int, int, int]],
    owned: list[int],
) -> None:
    buckets = plan(sizes, world_size, 2**20, partition)
    assert [step_traffic(buckets, rank) for rank in range(world_size)] == [(*one, 0, 0, 0) for one in sent]
    assert [owned_bytes(buckets, rank) for rank in range(world_size)] == owned
    assert parameter_bytes(buckets) == sum(owned)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_without_padding_traffic_is_the_ring_all_reduces(world_size: int) -> None:
    size = 16 * world_size * 10
    buckets = plan([(size, "float32")], world_size, 2**20, "element")
    ring_all_reduce = 2 * (world_size - 1) * size * 4 // world_size
    for rank in range(world_size):
        traffic = step_traffic(buckets, rank)
        assert traffic.reduce_scatter_bytes + traffic.all_gather_bytes == ring_all_reduce


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
        assert passed_on == 0
        # Nobody is a hot spot.
        assert len(set(by_rank)) == 1


def test_flat_exchange_sends_as_often_between_nodes_as_there_are_ranks_on_them() -> None:
    # Nodes of different size exchange flatly.
    topology = Topology.of("aab")
    buckets = plan([(480, "float32")], 3, 2**20, "element")
    assert [step_traffic(buckets, rank, topology).between_nodes_bytes for rank in range(3)] == [1280, 1280, 2560]


@pytest.mark.parametrize(
    ("itemsize", "shard_itemsize", "masters", "state", "expected"),
    [
        # Adam in fp32 on four ranks: 4 + 4/4 + 8/4 bytes per parameter.
        (4, 4, False, 8.0, HeldBytes(4000, 0, 2000, 1000)),
        # bf16 with masters in fp32: 2 + 4/4 + 8/4, and the gradient's shard in fp32.
        (2, 4, True, 8.0, HeldBytes(2000, 1000, 2000, 1000)),
        (4, 4, False, 0.0, HeldBytes(4000, 0, 0, 1000)),
    ],
)
def test_what_is_held_between_steps(
    itemsize: int, shard_itemsize: int, masters: bool, state: float, expected: HeldBytes
) -> None:
    spec = ParameterSpec(name="p", shape=(1000,), dtype="d", itemsize=itemsize, group=None)
    policy = LayoutPolicy(world_size=4, bucket_cap_bytes=2**20, alignment_bytes=1)
    (layout,) = plan_buckets([spec], policy)
    memory = [BucketMemory(layout, shard_itemsize, masters, state)]
    for rank in range(4):
        assert held_bytes(memory, rank) == expected
    assert expected.total == sum(expected)


@pytest.mark.parametrize(
    ("itemsize", "shard_itemsize", "masters", "in_shards", "expected"),
    [
        # Adam in fp32 on four ranks: 4 bytes per parameter, or 4/4.
        (4, 4, False, False, HeldBytes(4000, 0, 2000, 0, 4000)),
        (4, 4, False, True, HeldBytes(4000, 0, 2000, 1000)),
        # Sums of 16 bits are in fp32, with master weights or without.
        (2, 4, True, False, HeldBytes(2000, 1000, 2000, 0, 2000)),
        (2, 4, True, True, HeldBytes(2000, 1000, 2000, 1000)),
        (2, 2, False, True, HeldBytes(2000, 0, 2000, 1000)),
        (8, 8, False, True, HeldBytes(8000, 0, 2000, 2000)),
    ],
)
def test_what_is_held_between_micro_batches(
    itemsize: int, shard_itemsize: int, masters: bool, in_shards: bool, expected: HeldBytes
) -> None:
    spec = ParameterSpec(name="p", shape=(1000,), dtype="d", itemsize=itemsize, group=None)
    (layout,) = plan_buckets([spec], LayoutPolicy(world_size=4, bucket_cap_bytes=2**20, alignment_bytes=1))
    memory = [BucketMemory(layout, shard_itemsize, masters, 8.0)]
    assert [held_between_micro_batches(memory, rank, in_shards) for rank in range(4)] == [expected] * 4


def test_padding_is_held_but_has_no_state() -> None:
    (layout,) = plan([(1000, "float32")], 4, 2**20, "element")
    held = held_bytes([BucketMemory(layout, 4, False, 8.0)], 3)
    # The last of four shards of 256 elements ends in 24 of padding.
    assert held == HeldBytes(parameters=4096, master_weights=0, optimizer_state=8 * 232, gradient_shards=1024)


@pytest.mark.parametrize(("keys", "groups"), [("aabb", (0, 1)), ("abab", (0, 2))])
def test_shard_groups_send_within_the_group_and_a_shard_between(keys: str, groups: tuple[int, int]) -> None:
    # 1000 float32 elements in two shards of 512 (padding included), of which each of two holders sums one half.
    others = tuple(rank for rank in range(4) if rank not in groups)
    buckets = plan([(1000, "float32")], 2, 2**20, "element")
    shard = buckets[0].shard_numel(0) * 4
    chosen = ShardGroups((groups, others))
    for rank in range(4):
        between_nodes = 2 * shard // 2
        expected = StepTraffic(1, shard, 1, shard, between_nodes, 1, 2 * shard // 2)
        assert step_traffic(buckets, rank, Topology.of(keys), shard_groups=chosen) == expected
        wide = [buckets[0]._replace(itemsize=8)]
        assert step_traffic(buckets, rank, shard_groups=chosen, summed=wide).all_reduce_bytes == 2 * shard


def test_micro_batches_that_are_reduced_send_gradients_each() -> None:
    chosen = ShardGroups(((0, 1), (2, 3)))
    buckets = plan([(1000, "float32")], 2, 2**20, "element")
    topology = Topology.of("aabb")
    once, thrice = (step_traffic(buckets, 0, topology, shard_groups=chosen, micro_batches=many) for many in (1, 3))
    assert thrice == StepTraffic(
        reduce_scatters=3,
        reduce_scatter_bytes=3 * once.reduce_scatter_bytes,
        all_gathers=1,
        all_gather_bytes=once.all_gather_bytes,
        # Groups are the nodes.
        between_nodes_bytes=3 * once.between_nodes_bytes,
        all_reduces=3,
        all_reduce_bytes=3 * once.all_reduce_bytes,
    )
    assert once.reduce_scatter_bytes > 0 and once.all_reduce_bytes == once.between_nodes_bytes > 0


def test_of_copies_of_all_only_the_sum_is_sent() -> None:
    buckets = plan([(1000, "float32")], 1, 2**20, "element")
    alone = ShardGroups(((0,), (1,), (2,), (3,)))
    sent = [step_traffic(buckets, rank, shard_groups=alone) for rank in range(4)]
    assert all(
        one.reduce_scatters == one.all_gathers == one.reduce_scatter_bytes == one.all_gather_bytes == 0 for one in sent
    )
    assert sum(one.all_reduce_bytes for one in sent) == 2 * 3 * buckets[0].numel * 4
