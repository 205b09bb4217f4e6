"""Optimizers of whole parameters step shards as they step the whole, and leave nothing whole behind."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero3.whole_steps import step_whole
from tests import devices
from tests.pool import RankPool

SHAPES = ((5, 3), (1, 4), (4, 1), (8, 8))
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
}


def whole_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(devices.device())) for shape in SHAPES]


def sharded_parameters() -> list[nn.Parameter]:
    mesh = DeviceMesh.from_group(process_groups().gradients, devices.kind())
    cut = [
        nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])) for parameter in whole_parameters()[:-1]
    ]
    # One stays whole, as scalars do.
    return [*cut, whole_parameters()[-1]]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def closure_for(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        assert [p for group in optimizer.param_groups for p in group["params"]] == parameters
        optimizer.zero_grad()
        loss = torch.stack([whole((p.pow(2) * (n + 1) - p).sum()) for n, p in enumerate(parameters)]).sum()
        loss.backward()
        return loss

    return closure


def step_both(name: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Whole parameters after each of four steps, of ordinary ones and of shards, whose state holds nothing else."""
    kinds = [whole_parameters(), sharded_parameters()]
    optimizers = [OPTIMIZERS[name](parameters) for parameters in kinds]
    step_whole(optimizers[1])
    found = []
    for _ in range(4):
        for optimizer, parameters in zip(optimizers, kinds, strict=True):
            optimizer.step(closure_for(optimizer, parameters))
        found.append(tuple([whole(p.detach()).clone() for p in parameters] for parameters in kinds))
        for parameter, entries in optimizers[1].state.items():
            assert any(parameter is one for one in kinds[1])
            for entry in entries.values():
                is_cut = isinstance(parameter, DTensor) and getattr(entry, "shape", None) == parameter.shape
                assert isinstance(entry, DTensor) == is_cut
    return found  # type: ignore[return-value]


def step_each() -> list[Any]:
    return [steps for name in OPTIMIZERS for steps in step_both(name)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_move_as_the_whole_does(own_pool: RankPool, ranks: int) -> None:
    for steps in own_pool.run(ranks, step_each):
        before = [parameter.detach() for parameter in whole_parameters()]
        for expected, actual in steps:
            assert not any(torch.equal(one, other.cpu()) for one, other in zip(before, expected, strict=True))
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def surround() -> tuple[list[str], list[str], list[float], str, bool]:
    """Which hooks ran on what, what a scheduler warned of, and what a step of the class and one that fails leave."""
    parameters = sharded_parameters()
    optimizer = torch.optim.Muon(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step_whole(optimizer)
    # As for a second training.
    step_whole(optimizer)
    seen: list[str] = []

    def see(name: str) -> Callable[..., None]:
        return lambda optimizer, *_: seen.append(f"{name} {type(optimizer.param_groups[0]['params'][0].data).__name__}")

    optimizer.register_step_pre_hook(see("before"))
    optimizer.register_step_post_hook(see("after"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure_for(optimizer, parameters))
        scheduler.step()
        rates = [optimizer.param_groups[0]["lr"]]
    with pytest.raises(RuntimeError) as refused:
        type(optimizer).step(optimizer)
    optimizer.param_groups[0]["ns_steps"] = 1000
    with pytest.raises(ValueError, match="less than 100"):
        optimizer.step()
    optimizer.param_groups[0]["ns_steps"] = 5
    goes_on = optimizer.param_groups[0]["params"] == parameters and set(optimizer.state) == set(parameters)
    at = [whole(parameter.detach()).clone() for parameter in parameters]
    optimizer.step()
    goes_on &= not any(torch.equal(whole(p.detach()), one) for p, one in zip(parameters, at, strict=True))
    return seen[:2], [str(one.message) for one in caught], rates, str(refused.value), goes_on


def test_hooks_see_one_step_of_shards_and_a_step_that_fails_leaves_them(own_pool: RankPool) -> None:
    for seen, warned, rates, refused, goes_on in own_pool.run(2, surround):
        assert seen == ["before DTensor", "after DTensor"]
        assert not warned and rates == [0.05]
        assert "kept from before the training" in refused
        assert goes_on
