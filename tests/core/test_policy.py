import dataclasses
import math
from typing import Any

import pytest

from lightning_parstrat.core.policy import ShardingPolicy


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
    cap = ShardingPolicy(bucket_cap_mb=bucket_cap_mb).bucket_cap_bytes
    assert cap == expected
    assert isinstance(cap, int)


def test_a_policy_once_checked_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ShardingPolicy().bucket_cap_mb = -1  # type: ignore[misc]
