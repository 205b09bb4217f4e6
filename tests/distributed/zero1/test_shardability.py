"""What is sharded, how, and what every rank keeps whole instead: decided without any other rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.core.update_cost import elementwise, newton_schulz
from lightning_parstrat.distributed.zero1.optimizer_sharding import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.zero1.planning import trained_outside
from lightning_parstrat.distributed.zero1.shardability import (
    ShardingDecision,
    decide_sharding,
    replicated_parameters,
    update_cost,
)
from tests.distributed.engines import sgd
from tests.distributed.zero1.test_probe import (
    ClosureTwice,
    GlobalNorm,
    LoadsItsState,
    MixesWhatItLoads,
    Momentum,
    NormOfAParameter,
    Own,
    Uncopyable,
)
from tests.strategies.odd_optimizers import GloballyScaled, HasModes, KeepsItsOwnList, NeedsTheLoss, OddOptimizer


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4)


class MyAdam(torch.optim.Adam):
    """Might do anything, and does what Adam does."""


class NeedsItsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class SavesMore(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


class LooksAhead(Momentum):
    """As sharpness-aware ones do: the closure must bring the gradient of another place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        places = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.05 / norm.item())
            parameter.grad = None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter, place in zip(parameters, places, strict=True):
            parameter.copy_(place)
        return loss if any(parameter.grad is None for parameter in parameters) else super().step()


class HasTrainOnly(Momentum):
    def train(self) -> None: ...


def replaced_step(parameters: Any) -> Optimizer:
    optimizer = sgd(parameters)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


def replaced_zero_grad(parameters: Any) -> Optimizer:
    optimizer = sgd(parameters)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return optimizer


class HasAProperty(Momentum):
    @property
    def zero_grad(self) -> Any:  # type: ignore[override]
        return super().zero_grad


class Delegates(Optimizer):
    """Wraps another optimizer, and is none itself but by name."""

    def __init__(self, parameters: Any) -> None:
        self.base = sgd(parameters)
        self.defaults, self.state, self.param_groups = self.base.defaults, self.base.state, self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def scheduled(cls: Any) -> Callable[[Any], Optimizer]:
    def make(parameters: Any) -> Optimizer:
        optimizer = cls(parameters, lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    return make


def torchs(cls: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: cls(parameters, lr=0.1)


ALONE = "depends on the others"
UNTRIED = "trying it on a copy failed (TypeError: cannot pickle 'generator' object)"
UNMOVED = "moved nothing"
# Sorted: workers that share the tests must collect them in one order.
ELEMENTWISE = sorted(ELEMENTWISE_OPTIMIZERS, key=lambda cls: cls.__name__)
# Optimizer, choice, partition, and words of the reason where there is none.
TREATMENTS: dict[str, tuple[Callable[[Any], Any], PartitionChoice, str | None, str]] = {
    **{cls.__name__: (torchs(cls), "auto", "element", "") for cls in ELEMENTWISE},
    **{f"{cls.__name__}, whole": (torchs(cls), "parameter", "parameter", "") for cls in ELEMENTWISE},
    "AdamW, cut": (torchs(torch.optim.AdamW), "element", "element", ""),
    "AdamW, scheduled": (scheduled(torch.optim.AdamW), "auto", "element", ""),
    "Adafactor": (torchs(torch.optim.Adafactor), "auto", "parameter", ""),
    "Adafactor, scheduled": (scheduled(torch.optim.Adafactor), "auto", "parameter", ""),
    "Muon": (lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]), "auto", "parameter", ""),
    # A subclass may do anything, so that its parameters are not cut unless it is asked for.
    "a subclass": (MyAdam, "auto", "parameter", ""),
    "a subclass, cut": (MyAdam, "element", "element", ""),
    "own": (Own, "auto", "parameter", ""),
    "uses the loss": (NeedsTheLoss, "auto", "parameter", ""),
    "norm of a parameter": (NormOfAParameter, "auto", "parameter", ""),
    "loads its state": (LoadsItsState, "auto", "parameter", ""),
    "has `train`, but no `eval`": (HasTrainOnly, "auto", "parameter", ""),
    "global norm": (GlobalNorm, "auto", None, ALONE),
    "globally scaled": (GloballyScaled, "auto", None, ALONE),
    "its own list": (KeepsItsOwnList, "auto", None, ALONE),
    "mixes what it loads": (MixesWhatItLoads, "auto", None, ALONE),
    "uncopyable": (Uncopyable, "auto", None, UNTRIED),
    "moves when it has a second gradient": (LooksAhead, "auto", None, UNMOVED),
    "closure twice": (ClosureTwice, "auto", None, "closure more than once"),
    "closure twice, cut": (ClosureTwice, "element", None, "closure more than once"),
    # A promise: that of its user, who knows better.
    "global norm, promised": (GlobalNorm, "parameter", "parameter", ""),
    "uncopyable, promised": (Uncopyable, "parameter", "parameter", ""),
    "uncopyable, promised for elements": (Uncopyable, "element", "element", ""),
    # No promise helps where sharding has no way to keep it.
    **{
        f"{name}, {choice}": (make, choice, None, reason)
        for choice in ("auto", "element", "parameter")
        for name, make, reason in (
            ("no torch optimizer", OddOptimizer, "no torch.optim.Optimizer"),
            ("replaced step", replaced_step, "`step` was replaced"),
            ("replaced zero_grad", replaced_zero_grad, "`zero_grad` was replaced"),
            ("a property", HasAProperty, "`zero_grad` was replaced"),
            ("no base", Delegates, "does not call `Optimizer.__init__`"),
            ("modes", HasModes, "`train` and `eval`"),
            ("LBFGS", torch.optim.LBFGS, "needs a closure"),
            ("closure without default", torchs(NeedsItsClosure), "needs a closure"),
            ("saves more", SavesMore, "`state_dict` of its own"),
        )
    },
}


@pytest.mark.parametrize("name", TREATMENTS)
def test_decisions(name: str) -> None:
    make, choice, partition, reason = TREATMENTS[name]
    decision = decide_sharding(make(linear().parameters()), choice)
    assert decision.partition == partition
    assert reason in decision.reason and bool(decision.reason) is bool(decision.remedy) is (partition is None)
    # Only what cannot be tried may be promised; and what a promise says stands beside it.
    assert ("partition='parameter'" in decision.remedy) is (reason == UNTRIED)
    assert "SAM" in decision.remedy or reason != UNTRIED


REFUSALS: dict[str, tuple[Callable[[Any], Optimizer], PartitionChoice, list[str]]] = {
    "SparseAdam": (lambda p: torch.optim.SparseAdam(list(p)), "auto", ["SparseAdam", "sparse=False", "'ddp'"]),
    "a matrix cut": (
        torch.optim.Adafactor,
        "element",
        ["partition='element'", "Adafactor", "partition='auto'", "'parameter'"],
    ),
    "a norm cut": (NormOfAParameter, "element", ["NormOfAParameter steps a part of a parameter otherwise"]),
    "a global norm cut": (GlobalNorm, "element", ["GlobalNorm steps a part of a parameter otherwise"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do(name: str) -> None:
    make, choice, words = REFUSALS[name]
    with pytest.raises(ValueError) as caught:
        decide_sharding(make(linear().parameters()), choice)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_deciding_leaves_the_optimizer_alone() -> None:
    optimizer = NormOfAParameter(linear().parameters())
    attributes = dict(vars(optimizer))
    for choice in ("auto", "parameter"):
        assert decide_sharding(optimizer, choice) == ShardingDecision("parameter")
    assert vars(optimizer) == attributes and type(optimizer) is NormOfAParameter and not optimizer.state


class Plain(nn.Module):
    """A tied weight, a frozen one and a buffer: nothing that would not move into a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("counter", torch.zeros(3))


class Shared(Plain):
    """Another parameter over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(self.first.weight.data)


class PartlyShared(Plain):
    """Three over one storage; the last has a part of its own, and one lies in the middle of another."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.zeros(100)
        self.long = nn.Parameter(storage[:80])
        self.inner = nn.Parameter(storage[10:20])
        self.last = nn.Parameter(storage[70:90].view(4, 5))
        self.beside = nn.Parameter(storage[90:])


class ViewedByBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.second.bias.data[2:3])


class Interleaved(Plain):
    """Every other element each, of the same memory: neither is dense, and both could be moved."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.zeros(20)
        self.even = nn.Parameter(storage[::2])
        self.odd = nn.Parameter(storage[1::2])


class Adjacent(Plain):
    """One storage, as a user's own flat buffer, but no element twice."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.zeros(20)
        self.low = nn.Parameter(storage[:10])
        self.high = nn.Parameter(storage[10:])


class Ignored(Plain):
    _ddp_params_and_buffers_to_ignore = ("second.bias", "counter", "first.unknown")


class Integers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.flags = nn.Parameter(torch.ones(4, dtype=torch.bool), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(4, dtype=torch.complex64))


# Which parameters every rank keeps whole, by name.
REPLICATED: dict[type[nn.Module], set[str]] = {
    Plain: set(),
    Adjacent: set(),
    Shared: {"first.weight", "other"},
    PartlyShared: {"long", "inner", "last"},
    ViewedByBuffer: {"second.bias"},
    # Their extents overlap though their elements do not: told apart by extents alone, which is safe.
    Interleaved: {"even", "odd"},
    Ignored: {"second.bias"},
    Integers: {"counts", "flags"},
}


def names_of(module: nn.Module, parameters: set[Tensor]) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter in parameters}


@pytest.mark.parametrize("cls", REPLICATED)
def test_parameters_that_cannot_move_are_kept_whole(cls: type[nn.Module]) -> None:
    module = cls()
    assert names_of(module, replicated_parameters(module, [sgd(module.parameters())])) == REPLICATED[cls]


def test_only_the_optimizers_parameters_are_of_interest() -> None:
    module = Shared()
    assert names_of(module, replicated_parameters(module, [sgd(module.first.parameters())])) == {"first.weight"}
    assert replicated_parameters(module, [sgd([module.frozen])]) == set()
    assert replicated_parameters(module, []) == set()


def test_memory_shared_with_a_parameter_outside_the_module_counts() -> None:
    module = Plain()
    outside = nn.Parameter(module.first.bias.data)
    optimizers = [sgd(module.parameters()), sgd([outside])]
    assert replicated_parameters(module, optimizers) == {module.first.bias, outside}


def test_a_parameter_of_two_optimizers_does_not_share_memory_with_itself() -> None:
    module = Plain()
    assert replicated_parameters(module, [sgd(module.parameters()), sgd(module.first.parameters())]) == set()


# Which parameters get gradients without being sharded, where `first` alone is.
OUTSIDE: dict[type[nn.Module], set[str]] = {
    Plain: {"second.bias", "frozen", "empty"},
    Ignored: {"frozen", "empty"},
    Integers: {"second.bias", "frozen", "empty", "waves"},
    Shared: {"second.bias", "frozen", "empty", "other"},
}


@pytest.mark.parametrize("cls", OUTSIDE)
def test_what_is_trained_outside_of_sharded_optimizers(cls: type[nn.Module]) -> None:
    module = cls()
    found = trained_outside(module, dict.fromkeys(module.first.parameters(), (0,)))
    assert [name for name, parameter in module.named_parameters() if parameter in set(found)] == [
        name for name, _ in module.named_parameters() if name in OUTSIDE[cls]
    ]
    assert len(found) == len(OUTSIDE[cls])


def test_the_cost_of_an_update_is_its_elements_but_for_muon() -> None:
    wide, tall, small = (nn.Parameter(torch.zeros(shape)) for shape in ((8, 32), (32, 8), (4, 4)))
    muon = torch.optim.Muon([{"params": [wide, tall]}, {"params": [small], "ns_steps": 2}], ns_steps=5)
    assert update_cost(muon, wide) == update_cost(muon, tall) == newton_schulz((8, 32), 5)
    assert update_cost(muon, small) == newton_schulz((4, 4), 2) < newton_schulz((4, 4), 5)
    # Twice the elements, but the shorter side rules.
    square = nn.Parameter(torch.zeros(16, 16))
    muon.add_param_group({"params": [square]})
    assert update_cost(muon, square) > update_cost(muon, wide)
    for optimizer in (sgd([wide]), torch.optim.Adafactor([wide])):
        assert update_cost(optimizer, wide) == elementwise(256)
