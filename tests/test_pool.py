"""The pool itself: a test harness that hides failures would make every other test worthless."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, RankPool


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def wait_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_an_exception_on_one_rank_is_raised_with_its_traceback_and_the_pool_recovers(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank one says no") as caught:
        own_pool.run(2, fail_on_rank_one)
    assert "in fail_on_rank_one" in str(caught.value)
    assert own_pool.run(2, sum_of_ranks) == [1.0, 1.0]


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs(own_pool: RankPool) -> None:
    own_pool.run(2, sum_of_ranks)
    with pytest.raises(RankError, match="in wait_on_rank_zero"):
        own_pool.run(2, wait_on_rank_zero, timeout=3.0)


def test_a_rank_that_has_ended_between_tests_is_told_of_and_replaced(own_pool: RankPool) -> None:
    own_pool.run(2, sum_of_ranks)
    process, _ = own_pool._ranks[1]
    process.kill()
    process.join()
    with pytest.warns(UserWarning, match=r"exit codes: 1 \(-9\)"):
        assert own_pool.run(2, sum_of_ranks) == [1.0, 1.0]
