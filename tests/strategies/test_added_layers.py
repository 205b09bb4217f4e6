"""Layers that a training adds or replaces begin with rank 0's values, and are trained as by one process."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat import ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.odd_optimizers import GloballyScaled
from tests.strategies.parity import ddp, largest_difference, train

SGD = partial(torch.optim.SGD, lr=0.05)


class GetsHead(zoo.MLP):
    """In every epoch its head is replaced by another one, each rank's by its own random numbers, as without a seed."""

    by_list = False

    def __init__(self, optimizer: Callable[[Any], Any] = SGD, seed: int | None = None) -> None:
        super().__init__(optimizer)
        self.seed = dist.get_rank() if seed is None else seed

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx != 4:
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.net[4] = nn.Linear(17, 1)
        self.add_to_optimizer(list(self.net[4].parameters()))

    def add_to_optimizer(self, added: list[Tensor]) -> None:
        self.trainer.optimizers[0].add_param_group({"params": added})


class GetsHeadInItsGroup(GetsHead):
    def add_to_optimizer(self, added: list[Tensor]) -> None:
        self.trainer.optimizers[0].param_groups[0]["params"] += added


def compare_to_one_process(strategy: Any, module: type[GetsHead], optimizer: Any, arguments: dict[str, Any]) -> float:
    expected = train(lambda: module(optimizer, seed=0), None, whole_batch=True, max_epochs=2, **arguments)
    actual = train(lambda: module(optimizer), strategy, max_epochs=2, **arguments)
    assert expected.parameters[-1][-1].any()
    return largest_difference(actual, expected)


class MovesLayer(zoo.MLP):
    """In manual optimization, a layer leaves an optimizer for another one, or joins it as well."""

    automatic_optimization = False
    leaves = True

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:4].parameters(), 0.05, 0.9), torch.optim.SGD(self.net[4].parameters(), 0.05)]

    def on_train_epoch_start(self) -> None:
        first, second = self.trainer.optimizers
        if self.current_epoch == 1:
            moved = list(self.net[2].parameters())
            second.add_param_group({"params": moved, "momentum": 0.9})
            if self.leaves:
                first.param_groups[0]["params"] = list(self.net[0].parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(batch))
            optimizer.step()


class SharesLayer(MovesLayer):
    leaves = False


def compare_moved(module: type[MovesLayer], strategy: Any) -> float:
    return largest_difference(train(module, strategy, max_epochs=2), train(module, ddp(), max_epochs=2))


@pytest.mark.parametrize("module", [MovesLayer, SharesLayer])
@pytest.mark.parametrize("exposes", ["auto", False])
def test_a_layer_that_another_optimizer_gets_is_stepped_by_it(
    pool: RankPool, module: type[MovesLayer], exposes: Any
) -> None:
    assert max(pool.run(2, compare_moved, module, ZeRO1Strategy(expose_gradients=exposes))) <= FP32


MEETING = {"shard_group": 1, "outer_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
CASES: dict[str, tuple[Any, type[GetsHead], Any, dict[str, Any]]] = {
    "zero1": (ZeRO1Strategy(), GetsHead, SGD, {}),
    "zero1, in an old group": (ZeRO1Strategy(), GetsHeadInItsGroup, SGD, {}),
    "zero1, not sharded": (ZeRO1Strategy(), GetsHead, GloballyScaled, {}),
    "zero1, in groups that meet": (ZeRO1Strategy(**MEETING), GetsHead, SGD, {}),
    "zero2, in a window": (ZeRO2Strategy(), GetsHead, SGD, {"accumulate_grad_batches": 2}),
    "zero2, in the middle of a window": (
        ZeRO2Strategy(partial_window="lightning"),
        GetsHead,
        SGD,
        {"accumulate_grad_batches": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_added_layer_is_that_of_rank_0_from_its_first_forward(pool: RankPool, name: str) -> None:
    assert max(pool.run(2, compare_to_one_process, *CASES[name])) <= FP32


def refused() -> str:
    with pytest.raises(ValueError) as raised:
        train(lambda: GetsHead(), ZeRO3Strategy())
    return str(raised.value)


def test_zero3_refuses_added_layers(pool: RankPool) -> None:
    for error in pool.run(2, refused):
        assert re.search(r"of shape \(1, 17\) is in SGD, but was not in the module.* Or train by `zero1_custom`", error)
