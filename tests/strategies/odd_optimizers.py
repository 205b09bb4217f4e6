"""Optimizers that are out of the ordinary, and work under DDP. None knows of the package under test."""

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.strategies.zoo import adamw

Closure = Callable[[], Any] | None


def loss_by(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure() if closure is not None else None


class PlainSGD(torch.optim.SGD):
    """Base: without momentum, so that a step is the gradient."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.05)


class OddOptimizer:
    """Has an optimizer's methods without being one of torch's."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.05}]
        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_by(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.05 * parameter.grad
        return loss


class GloballyScaled(Optimizer):
    """Its steps are as long as all gradients together say."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_by(closure)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in stepped]).norm()
        for parameter in stepped:
            parameter -= 0.05 * parameter.grad / (1 + norm)
        return loss


class KeepsItsOwnList(PlainSGD):
    def __init__(self, parameters: Iterable[Any]) -> None:
        self.kept = list(parameters)
        super().__init__(self.kept)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_by(closure)
        for parameter in self.kept:
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
        return loss


class HasModes(PlainSGD):
    """Schedule-free averaging in outline: `eval` puts averages into the parameters, `train` takes them out again."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.3)
        return loss

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if "average" in self.state[parameter]:
                parameter.data, self.state[parameter]["average"] = self.state[parameter]["average"], parameter.data

    def eval(self) -> None:
        self.train()


class ByAttribute(PlainSGD):
    """Reads what a module has set on a parameter."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_by(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= 0.05 * getattr(parameter, "scale", 1.0) * parameter.grad
        return loss


class OnASphere(nn.Parameter):
    """Each row is to have the length 1."""


class ByClass(PlainSGD):
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if isinstance(parameter, OnASphere):
                parameter /= parameter.norm(dim=-1, keepdim=True)
        return loss


class NeedsTheLoss(PlainSGD):
    """A step that ends by a rule on the loss must be given one."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        if closure is None:
            raise ValueError("this optimizer steps by the loss")
        loss = loss_by(closure)
        if torch.isfinite(loss):
            super().step()
        return loss


class ClosureTwice(PlainSGD):
    """Looks from where it has stepped, and steps by what it sees there."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        if closure is None:
            raise ValueError("there is nothing to look by")
        loss = loss_by(closure)
        super().step()
        loss_by(closure)
        super().step()
        return loss


class StepsInParts(torch.optim.SGD):
    """As SAM does: a step of other methods of its own, which zero gradients."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)

    def step(self, closure: Closure = None) -> Any:
        loss = loss_by(closure)
        super().step()
        self.zero_grad()
        return loss


class ZeroesWithoutChoice(PlainSGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class CountsSteps(PlainSGD):
    """Keeps something in its state that belongs to no parameter."""

    def step(self, closure: Closure = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.state["count"]
        return super().step(closure)


def replaced_step(parameters: Iterable[Any]) -> Optimizer:
    """A user has put a function of his own in the place of `step`."""
    optimizer = adamw(parameters)
    step = optimizer.step

    def half_a_step(closure: Closure = None) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 0.005
        return step(closure)

    optimizer.step = half_a_step  # type: ignore[method-assign]
    return optimizer


def replaced_and_wrapped_step(parameters: Iterable[Any]) -> Optimizer:
    """A learning rate scheduler has wrapped what a user has put in the place of `step`."""
    optimizer = adamw(parameters)

    def half_a_step(optimizer: Any, closure: Closure = None) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 0.005
        return type(optimizer).step(optimizer, closure)

    optimizer.step = types.MethodType(half_a_step, optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer
