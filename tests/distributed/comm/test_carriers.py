"""Sums and gathers are right for any carrier, topology, bounds and dtype, with many in flight at once.

Exchanges are drawn from a seed. A failure names the seed and the number of the exchange.
"""

import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.core.layout import even_bounds
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.comm import backends
from lightning_parstrat.distributed.comm.backends import NativeCollectives
from lightning_parstrat.distributed.comm.collectives import (
    Collectives,
    PairwiseCollectives,
    TwoLevelCollectives,
)
from lightning_parstrat.distributed.comm.process_groups import ProcessGroups, process_groups
from tests.comparing import assert_same
from tests.pool import RankPool

CPU = torch.device("cpu")
EXCHANGES = 12


class Carrier(NamedTuple):
    """Collectives, and the ranks between which they are tried.

    Attributes:
        kind: The class.
        nodes: The node of every rank.
        choice: The ``shard_group``.
        widens: Whether gradients are sent in the dtype in which they are summed.
    """

    kind: type[Collectives]
    nodes: str
    choice: Any = "all"
    widens: bool = False

    @property
    def topology(self) -> Topology:
        return Topology.of(self.nodes)

    @property
    def groups(self) -> ShardGroups:
        return ShardGroups.chosen(self.choice, self.topology)

    @property
    def is_native(self) -> bool:
        return self.kind is NativeCollectives

    @property
    def sums_by_node(self) -> bool:
        """Whether the sum of a node is sent to others, in the dtype of gradients."""
        return self.kind is TwoLevelCollectives

    @property
    def sums_in_rank_order(self) -> bool:
        """Whether sums are made in the order of the ranks, to the last bit, for any bounds."""
        return self.kind is PairwiseCollectives and self.groups.copies == 1

    def make(self, group: dist.ProcessGroup) -> Collectives:
        if self.is_native:
            # CPU ranks do not get them by default.
            return NativeCollectives(group, self.groups, self.widens)
        chosen = backends.make_collectives(group, CPU, self.topology, self.groups)
        assert type(chosen) is self.kind
        return chosen


GROUPED: list[tuple[str, Any]] = [("aaaa", 2), ("abab", 1), ("abba", "node"), ("aaabbb", 2), ("ababab", "node")]

CARRIERS = {
    "one rank": Carrier(PairwiseCollectives, "a"),
    "pairs of 2": Carrier(PairwiseCollectives, "ab"),
    "pairs of 3": Carrier(PairwiseCollectives, "aaa"),
    "pairs of 4": Carrier(PairwiseCollectives, "aaaa"),
    "pairs on unequal nodes": Carrier(PairwiseCollectives, "aaaabb"),
    **{f"two levels {nodes}": Carrier(TwoLevelCollectives, nodes) for nodes in ("aabb", "abba", "aabbcc", "ababab")},
    "pairs of 5": Carrier(PairwiseCollectives, "aaaaa"),
    **{f"groups of {choice} {nodes}": Carrier(PairwiseCollectives, nodes, choice) for nodes, choice in GROUPED},
    **{f"native groups {choice} {nodes}": Carrier(NativeCollectives, nodes, choice) for nodes, choice in GROUPED},
    "native of 2": Carrier(NativeCollectives, "aa"),
    "native of 3": Carrier(NativeCollectives, "aab"),
    "native, widening": Carrier(NativeCollectives, "aabb", widens=True),
}

DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.complex64, torch.complex64),
    (torch.complex64, torch.complex128),
]
"""The dtype of the buffer, and that of the sum."""


class Exchange(NamedTuple):
    number: int
    bounds: Sequence[int]
    narrow: torch.dtype
    wide: torch.dtype
    is_exact: bool
    """Whether sums do not depend on their order."""

    @classmethod
    def drawn(cls, draw: random.Random, number: int, shards: int) -> "Exchange":
        numel = shards * draw.randint(1, 300 if number % 5 else 60_000)
        bounds: Sequence[int] = even_bounds(numel, shards)
        if draw.random() < 0.5:
            # Some of them empty, now and then all but one.
            edges = [0, numel] if draw.random() < 0.3 else [draw.randint(0, numel) for _ in range(shards)]
            bounds = (0, *sorted(draw.choice(edges) for _ in range(shards - 1)), numel)
        return cls(number, bounds, *draw.choice(DTYPES), draw.random() < 0.7)

    def given(self, rank: int, seed: int) -> Tensor:
        """The buffer of a rank: small integers, or real numbers if sums may depend on their order.

        If sums are made in a wider dtype, rank 0 gives a number to which integers cannot be added in the narrow one.
        """
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * self.number + rank)
        numel = self.bounds[-1]
        values = torch.randint(-4, 5, (numel,), generator=generator).double()
        if not self.is_exact:
            values = torch.randn(numel, generator=generator, dtype=torch.float64)
        elif rank == 0 and self.wide != self.narrow:
            values = torch.full((numel,), 2 / torch.finfo(self.narrow).eps, dtype=torch.float64)
        return (values * (1 + 0.5j) if self.narrow.is_complex else values).to(self.narrow)

    def total(self, carrier: Carrier, seed: int) -> Tensor:
        first, *others = [self.given(rank, seed).to(self.wide) for rank in range(len(carrier.nodes))]
        return sum(others, first)


def exchanged(carrier: Carrier, seed: int, groups: ProcessGroups | None = None) -> dict[int, Tensor]:
    """Checks what comes of some exchanges; returns this rank's sums by number where their order may matter."""
    groups, rank = groups or process_groups(), dist.get_rank()
    draw, of_rank = random.Random(seed), random.Random(1000 * seed + rank)
    by_gradients, by_parameters = carrier.make(groups.gradients), carrier.make(groups.parameters)
    by_gradients.connect(CPU)
    by_parameters.connect(CPU, reduces=False)
    place, in_flight = by_gradients.place, []
    exchanges = [Exchange.drawn(draw, number, by_gradients.shard_count) for number in range(EXCHANGES)]
    for one in exchanges:
        own = slice(one.bounds[place.shard], one.bounds[place.shard + 1])
        shard = torch.full((own.stop - own.start,), -1.0).to(one.wide)
        # What the ranks of this group have is gathered, and no other group's.
        whole, gathered = one.given(place.copy, seed), torch.full((one.bounds[-1],), 99.0).to(one.narrow)
        gathered[own] = whole[own]
        # Equal parts need not be given.
        bounds = None if isinstance(one.bounds, range) and draw.random() < 0.5 else one.bounds
        reduction = by_gradients.reduce_scatter(one.given(rank, seed), shard, bounds)
        gathering = draw.choice([by_gradients, by_parameters]).all_gather(gathered, bounds)
        # What is sent of a node's sum is rounded.
        is_exact = one.is_exact and not (carrier.sums_by_node and one.narrow != one.wide)
        in_flight.append((one, reduction, shard, one.total(carrier, seed)[own], is_exact))
        in_flight.append((one, gathering, gathered, whole, True))
        if of_rank.random() < 0.3:
            reduction.is_completed()
        time.sleep(of_rank.choice((0.0, 0.0, 0.003)))
    sums = {}
    # In another order than launched, and another one on every rank.
    of_rank.shuffle(in_flight)
    for one, work, found, expected, is_exact in in_flight:
        work.wait()
        where = f"{seed=}, {one}"
        # How far sums are from each other that are made in different orders.
        narrow = one.narrow if carrier.sums_by_node else one.wide
        rounding = 0.0 if is_exact or carrier.sums_in_rank_order else 32 * torch.finfo(narrow).eps
        try:
            assert_same(found, expected, atol=rounding, rtol=rounding)
        except AssertionError as error:
            raise AssertionError(where) from error
        sums.update({} if is_exact else {one.number: found.clone()})
        if not carrier.is_native:
            # Waiting again does not write again.
            found.zero_()
            work.wait()
            assert work.is_completed() and not found.any(), where
    return sums


def exchanged_by(names: Sequence[str], seeds: Sequence[int], on_demand: bool = False) -> dict[Any, dict[int, Tensor]]:
    found = {}
    for name in names:
        groups = None
        if on_demand:
            # As in a large world: two ranks are connected at their first message. No other test has this timeout.
            with mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
                groups = process_groups(timedelta(seconds=100 + list(CARRIERS).index(name)))
        found |= {(name, seed): exchanged(CARRIERS[name], seed, groups) for seed in seeds}
    return found


def check_exchanges(pool: RankPool, names: Sequence[str], seeds: Sequence[int], on_demand: bool = False) -> None:
    sums = pool.run(len(CARRIERS[names[0]].nodes), exchanged_by, names, seeds, on_demand)
    for rank, found in enumerate(sums):
        for name, seed in found:
            # To the last bit: copies of the state must stay the same in all groups.
            holder = CARRIERS[name].groups.holders(rank)[0]
            assert_same(found[name, seed], sums[holder][name, seed])


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["one", "more"])
@pytest.mark.parametrize("world_size", range(1, 7))
def test_sums_and_gathers_are_right(pool: RankPool, world_size: int, seeds: tuple[int, ...]) -> None:
    check_exchanges(pool, [name for name, one in CARRIERS.items() if len(one.nodes) == world_size], seeds)


@pytest.mark.parametrize("world_size", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_ranks_that_connect_on_demand_do_not_wait_for_each_other(pool: RankPool, world_size: int) -> None:
    names = [name for name, one in CARRIERS.items() if len(one.nodes) == world_size and "native" not in name]
    check_exchanges(pool, names, (0,), on_demand=True)


def on_a_gpu() -> str:
    with pytest.raises(ValueError) as refused:
        backends.make_collectives(process_groups().gradients, torch.device("cuda", 0))
    return str(refused.value)


def test_a_group_that_sends_from_the_host_is_refused_on_a_gpu(pool: RankPool) -> None:
    for message in pool.run(2, on_a_gpu):
        assert "process_group_backend='gloo'" in message and "`ddp`" in message
