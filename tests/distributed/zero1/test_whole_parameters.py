"""Parameters that stay uncut train to the last bit as where everybody sends them straight to their owner."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from lightning_parstrat.distributed.zero1 import engine as engines
from tests.comparing import distance
from tests.distributed.engines import adafactor, backward, clip_gradients_by_norm, make_engine, perceptron
from tests.pool import RankPool


class Normed(Optimizer):
    """One's own: steps by a matrix's gradient over its norm, with momentum."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad / (parameter.grad.norm() + 1e-6))
                    parameter.add_(momentum, alpha=-group["lr"])


def muon(module: nn.Module) -> list[Optimizer]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon": muon,
    "Adafactor": lambda module: [adafactor(module.parameters())],
    "one's own": lambda module: [Normed(module.parameters())],
}


def trained(name: str, straight: bool, policy: dict[str, Any]) -> list[Tensor]:
    """Parameters after some steps; buckets are planned anew between them."""
    to_owners = mock.patch.object(engines, "make_collectives", lambda group, *_: PairwiseCollectives(group))
    module = perceptron(torch.bfloat16 if policy.get("master_weights") else torch.float32)
    optimizers = OPTIMIZERS[name](module)
    with to_owners if straight else nullcontext():
        engine = make_engine(module, *optimizers, **policy)
    assert isinstance(engine.reducer.collectives, PairwiseCollectives if straight else UnevenCollectives)
    assert any(not bucket.layout.is_even for bucket in engine.buckets)
    dtype = next(module.parameters()).dtype
    for step in range(4):
        engine.prepare_forward()
        inputs = torch.randn(3, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        backward(engine, (module(inputs.to(dtype)).float() - 0.3).pow(2).mean())
        for optimizer in optimizers:
            clip_gradients_by_norm(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    engine.gatherer.finish()
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    engine.close()
    return parameters


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "policy",
    [{"bucket_cap_mb": 1e-6}, {"bucket_cap_mb": 1.0}, {"bucket_cap_mb": 1e-3, "master_weights": True}],
    ids=["a bucket each", "one bucket", "master weights"],
)
def test_trains_as_where_everybody_sends_to_the_owner(
    pool: RankPool, name: str, ranks: int, policy: dict[str, Any]
) -> None:
    before = pool.run(ranks, trained, name, True, policy)
    for parameters in pool.run(ranks, trained, name, False, policy):
        assert distance(parameters, before[0]) == 0
