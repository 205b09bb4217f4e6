"""The oracles of the table of cases, each trained once for all tests that compare with it."""

from collections.abc import Callable

from tests.strategies import zoo
from tests.strategies.cases import CASES
from tests.strategies.parity import Reference, Run, ddp, reference, train


def make(name: str) -> Callable[[], zoo.Zoo]:
    """Makes the case's module, anew for every training."""
    case = CASES[name]
    return lambda: case.module(case.optimizer)


def oracle(name: str) -> Reference:
    """A single process on the whole batch, or DDP."""
    return reference(name, lambda: train_as_oracle(name, make(name)))


def train_as_oracle(name: str, make_module: Callable[[], zoo.Zoo]) -> Run:
    """Trains a module in the way of the case's oracle."""
    whole_batch = CASES[name].oracle == "whole batch"
    return train(make_module, None if whole_batch else ddp(), whole_batch=whole_batch, **CASES[name].trainer)
