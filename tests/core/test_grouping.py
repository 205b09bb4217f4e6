"""How large buckets are by default, and what small parameters travel with."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.cost_model import AlphaBeta, assumed_wire
from lightning_parstrat.core.grouping import default_bucket_cap, group_by_readiness
from lightning_parstrat.core.layout import ParameterSpec, group_by_cap, take_small_along

MIB = 2**20


def wire(bytes_in_latency: float) -> AlphaBeta:
    return AlphaBeta(latency_seconds=1e-9 * bytes_in_latency, seconds_per_byte=1e-9)


def test_the_cap_is_a_root_within_bounds() -> None:
    for device_type, model_mib, mib_in_latency, expected_mib in (
        # Small models, and wires without latency, have the smallest; on GPUs that is 64 MiB.
        ("cpu", 1, 1, 8),
        ("cpu", 10_000, 0, 8),
        ("cuda", 1, 1, 64),
        ("cuda", 100, 700, 64),
        ("cuda", 10_000, 0, 64),
        # sqrt(1335 * 48) = 253, sqrt(1335 * 91) = 349.
        ("cpu", 1335, 48, 128),
        ("cpu", 1335, 91, 256),
        ("cpu", 13_500, 26, 512),
        ("cuda", 1335, 48, 128),
        # No more than half of the model, nor than 512 MiB.
        ("cpu", 100, 700, 32),
        ("cuda", 300, 700, 128),
        ("cpu", 1_000_000, 700, 512),
        ("cuda", 1_000_000, 700, 512),
    ):
        cap = default_bucket_cap(model_mib * MIB, wire(mib_in_latency * MIB), device_type)
        assert cap == expected_mib * MIB, (device_type, model_mib, mib_in_latency)
    only_latency = AlphaBeta(latency_seconds=1.0, seconds_per_byte=0.0)
    assert default_bucket_cap(256 * MIB, only_latency) == 128 * MIB
    # 33.6M parameters in fp32, over 1 Gbit/s: a latency of 1 ms and 8 ns a byte.
    for two_cpus in (AlphaBeta(latency_seconds=1e-3, seconds_per_byte=8e-9), assumed_wire(2, "cpu")):
        assert default_bucket_cap(134_000_000, two_cpus) == 8 * MIB


@given(
    model_bytes=st.integers(1, 2**45),
    latency=st.floats(0, 10),
    slope=st.floats(0, 1e-6),
)
def test_the_cap_is_a_power_of_two_within_bounds_whatever_the_wire(
    model_bytes: int, latency: float, slope: float
) -> None:
    cap = default_bucket_cap(model_bytes, AlphaBeta(latency_seconds=latency, seconds_per_byte=slope))
    assert cap.bit_count() == 1 and 8 * MIB <= cap <= 512 * MIB
    assert cap == 8 * MIB or cap <= model_bytes / 2


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_cap_never_falls_with_ranks_or_model(device_type: str) -> None:
    ranks = [2**power for power in range(1, 11)]
    models = [10**power for power in range(5, 12)]
    caps = [
        [default_bucket_cap(model, assumed_wire(world, device_type), device_type) for world in ranks]
        for model in models
    ]
    assert all(row == sorted(row) for row in caps)
    assert all(list(column) == sorted(column) for column in zip(*caps, strict=True))
    assert caps[0][0] == {"cpu": 8, "cuda": 64}[device_type] * MIB and caps[-1][-1] > caps[0][0]


@pytest.mark.parametrize(
    ("model_bytes", "groups", "mib"),
    [(1_420_000_000, 8, 128), (1_420_000_000, 32, 128), (1_420_000_000, 64, 256), (13_500_000_000, 64, 512)],
)
def test_the_cap_of_shard_groups_follows_from_their_size(model_bytes: int, groups: int, mib: int) -> None:
    wire = assumed_wire(groups, "cuda", 512 // groups)
    assert default_bucket_cap(model_bytes, wire) == mib * MIB
    of_all = assumed_wire(512, "cuda")
    assert assumed_wire(groups, "cuda").latency_seconds < wire.latency_seconds < of_all.latency_seconds
    assert assumed_wire(512, "cuda", 1) == of_all


@pytest.mark.parametrize(
    ("sizes_in_kib", "expected"),
    [
        ([], []),
        ([1, 2, 3], [[0], [1], [2]]),
        # Norms between matrices, and one before the first.
        ([8, 90_000, 8, 90_000, 8, 8], [[0, 1, 2], [3, 4, 5]]),
        # Not more than a thirty-second: 64 KiB of 2 MiB.
        ([2048, 60, 4, 1], [[0, 1, 2], [3]]),
        ([65, 2048], [[0], [1]]),
        # Nobody takes along what is not small, or has no bucket of its own.
        ([90_000, 90_000], [[0], [1]]),
        ([1024, 8, 1024], [[0], [1], [2]]),
    ],
)
def test_large_ones_take_small_ones_along(sizes_in_kib: list[int], expected: list[list[int]]) -> None:
    assert take_small_along([1024 * size for size in sizes_in_kib], cap_bytes=MIB) == expected


def test_what_is_small_in_all_has_buckets_of_its_own() -> None:
    assert take_small_along([1, 1000, 1], cap_bytes=4) == [[0], [1], [2]]


def specs(*kib: int) -> list[ParameterSpec]:
    return [
        ParameterSpec(name=f"p{index}", shape=(size * 256,), dtype="torch.float32", itemsize=4, group="float32")
        for index, size in enumerate(kib)
    ]


def test_no_norm_between_matrices_travels_alone() -> None:
    layer = [16_000, 8, 16_000, 8]
    parameters = specs(*layer * 4)
    assert group_by_cap(parameters, 8 * MIB) == [[2 * pair, 2 * pair + 1] for pair in range(8)]
    ready = [1e-7 * index for index in range(len(parameters))]
    for cost in (None, wire(1000)):
        groups = group_by_readiness(parameters, ready, 8 * MIB, cost)
        assert groups == [[2 * pair, 2 * pair + 1] for pair in range(8)]


def test_a_matrix_does_not_wait_for_a_norm_that_is_late() -> None:
    parameters = specs(16_000, 8, 16_000, 8)
    # The first norm comes a second later, the other one at once; a latency is a microsecond.
    ready = [0.0, 1.0, 1.1, 1.1]
    assert group_by_readiness(parameters, ready, 8 * MIB, wire(1000)) == [[0], [1], [2, 3]]


def test_what_is_never_ready_holds_up_nobody() -> None:
    parameters = specs(16_000, 8, 16_000)
    assert group_by_readiness(parameters, [0.0, math.inf, 1.0], 8 * MIB, wire(1000)) == [[0], [2], [1]]
