"""What is planned for ``zero3_custom`` is what it then does, with modules of all kinds."""

import math

import pytest
from torch.distributed.tensor import DTensor

from lightning_parstrat.cli.planned_module import units_of
from lightning_parstrat.core.policy import FullShardingPolicy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import make_trainer, zero3
from tests.strategies.ways import make

HOLDING_OTHERS = {"mlp": 0, "tied": 0, "bare parameters": 0, "gan": 2, "batch norm": 0, "toggling": 0, "unused": 0}
"""In manual optimization children of the root are gathered, too, and stay so while blocks within them come and go."""


def planned_and_done(name: str) -> tuple[int, int, int, int]:
    """Elements of parameters on this rank and as planned for the first one; and how many are gathered one by one."""
    factory, strategy = make(name), zero3()
    root, units, whole = units_of(factory(), FullShardingPolicy(min_num_params=0))
    shapes = [shape for unit in (root, *units) for shape in (*unit.trained, *unit.frozen)]
    planned = sum(math.ceil(shape[0] / 2) * math.prod(shape[1:]) for shape in shapes) + sum(whole)
    module = factory()
    counted = []
    trainer = make_trainer(strategy, limit_train_batches=1)
    module.on_train_end = lambda: counted.append(len(strategy._sharded.units))
    trainer.fit(module, zoo.loader(40, 4))
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
    return planned, held, len(units), counted[0]


@pytest.mark.parametrize("name", HOLDING_OTHERS)
def test_the_first_rank_holds_what_was_planned(pool: RankPool, name: str) -> None:
    (planned, held, units, gathered), (_, held_by_last, *_) = pool.run(2, planned_and_done, name)
    assert planned == held >= held_by_last
    assert gathered - units == HOLDING_OTHERS[name]
