"""Optimizers of another package: which are sharded, and what is saved of them. The table of cases trains them."""

from typing import Any

import pytest
import torch

from lightning_parstrat.distributed.engine.shardability import decide_sharding
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import CASES, KEPT_WHOLE, of_others
from tests.strategies.parity import ddp, train, zero1
from tests.strategies.ways import make

# As the table in docs/how_zero1_works.md has them.
NOT_SHARDED = ("Kron", "DAdaptAdam", "DAdaptSGD", "AdaHessian", "SophiaH", "SAM", "ScheduleFreeSGD", "Prodigy")


def test_what_is_not_sharded_says_why_and_what_would_be() -> None:
    for name in NOT_SHARDED:
        arguments = {"base_optimizer": torch.optim.SGD} if name == "SAM" else {}
        optimizer: Any = of_others(name, **arguments)(zoo.Convolutional().parameters())
        decision = decide_sharding(optimizer, "auto")
        assert decision.partition is None and decision.reason, name
        # SAM's step is not one for each parameter: nobody must be told to promise that.
        assert ("partition='parameter'" in decision.reason) is (name in ("AdaHessian", "SophiaH")), name


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.needs == "pytorch_optimizer"])
def test_what_steps_each_parameter_alone_is_sharded(name: str) -> None:
    decision = decide_sharding(CASES[name].optimizer(make(name)().parameters()), "auto")
    assert (decision.partition is None) is (name in KEPT_WHOLE)


def compare_state_dicts(name: str) -> None:
    expected, actual = (
        train(make(name), strategy, **CASES[name].trainer).trainer.optimizers[0].state_dict()
        for strategy in (ddp(), zero1())
    )
    assert_same(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lamb", "Shampoo", "SOAP", "Adan", "Prodigy", "ScheduleFreeAdamW"])
def test_saves_what_ddp_would_save(pool: RankPool, name: str) -> None:
    pool.run(2, compare_state_dicts, name)
