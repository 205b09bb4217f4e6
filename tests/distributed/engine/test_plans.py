"""Parameters that no plan of buckets can have."""

import pytest
import torch
from torch import nn

from tests.distributed.engines import make_engine
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.for_shards import captured


def a_cut_parameter_is_added_to_an_optimizer_of_matrices() -> None:
    module = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 4))
    optimizers = torch.optim.AdamW(module[0].parameters()), torch.optim.Adafactor(module[1].parameters())
    engine = make_engine(module, *optimizers)
    optimizers[1].param_groups[0]["params"].append(module[0].weight)
    with pytest.raises(ValueError, match=r"shape \(33, 7\) was added to Adafactor, which steps whole parameters"):
        engine.prepare_backward(module(torch.ones(5, 7)).sum())


def test_an_optimizer_of_matrices_gets_none_that_is_cut(pool: RankPool) -> None:
    pool.run(2, a_cut_parameter_is_added_to_an_optimizer_of_matrices)


def a_captured_graph() -> None:
    module = captured(zoo.adamw)
    with pytest.raises(ValueError, match="on_train_start"):
        make_engine(module, zoo.adamw(module.parameters()))


def test_a_captured_graph_is_refused_whose_parameters_would_move(pool: RankPool) -> None:
    pool.run(1, a_captured_graph)
