"""The oracles of the table of cases, each trained once for all tests that compare with it."""

from collections.abc import Callable

from tests.strategies import zoo
from tests.strategies.cases import CASES
from tests.strategies.parity import Reference, ddp, reference, train


def make(name: str) -> Callable[[], zoo.Zoo]:
    """Makes the case's module, anew for every training."""
    case = CASES[name]
    return lambda: case.module(case.optimizer)


def oracle(name: str) -> Reference:
    """A single process on the whole batch, or DDP."""
    case = CASES[name]
    whole_batch = case.oracle == "whole batch"
    chosen = None if whole_batch else ddp()
    return reference(name, lambda: train(make(name), chosen, whole_batch=whole_batch, **case.trainer))
