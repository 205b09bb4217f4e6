"""Modules whose activations are computed again in backward: results stay, forwards double."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.parity import train, zero1, zero3


class DroppingBlock(odd.Block):
    """Counts its forwards."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(zoo.FEATURES)

    def forward(self, inputs: Tensor, debug: bool = False) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(super().forward(self.norm(inputs)), 0.2 if debug else 0.9)


class Dropping(odd.Blocks):
    def build(self) -> None:
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(3))
        self.head = nn.Linear(zoo.FEATURES, 1)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        # The name of an argument of torch's function, too.
        return block(hidden, debug=True)

    def on_train_end(self) -> None:
        # A copy has its own forward.
        block = self.blocks[0]
        forward = copy.deepcopy(block).forward
        assert block not in [getattr(one, "__self__", None) for one in (forward, *getattr(forward, "args", ()))]


class Sloped(Dropping):
    """A penalty on the slope: two backwards run through a block's graph."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_(True)
        loss = super().compute_loss(inputs)
        return loss + torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()


class Found(NamedTuple):
    tensors: list[Tensor]
    calls: list[int]
    is_undone: bool


STRATEGIES = {"zero1": zero1, "zero2": lambda **more: zero1(shard_gradients=True, **more), "zero3": zero3}


def train_again(strategy: str, policy: Any, module: type[Dropping] = Dropping) -> Found:
    run = train(module, STRATEGIES[strategy](activation_checkpointing_policy=policy), accumulate_grad_batches=2)
    blocks = list(run.module.blocks)
    is_undone = not any("forward" in vars(block) for block in blocks)
    return Found([*run.parameters[-1], *run.module.buffers()], [block.calls for block in blocks], is_undone)


@pytest.mark.parametrize("strategy", slow_unless(lambda name: name == "zero3", STRATEGIES))
def test_activations_are_computed_again(pool: RankPool, strategy: str) -> None:
    expected = pool.run(2, train_again, strategy, None)
    # By a base class, too.
    found = pool.run(2, train_again, strategy, ["Block"])
    for once, twice in zip(expected, found, strict=True):
        assert_same(twice.tensors, once.tensors)
        assert twice.calls == [2 * calls for calls in once.calls] and once.calls[0] > 0
        assert twice.is_undone


@pytest.mark.parametrize("strategy", slow_unless(lambda name: name == "zero3", STRATEGIES))
def test_activations_are_computed_for_each_backward(pool: RankPool, strategy: str) -> None:
    expected = pool.run(2, train_again, strategy, None, Sloped)
    found = pool.run(2, train_again, strategy, ["Block"], Sloped)
    for once, again in zip(expected, found, strict=True):
        assert_same(again.tensors, once.tensors)
