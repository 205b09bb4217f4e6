"""How large buckets are by default, and how many are on their way."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.bucket_cap import default_bucket_cap
from lightning_parstrat.core.policy import ShardingPolicy

MIB = 2**20


def test_the_cap_is_a_root_within_bounds() -> None:
    for device_type, model_mib, ranks, copies, expected_mib in (
        # Small models have the smallest; on GPUs that is 64 MiB.
        ("cpu", 1, 32, 1, 8),
        ("cuda", 1, 2, 1, 64),
        ("cuda", 100, 1024, 1, 64),
        # 33.6M parameters in fp32 on two CPUs.
        ("cpu", 128, 2, 1, 8),
        # A rank of CPUs adds a thirty-second of a MiB: sqrt(1335 * 48) = 253, sqrt(1335 * 91) = 349.
        ("cpu", 1335, 48 * 32, 1, 128),
        ("cpu", 1335, 91 * 32, 1, 256),
        ("cpu", 13_500, 26 * 32, 1, 512),
        # No more than half of the model, nor than 512 MiB.
        ("cpu", 100, 700 * 32, 1, 32),
        ("cuda", 300, 1024, 1, 128),
        ("cpu", 1_000_000, 700 * 32, 1, 512),
        ("cuda", 1_000_000, 1024, 1, 512),
        # Groups have shorter rings, and a tree between them.
        ("cuda", 1354, 8, 64, 128),
        ("cuda", 1354, 32, 16, 128),
        ("cuda", 1354, 64, 8, 256),
        ("cuda", 12_875, 64, 8, 512),
    ):
        cap = default_bucket_cap(model_mib * MIB, ranks, device_type, copies)
        assert cap == expected_mib * MIB, (device_type, model_mib, ranks, copies)


@given(
    device_type=st.sampled_from(["cpu", "cuda"]),
    model_bytes=st.integers(1, 2**45),
    ranks=st.integers(1, 2**13),
    copies=st.integers(1, 2**6),
)
def test_the_cap_is_a_power_of_two_that_never_falls_with_ranks_or_model(
    device_type: str, model_bytes: int, ranks: int, copies: int
) -> None:
    smallest = {"cpu": 8, "cuda": 64}[device_type] * MIB
    cap = default_bucket_cap(model_bytes, ranks, device_type, copies)
    assert cap.bit_count() == 1 and smallest <= cap <= 512 * MIB
    assert cap == smallest or cap <= model_bytes / 2
    assert cap <= default_bucket_cap(2 * model_bytes, ranks, device_type, copies)
    assert cap <= default_bucket_cap(model_bytes, 2 * ranks, device_type, copies)


def test_the_cap_is_in_mebibytes_and_at_least_a_byte() -> None:
    for cap_mb, expected in (
        (8, 8388608),
        (0.5, 524288),
        (1e-9, 1),
        (1 / 2**20, 1),
        (2.5, 2621440),
        (1e6, 10**6 * 2**20),
    ):
        cap = ShardingPolicy(bucket_cap_mb=cap_mb).bucket_cap_bytes(10**12, 1024, "cuda", 1)
        assert cap == expected and isinstance(cap, int)


def test_on_a_gpu_there_always_is_a_bound() -> None:
    for value, on_cpu, on_gpu in (("auto", None, 4), (None, None, sys.maxsize), (1, 1, 1), (7, 7, 7)):
        policy = ShardingPolicy(max_inflight_buckets=value)
        assert (policy.bound_in_flight("cpu"), policy.bound_in_flight("cuda")) == (on_cpu, on_gpu)
