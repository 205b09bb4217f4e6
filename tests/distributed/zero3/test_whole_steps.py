"""Optimizers of whole parameters step shards as they step the whole, and leave nothing whole behind."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero3.whole_steps import STEPPED_WHOLE, step_whole
from tests import devices
from tests.pool import RankPool

SHAPES = ((5, 3), (1, 4), (4, 1), (8, 8))
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
    "LBFGS, line search": lambda parameters: torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe"),
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_move_as_the_whole_does(own_pool: RankPool, name: str, ranks: int) -> None:
    for steps in own_pool.run(ranks, step_both, name):
        before = [parameter.detach() for parameter in whole_parameters()]
        for expected, actual in steps:
            assert not any(torch.equal(one, other.cpu()) for one, other in zip(before, expected, strict=True))
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def surround() -> tuple[list[str], list[str], str, list[float]]:
    """Which hooks ran on what, what a scheduler warned of, and what a step of the class alone says."""
    parameters = sharded_parameters()
    optimizer = torch.optim.Adafactor(parameters, lr=0.1)
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
    try:
        type(optimizer).step(optimizer)
    except RuntimeError as error:
        return seen, [str(one.message) for one in caught], str(error), rates
    return seen, [], "no error", rates


def test_hooks_and_schedulers_see_one_step_of_shards(own_pool: RankPool) -> None:
    for seen, warned, error, rates in own_pool.run(2, surround):
        assert seen == ["before DTensor", "after DTensor"]
        assert not warned and rates == [0.05]
        assert "kept from before the training" in error


def fail() -> tuple[bool, bool]:
    """Whether shards are back when a step has failed, and the optimizer steps on."""
    parameters = sharded_parameters()
    optimizer = torch.optim.Muon(parameters, lr=0.1)
    step_whole(optimizer)
    optimizer.step(closure_for(optimizer, parameters))
    before = copy.copy(optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["ns_steps"] = 1000
    with pytest.raises(ValueError, match="less than 100"):
        optimizer.step()
    optimizer.param_groups[0]["ns_steps"] = 5
    back = optimizer.param_groups[0]["params"] == before and set(optimizer.state) == set(parameters)
    at = [whole(parameter.detach()).clone() for parameter in parameters]
    optimizer.step()
    return back, all(not torch.equal(whole(p.detach()), one) for p, one in zip(parameters, at, strict=True))


def test_a_step_that_fails_leaves_shards(own_pool: RankPool) -> None:
    assert own_pool.run(2, fail) == [(True, True)] * 2


def test_only_known_classes_are_stepped_whole() -> None:
    assert {cls.__name__ for cls in STEPPED_WHOLE} == {"Adafactor", "Muon", "LBFGS"}
