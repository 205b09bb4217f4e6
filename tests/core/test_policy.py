import dataclasses
import math
import sys
from typing import Any

import pytest
import torch

from lightning_parstrat.core.policy import GradientPolicy, ShardingPolicy, WaitPolicy

CHOICES = {
    "partial_window": ("exact", "lightning"),
    "clip_scope": ("optimizer", "global"),
    "nonfinite_grads": ("propagate", "skip", "raise"),
}
NO_CHOICES = ("", "Exact", "Global", " skip", "average", None, True, 0, 1.0, ["exact"])
# A policy, its argument, what it refuses, and how its message ends.
REFUSED: list[tuple[type[Any], str, tuple[Any, ...], str]] = [
    (
        ShardingPolicy,
        "bucket_cap_mb",
        (0, -1, -0.5, math.nan, math.inf, -math.inf, True, "8", None, [8]),
        "Must be a positive number of MiB, such as 8, or 'auto'.",
    ),
    (
        ShardingPolicy,
        "partition",
        ("rows", "", "Element", None, 1, ["element"]),
        "Must be one of ('auto', 'element', 'parameter').",
    ),
    *(
        (ShardingPolicy, name, ("fp16", "bfloat16", True, torch.float16, ""), "Must be 'bf16', torch.bfloat16, or")
        for name in ("comm_dtype", "gather_dtype")
    ),
    (ShardingPolicy, "max_inflight_buckets", (0, -1, 1.5, True, "2", math.inf), ">= 1, 'auto' or None."),
    *((GradientPolicy, name, NO_CHOICES, f"Must be one of {allowed}.") for name, allowed in CHOICES.items()),
    (
        GradientPolicy,
        "norm_type",
        (0, 0.0, -1, -0.5, -math.inf, math.nan, True, False, "2", "-inf", None, [2.0], 2j),
        "Must be a positive number, such as 2.0, or inf.",
    ),
    (WaitPolicy, "stall_warning_seconds", (0, -1.0, math.nan, math.inf, True, "15", [15]), "or None for no warning."),
]


@pytest.mark.parametrize(("policy", "name", "values", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_is_not_allowed_is_refused_by_name_and_value(
    policy: type[Any], name: str, values: tuple[Any, ...], message: str
) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            policy(**{name: value})
        assert str(error.value).startswith(f"Invalid {name}: {value!r}. Must be "), value
        assert message in str(error.value)
    # A policy once checked cannot change.
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy(), name, values[0])


def test_parameters_cannot_travel_rounded_where_no_shard_is_kept_in_fp32() -> None:
    with pytest.raises(ValueError, match="master_weights=False forgoes"):
        ShardingPolicy(gather_dtype="bf16", master_weights=False)


def test_what_is_allowed() -> None:
    for partition in ("auto", "element", "parameter"):
        assert ShardingPolicy(partition=partition).partition == partition
    # The others are what they are by default: one big batch, clipped per optimizer, as `ddp` but for short windows.
    defaults = {"partial_window": "exact", "clip_scope": "optimizer", "norm_type": 2.0, "nonfinite_grads": "propagate"}
    allowed = {**CHOICES, "norm_type": (0.5, 1, 2, 2.0, 3.5, math.inf)}
    for name, value in ((name, value) for name, values in allowed.items() for value in values):
        assert dataclasses.asdict(GradientPolicy(**{name: value})) == {**defaults, name: value}
    with pytest.raises(TypeError, match="positional"):
        GradientPolicy("exact")  # type: ignore[misc]
    assert WaitPolicy().stall_warning_seconds == 15.0
    for value in (None, 1):
        assert WaitPolicy(stall_warning_seconds=value).stall_warning_seconds == value


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
