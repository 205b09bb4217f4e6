import sys

from lightning_parstrat.core.policy import ShardingPolicy


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
