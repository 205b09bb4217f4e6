import dataclasses
import math
import sys
from typing import Any

import pytest
import torch

from lightning_parstrat.core.cost_model import assumed_wire
from lightning_parstrat.core.policy import GradientPolicy, ShardingPolicy, WaitPolicy


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, -math.inf, True, "8", None, [8]])
def test_a_cap_that_is_no_positive_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        ShardingPolicy(bucket_cap_mb=value)
    assert f"bucket_cap_mb: {value!r}" in str(error.value)
    assert "positive number of MiB" in str(error.value)


@pytest.mark.parametrize("value", ["rows", "", "Element", None, 1, ["element"]])
def test_an_unknown_partition_is_refused_with_the_allowed_ones(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        ShardingPolicy(partition=value)
    assert f"partition: {value!r}" in str(error.value)
    assert "('auto', 'element', 'parameter')" in str(error.value)


@pytest.mark.parametrize("partition", ["auto", "element", "parameter"])
def test_allowed_partitions(partition: Any) -> None:
    assert ShardingPolicy(partition=partition).partition == partition


@pytest.mark.parametrize(
    ("bucket_cap_mb", "expected"),
    [(8, 8388608), (0.5, 524288), (1e-9, 1), (1 / 2**20, 1), (2.5, 2621440), (1e6, 10**6 * 2**20)],
)
def test_the_cap_is_in_mebibytes_and_at_least_a_byte(bucket_cap_mb: float, expected: int) -> None:
    cap = ShardingPolicy(bucket_cap_mb=bucket_cap_mb).bucket_cap_bytes(10**12, assumed_wire(1024, "cuda"), "cuda")
    assert cap == expected
    assert isinstance(cap, int)


@pytest.mark.parametrize("name", ["reduce_dtype", "gather_dtype"])
@pytest.mark.parametrize("value", ["fp16", "bfloat16", True, torch.bfloat16, ""])
def test_an_unknown_dtype_on_the_wire_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        ShardingPolicy(**{name: value})
    assert f"{name}: {value!r}" in str(error.value)
    assert "'bf16', or None" in str(error.value)


def test_parameters_cannot_travel_rounded_where_no_shard_is_kept_in_fp32() -> None:
    with pytest.raises(ValueError, match="master_weights=False forgoes"):
        ShardingPolicy(gather_dtype="bf16", master_weights=False)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", math.inf])
def test_a_bound_on_buckets_that_counts_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid max_inflight_buckets.*>= 1, 'auto' or None"):
        ShardingPolicy(max_inflight_buckets=value)


@pytest.mark.parametrize(
    ("value", "on_cpu", "on_gpu"), [("auto", None, 4), (None, None, sys.maxsize), (1, 1, 1), (7, 7, 7)]
)
def test_on_a_gpu_there_always_is_a_bound(value: Any, on_cpu: int | None, on_gpu: int) -> None:
    policy = ShardingPolicy(max_inflight_buckets=value)
    assert (policy.bound_in_flight("cpu"), policy.bound_in_flight("cuda")) == (on_cpu, on_gpu)


@pytest.mark.parametrize("value", ["sorted", None, True, ""])
def test_an_unknown_order_of_buckets_is_refused_with_the_allowed_ones(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid bucket_order.*'measured', 'registration'"):
        ShardingPolicy(bucket_order=value)


def test_a_policy_once_checked_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ShardingPolicy().bucket_cap_mb = -1  # type: ignore[misc]


CHOICES = {
    "partial_window": ("exact", "lightning"),
    "clip_scope": ("optimizer", "global"),
    "nonfinite_grads": ("propagate", "skip", "raise"),
}


@pytest.mark.parametrize("value", ["", "Exact", "Global", " skip", "average", None, True, 0, 1.0, ["exact"]])
@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_about_gradients_is_refused_with_the_allowed_ones(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        GradientPolicy(**{name: value})
    assert str(error.value) == f"Invalid {name}: {value!r}. Must be one of {CHOICES[name]}."


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, -math.inf, math.nan, True, False, "2", "-inf", None, [2.0], 2j])
def test_a_norm_type_that_is_no_positive_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        GradientPolicy(norm_type=value)
    assert str(error.value) == f"Invalid norm_type: {value!r}. Must be a positive number, such as 2.0, or inf."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, values in CHOICES.items() for value in values),
        *(("norm_type", value) for value in (0.5, 1, 2, 2.0, 3.5, math.inf)),
    ],
)
def test_allowed_choices_about_gradients(name: str, value: Any) -> None:
    policy = GradientPolicy(**{name: value})
    assert getattr(policy, name) == value
    # The others are what they are by default: one big batch, clipped per optimizer, as `ddp` but for short windows.
    defaults = {"partial_window": "exact", "clip_scope": "optimizer", "norm_type": 2.0, "nonfinite_grads": "propagate"}
    assert dataclasses.asdict(policy) == {**defaults, name: value}


@pytest.mark.parametrize("name", [*CHOICES, "norm_type"])
def test_a_gradient_policy_once_checked_cannot_change(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(GradientPolicy(), name, "anything")


def test_choices_about_gradients_are_named_not_counted() -> None:
    with pytest.raises(TypeError, match="positional"):
        GradientPolicy("exact")  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "15", [15]])
def test_a_time_to_warn_after_that_is_no_positive_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid warn_after_seconds: .*None for no warning"):
        WaitPolicy(warn_after_seconds=value)


def test_ranks_warn_after_fifteen_seconds_or_never() -> None:
    assert WaitPolicy().warn_after_seconds == 15.0
    assert WaitPolicy(warn_after_seconds=None).warn_after_seconds is None
    assert WaitPolicy(warn_after_seconds=1).warn_after_seconds == 1
