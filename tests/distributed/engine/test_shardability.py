"""What is sharded, how, and what every rank keeps whole instead: decided without others, by trying an optimizer out."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.policy import PartitionChoice
from lightning_parstrat.distributed.engine.shardability import (
    decide_sharding,
    immovable_parameters,
    reason_against_parts,
)
from tests.distributed.engines import sgd
from tests.strategies.odd_optimizers import ClosureTwice, GloballyScaled
from tests.torch_versions import is_before


def parameters() -> list[nn.Parameter]:
    """Matrices, a kernel, vectors and a scalar, beyond what the probe keeps of a dimension."""
    torch.manual_seed(0)
    shapes = [(12, 20), (20,), (4, 3, 3, 3), (9,), (7, 30), ()]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class Own(Optimizer):
    """Base: plain descent; what is special is said by the classes below."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    def each(self, group: dict[str, Any] | None = None) -> list[Tensor]:
        groups = self.param_groups if group is None else [group]
        return [parameter for one in groups for parameter in one["params"] if parameter.grad is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.each():
            parameter -= 0.1 * self.direction(parameter)
        return loss

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad


def norm(optimizer: Own, group: dict[str, Any] | None = None) -> Tensor:
    return torch.stack([one.grad.norm() for one in optimizer.each(group)]).norm()


class Moves(Own):
    """Steps each parameter by what a function says, which gets the optimizer and the parameter."""

    def __init__(self, params: Iterable[Any], by: Callable[[Any, Tensor], Tensor], lr: float | Tensor = 0.1) -> None:
        super().__init__(params)
        self.by = by
        self.param_groups[0]["lr"] = lr

    def direction(self, parameter: Tensor) -> Tensor:
        return self.by(self, parameter)


def by_norm_of_its_group(optimizer: Own, parameter: Tensor) -> Tensor:
    (group,) = [one for one in optimizer.param_groups if any(parameter is member for member in one["params"])]
    return parameter.grad / norm(optimizer, group)


class ClipsLater(Own):
    """Steps by the norm of all gradients, after a warm-up."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def direction(self, parameter: Tensor) -> Tensor:
        return super().direction(parameter) / (norm(self) if self.steps > 12 else 1)


class NotesANorm(Own):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.norms = [*getattr(self, "norms", ()), float(norm(self))]
        return super().step(closure)


def by_its_rate(optimizer: Own, parameter: Tensor) -> Tensor:
    """As long as the learning rate says, and all gradients together."""
    return parameter.grad / norm(optimizer) * optimizer.param_groups[0]["lr"]


class Momentum(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        state["momentum"] = 0.9 * state.get("momentum", 0) + parameter.grad
        return state["momentum"]


class LoadsItsState(Momentum):
    """Takes a state dict to hold all parameters that it has: true of shards, too."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                self.state[parameter]["momentum"] = state_dict["state"][number]["momentum"].clone()


class MixesWhatItLoads(Momentum):
    """Loading puts the same into all parameters."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        mean = torch.stack([state["momentum"].mean() for state in self.state.values()]).mean()
        for parameter, state in self.state.items():
            state["momentum"] = torch.full_like(parameter, mean.item())


class Uncopyable(Own):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.generator = (number for number in range(3))


class OfAClass(nn.Parameter):
    """An optimizer may ask for it."""


class MyAdam(torch.optim.Adam):
    """Might do anything, and does what Adam does."""


class NeedsItsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class SavesMore(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


def replaced_zero_grad(parameters: Any) -> Optimizer:
    optimizer = sgd(parameters)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return optimizer


class Delegates(Optimizer):
    """Wraps another optimizer, and is none itself but by name."""

    def __init__(self, parameters: Any) -> None:
        self.base = sgd(parameters)
        self.defaults, self.state, self.param_groups = self.base.defaults, self.base.state, self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def by(cls: Any, **arguments: Any) -> Callable[[], Optimizer]:
    return lambda: cls(parameters(), **arguments)


def narrow(make: Callable[..., Optimizer], dtype: torch.dtype) -> Callable[[], Optimizer]:
    return lambda: make([nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters()])


def unlike_parameters() -> Optimizer:
    """Complex, integer, empty, in half precision, and without a gradient."""
    return Momentum(
        [
            nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)),
            nn.Parameter(torch.arange(5), requires_grad=False),
            nn.Parameter(torch.zeros(0, 3)),
            nn.Parameter(torch.randn(9, 9, dtype=torch.bfloat16)),
            nn.Parameter(torch.randn(4), requires_grad=False),
            nn.Parameter(torch.randn(12, 5).t()),
        ]
    )


def scheduled(optimizer: Optimizer) -> Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
RATES = (0.0, 1e-9, torch.tensor(0.0))
"""A warm-up starts at nothing, or next to it, and what does not move would look alone."""
NARROW = (torch.bfloat16, torch.float16)
"""So would what is lost in rounding; and overflow would look like others' doing."""
BY_ELEMENT: dict[str, Callable[[], Any]] = {
    **{name: by(getattr(torch.optim, name), lr=0.1) for name in ELEMENTWISE},
    "AdamW, scheduled": lambda: scheduled(torch.optim.AdamW(parameters())),
}
BY_PARAMETER: dict[str, Callable[[], Any]] = {
    "Adafactor": by(torch.optim.Adafactor),
    "Adafactor, scheduled": lambda: scheduled(torch.optim.Adafactor(parameters())),
    **{f"Adafactor, learning rate {lr}": by(torch.optim.Adafactor, lr=lr) for lr in RATES},
    **{f"Adafactor, {dtype}": narrow(torch.optim.Adafactor, dtype) for dtype in NARROW},
    # A matrix is all that it takes.
    "Muon": lambda: torch.optim.Muon([one for one in parameters() if one.ndim == 2]),
    # A subclass may do anything, so that its parameters are not cut unless it is asked for.
    "a subclass": by(MyAdam),
    **{f"a subclass, {dtype}": narrow(partial(MyAdam, lr=1e-5), dtype) for dtype in NARROW},
    "momentum": by(Momentum),
    "unlike parameters": unlike_parameters,
    "nothing but an empty parameter": lambda: Own([nn.Parameter(torch.zeros(0))]),
    "loads its state": by(LoadsItsState),
}
DEPENDS: dict[str, Callable[[], Any]] = {
    "mixes what it loads": by(MixesWhatItLoads),
    "global norm": by(GloballyScaled),
    "global norm, later": by(ClipsLater),
    "global norm, scheduled": lambda: scheduled(GloballyScaled(parameters())),
    **{f"global norm, {dtype}": narrow(GloballyScaled, dtype) for dtype in NARROW},
    # It acts only where the whole gradient is long: most of the trial's steps would not show it.
    "global clip": by(Moves, by=lambda optimizer, one: one.grad * (1000 / norm(optimizer)).clamp(max=1)),
    # Gradients are short at the end of a training, and most of the trial's are not.
    "capped norm": by(Moves, by=lambda optimizer, one: one.grad * norm(optimizer).clamp(max=1)),
    "norm of a group": lambda: Moves(
        [{"params": parameters()[:3]}, {"params": parameters()[3:]}], by_norm_of_its_group
    ),
    "noise": by(Moves, by=lambda _, one: one.grad + torch.randn_like(one)),
    **{f"by its rate, {lr}": by(Moves, by=by_its_rate, lr=lr) for lr in RATES},
    **{f"by its rate, {dtype}": narrow(partial(Moves, by=by_its_rate, lr=1e-4), dtype) for dtype in NARROW},
}
UNTOLD: dict[str, tuple[Callable[[], Any], str]] = {
    # A rank that owns nothing would raise in training as well.
    "one parameter, and needs one": (lambda: GloballyScaled(parameters()[:1]), "trying it on a copy failed"),
    "notes a norm": (by(NotesANorm), "it keeps numbers that depend on all parameters"),
    "closure twice": (by(ClosureTwice), "evaluates the closure again"),
    "never moves": (by(Moves, by=lambda _, one: torch.zeros_like(one)), "moved nothing"),
    "by names": (
        lambda: Own([(str(n), one) for n, one in enumerate(parameters())]),
        "a rank would step a part of them",
    ),
    "by class": (lambda: Own([*parameters(), OfAClass(torch.ones(2))]), "parameters of the class OfAClass in another"),
    "uncopyable": (by(Uncopyable), "trying it on a copy failed (TypeError: cannot pickle 'generator' object)"),
}
"""And the reason why every rank steps all of it."""


def check(name: str, optimizer: Any, choice: PartitionChoice, partition: str | None, words: str) -> None:
    decision = decide_sharding(optimizer, choice)
    assert decision.partition == partition, name
    assert words in decision.reason and bool(decision.reason) is (partition is None), name
    # Only what cannot be tried may be promised.
    may_promise = "trying it" in decision.reason
    assert ("partition='parameter'" in decision.reason) is may_promise, name


def test_what_is_tried_is_found_out_and_treated_so() -> None:
    for found, partition in ((BY_ELEMENT, "element"), (BY_PARAMETER, "parameter")):
        for name, make in found.items():
            check(name, make(), "auto", partition, "")
            # Before 2.13 Adagrad had its state when it was made, and only then: a copy with others has none.
            if partition == "element" and not (name == "Adagrad" and is_before("2.13")):
                assert reason_against_parts(make()) == "", name
    for name, make in DEPENDS.items():
        check(name, make(), "auto", None, "depends on others")
    for name, (make, words) in UNTOLD.items():
        check(name, make(), "auto", None, words)


def test_a_promise_is_taken_where_sharding_can_keep_it() -> None:
    for name in ELEMENTWISE:
        check(name, BY_ELEMENT[name](), "element", "element", "")
        check(name, BY_ELEMENT[name](), "parameter", "parameter", "")
    # That of its user, who knows better.
    for cls in (GloballyScaled, Uncopyable):
        check(cls.__name__, cls(parameters()), "parameter", "parameter", "")
    # No promise helps where sharding has no way to keep it.
    for make, words in (
        (replaced_zero_grad, "`zero_grad` was replaced"),
        (Delegates, "does not call `Optimizer.__init__`"),
        (partial(NeedsItsClosure, lr=0.1), "needs a closure"),
        (SavesMore, "its own `state_dict`"),
    ):
        for choice in ("auto", "element", "parameter"):
            check(words, make(parameters()), choice, None, words)


class NotToBeCopied:
    """Stands for the module, trainer or file that a user's hook may belong to, and for large state."""

    def __init__(self) -> None:
        self.called = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "NotToBeCopied":
        raise AssertionError("a hook's owner was copied")

    def hook(self, *_: Any) -> None:
        self.called += 1


def test_hooks_are_not_called_and_neither_they_nor_state_are_copied() -> None:
    for cls in (Momentum, LoadsItsState):
        owner = NotToBeCopied()
        optimizer = scheduled(cls(parameters()))
        # Its state may fill most of a device's memory.
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum"] = owner
        for event in ("step", "state_dict", "load_state_dict"):
            for when in ("pre", "post"):
                getattr(optimizer, f"register_{event}_{when}_hook")(owner.hook)
        assert reason_against_parts(optimizer) == ""
        assert owner.called == 0


def test_many_and_large_parameters_take_no_longer_and_no_memory() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(3, 5)) for _ in range(3000)])
    # What a first call imports is not what many parameters cost; nor is what other programs have held it up.
    reason_against_parts(torch.optim.Adafactor([nn.Parameter(torch.zeros(3, 5))]))
    start = time.thread_time()
    assert reason_against_parts(optimizer) == ""
    assert time.thread_time() - start < 2.0
    # Expanded: what is asked for is no memory, which a copy would need: 16 TiB of it.
    huge = nn.Parameter(torch.zeros(1, 1).expand(2**21, 2**21))
    assert reason_against_parts(Momentum([huge, *parameters()])) == ""


def parameters_that_cannot_move() -> tuple[nn.Module, set[str]]:
    """Beside a tied weight, an empty one, and two in one storage that share no element."""
    module: Any = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("first", "second", "third")})
    module.second.weight = module.first.weight
    module.empty = nn.Parameter(torch.zeros(0, 2))
    storage = torch.zeros(20)
    module.low, module.high = nn.Parameter(storage[:10]), nn.Parameter(storage[10:])
    module.other = nn.Parameter(module.first.weight.data)
    module.register_buffer("view", module.second.bias.data[2:3])
    module.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    module._ddp_params_and_buffers_to_ignore = ("third.bias", "view", "first.unknown")
    return module, {"first.weight", "other", "second.bias", "counts", "third.bias"}


def test_parameters_that_cannot_move_are_kept_whole() -> None:
    module, names = parameters_that_cannot_move()
    found = immovable_parameters(module, [sgd(module.parameters())])
    assert {name for name, parameter in module.named_parameters() if parameter in found} == names
