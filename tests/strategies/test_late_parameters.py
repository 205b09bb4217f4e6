"""Parameters that arrive after the step are never read before they have: trainings equal the oracle all the same."""

import pytest

from tests.pool import RankPool
from tests.strategies.cases import CASES
from tests.strategies.late import ArriveLate
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, train, zero1

ARRIVE_IN_THE_STEP = {
    # Compiled code depends on the class of what it reads.
    "compiled",
    "compiled as a whole",
    # Every rank steps everything.
    "globally scaled",
    "globally scaled, hidden gan",
    "has modes",
    "keeps its own list",
    "no torch optimizer",
    "replaced step",
    "two heads, many optimizers look",
}


def compare_late(name: str) -> tuple[float, float, int]:
    case = CASES[name]
    whole_batch = case.oracle == "whole batch"
    expected = train(
        lambda: case.module(case.optimizer), None if whole_batch else ddp(), whole_batch=whole_batch, **case.trainer
    )
    late = ArriveLate()
    actual = train(lambda: case.module(case.optimizer), zero1(**case.strategy), callbacks=[late], **case.trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected), late.under_way


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if 2 in case.world_sizes])
def test_trains_as_the_oracle_does_where_parameters_arrive_late(pool: RankPool, name: str) -> None:
    for parameters, losses, under_way in pool.run(2, compare_late, name):
        assert parameters <= CASES[name].tolerance
        assert losses <= 10 * CASES[name].tolerance
        assert (under_way > 0) == (name not in ARRIVE_IN_THE_STEP)
