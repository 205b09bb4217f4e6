"""An optimizer is asked, not its name: does it step parameters, and elements, by themselves?"""

import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.zero1.optimizer_sharding import ClosureEvaluatedAgainError, OneEvaluation
from lightning_parstrat.distributed.zero1.shardability import steps_elements_alone, steps_parameters_alone
from tests.comparing import assert_same
from tests.torch_versions import is_before

Step = Callable[..., Any]


def parameters() -> list[nn.Parameter]:
    """Matrices, a kernel, vectors and a scalar, beyond what the probe keeps of a dimension."""
    torch.manual_seed(0)
    shapes = [(12, 20), (20,), (4, 3, 3, 3), (9,), (7, 30), ()]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def matrices() -> list[nn.Parameter]:
    return [parameter for parameter in parameters() if parameter.ndim == 2]


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


class GlobalNorm(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        norm = torch.stack([one.grad.norm() for one in self.each()]).norm()
        return parameter.grad / (1 + norm)


class GlobalClip(Own):
    """Acts only where the whole gradient is long: most of the probe's steps would not show it."""

    def direction(self, parameter: Tensor) -> Tensor:
        norm = torch.stack([one.grad.norm() for one in self.each()]).norm()
        return parameter.grad * (1000 / norm).clamp(max=1)


class NormOfAGroup(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        (group,) = [one for one in self.param_groups if any(parameter is member for member in one["params"])]
        return parameter.grad / torch.stack([one.grad.norm() for one in self.each(group)]).norm()


class ByItsRate(Own):
    """Its steps are as long as its learning rate says, and all gradients together."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor) -> None:
        super().__init__(params)
        self.param_groups[0]["lr"] = lr

    def direction(self, parameter: Tensor) -> Tensor:
        norm = torch.stack([one.grad.norm() for one in self.each()]).norm()
        return parameter.grad / norm * self.param_groups[0]["lr"]


class NeverMoves(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter)


class RunningDistance(Own):
    """A number of its own that grows with what all parameters did before, as D-adaptation's estimate."""

    distance = 1.0

    def direction(self, parameter: Tensor) -> Tensor:
        self.distance += parameter.grad.abs().sum().item()
        return parameter.grad * self.distance


class OwnList(Own):
    def __init__(self, params: Iterable[Any]) -> None:
        self.kept = list(params)
        super().__init__(self.kept)

    def each(self, group: dict[str, Any] | None = None) -> list[Tensor]:
        return [parameter for parameter in self.kept if parameter.grad is not None]


class StateByPosition(Own):
    """Finds a parameter's state by where it stands in its group."""

    def direction(self, parameter: Tensor) -> Tensor:
        (position,) = [number for number, one in enumerate(self.each()) if one is parameter]
        return parameter.grad * (1 + position)


class Noise(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        return parameter.grad + torch.randn_like(parameter)


class PythonsNoise(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        return parameter.grad * random.random()


class NormOfAParameter(Own):
    """LARS in outline: a parameter alone, but not an element."""

    def direction(self, parameter: Tensor) -> Tensor:
        return parameter.grad / parameter.grad.norm()


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


class ClosureTwice(Own):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


class Uncopyable(Own):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.generator = (number for number in range(3))


class NeedsOne(Own):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        torch.stack([parameter.sum() for parameter in self.each()])
        return super().step(closure)


class LargeShapes(Own):
    def direction(self, parameter: Tensor) -> Tensor:
        if parameter.ndim == 2 and parameter.shape[1] < 20:
            raise ValueError("too small")
        return parameter.grad


class KeepsItself(Own):
    """Refers to its parameters and to itself, which is no harm."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.first = self.param_groups[0]["params"][0]
        self.itself = self

    def direction(self, parameter: Tensor) -> Tensor:
        return super().direction(parameter) * (2 if parameter is self.itself.first else 1)


def torchs(cls: Any, **arguments: Any) -> Callable[[], Optimizer]:
    return lambda: cls(parameters(), **arguments)


def own(cls: Any) -> Callable[[], Optimizer]:
    return lambda: cls(parameters())


def narrow(make: Callable[..., Optimizer], dtype: torch.dtype) -> Callable[[], Optimizer]:
    return lambda: make([nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters()])


def in_groups(cls: Any) -> Optimizer:
    return cls([{"params": parameters()[:3], "lr": 0.2}, {"params": parameters()[3:]}])


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


ClosureTwiceError = ClosureEvaluatedAgainError
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
# What is asked, and the answers for parameters and for elements.
CASES: dict[str, tuple[Callable[[], Optimizer], Any, Any]] = {
    **{name: (torchs(getattr(torch.optim, name), lr=0.1), True, True) for name in ELEMENTWISE},
    # Before, it had its state when it was made, and only then: a copy with other parameters has none.
    **({"Adagrad": (torchs(torch.optim.Adagrad), None, None)} if is_before("2.13") else {}),
    "Adam in groups": (lambda: in_groups(torch.optim.Adam), True, True),
    "Adam, amsgrad": (torchs(torch.optim.Adam, amsgrad=True, weight_decay=0.1), True, True),
    "Adam, foreach": (torchs(torch.optim.Adam, foreach=True), True, True),
    "Adam, fused": (torchs(torch.optim.Adam, fused=True), True, True),
    "RMSprop, all of it": (torchs(torch.optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.1), True, True),
    "SGD, all of it": (torchs(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), True, True),
    "Adafactor": (torchs(torch.optim.Adafactor), True, False),
    # A matrix is all that it takes.
    "Muon": (lambda: torch.optim.Muon(matrices()), True, None),
    # Dense gradients are not what it takes.
    "SparseAdam": (torchs(torch.optim.SparseAdam), None, None),
    "LBFGS": (torchs(torch.optim.LBFGS), ClosureTwiceError, ClosureTwiceError),
    "plain": (own(Own), True, True),
    "momentum": (own(Momentum), True, True),
    "momentum in groups": (lambda: in_groups(Momentum), True, True),
    "unlike parameters": (unlike_parameters, True, True),
    "one parameter": (lambda: Own(parameters()[:1]), True, True),
    # A rank that owns nothing would raise in training as well.
    "one parameter, and needs one": (lambda: NeedsOne(parameters()[:1]), None, True),
    "needs one": (own(NeedsOne), True, True),
    "nothing but an empty parameter": (lambda: Own([nn.Parameter(torch.zeros(0))]), True, True),
    "norm of a parameter": (own(NormOfAParameter), True, False),
    "global norm": (own(GlobalNorm), False, False),
    "global clip": (own(GlobalClip), False, False),
    "norm of a group": (lambda: in_groups(NormOfAGroup), False, False),
    "running distance": (own(RunningDistance), False, False),
    # The other one comes first, or last.
    "running distance over two": (lambda: RunningDistance(parameters()[:2]), False, False),
    "state by position": (own(StateByPosition), False, True),
    "its own list": (own(OwnList), False, False),
    "noise": (own(Noise), False, False),
    "Python's noise": (own(PythonsNoise), False, False),
    "loads its state": (own(LoadsItsState), True, True),
    "mixes what it loads": (own(MixesWhatItLoads), False, False),
    "keeps itself": (own(KeepsItself), False, False),
    "closure twice": (own(ClosureTwice), ClosureTwiceError, ClosureTwiceError),
    # A warm-up starts at nothing, or next to it, and what does not move would look alone.
    **{
        f"{cls.__name__}, learning rate {lr}": (torchs(cls, lr=lr), cls is not ByItsRate, cls is torch.optim.AdamW)
        for cls in (ByItsRate, torch.optim.AdamW, torch.optim.Adafactor)
        for lr in (0.0, 1e-9, torch.tensor(0.0))
    },
    # So would what is lost in rounding; and overflow would look like others' doing.
    **{
        f"{name}, {dtype}": (narrow(make, dtype), alone, elements_alone)
        for dtype in (torch.bfloat16, torch.float16)
        for name, make, alone, elements_alone in (
            ("global norm", GlobalNorm, False, False),
            ("by its rate", partial(ByItsRate, lr=1e-4), False, False),
            ("Adafactor", torch.optim.Adafactor, True, False),
            ("AdamW", partial(torch.optim.AdamW, lr=1e-5), True, True),
        )
    },
    "never moves": (own(NeverMoves), None, None),
    "uncopyable": (own(Uncopyable), None, None),
    "large shapes": (own(LargeShapes), None, None),
}


def asked(question: Callable[[Optimizer], bool | None], optimizer: Optimizer) -> Any:
    try:
        return question(optimizer)
    except ClosureEvaluatedAgainError as error:
        assert type(optimizer).__name__ in str(error)
        return ClosureEvaluatedAgainError


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    make, alone, elements_alone = CASES[name]
    assert asked(steps_parameters_alone, make()) is alone
    assert asked(steps_elements_alone, make()) is elements_alone


def stepped(make: Callable[[], Optimizer]) -> Optimizer:
    """In the middle of training, with gradients waiting."""
    optimizer = make()
    for number in range(2):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        if number == 0:
            optimizer.step()
    return optimizer


def contents(optimizer: Optimizer) -> dict[str, Any]:
    """All that can be seen of it, tensors by their bits."""
    group = optimizer.param_groups[0]
    return {
        "attributes": {key: id(value) for key, value in vars(optimizer).items()},
        "parameters": [(id(p), p.data_ptr(), p._version, p.detach().clone()) for p in group["params"]],
        "gradients": [(id(p.grad), p.grad._version, p.grad.clone()) for p in group["params"]],
        "state": [
            (id(key), {name: (id(value), value.clone()) for name, value in state.items()})
            for key, state in optimizer.state.items()
        ],
        "settings": {key: value for key, value in group.items() if key != "params"},
        "random numbers": (torch.get_rng_state(), random.getstate()),
        "hooks": [list(vars(optimizer)[name]) for name in vars(optimizer) if "hooks" in name],
    }


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon", "momentum", "noise", "Python's noise", "its own list"])
@pytest.mark.parametrize("question", [steps_parameters_alone, steps_elements_alone])
def test_asking_changes_nothing(name: str, question: Callable[[Optimizer], bool | None]) -> None:
    optimizer = stepped(CASES[name][0])
    before = contents(optimizer)
    question(optimizer)
    assert_same(contents(optimizer), before)


class NotToBeCopied:
    """Stands for the module, trainer or file that a user's hook may belong to."""

    def __init__(self) -> None:
        self.called = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "NotToBeCopied":
        raise AssertionError("a hook's owner was copied")

    def hook(self, *_: Any) -> None:
        self.called += 1


@pytest.mark.parametrize("cls", [Momentum, LoadsItsState])
def test_hooks_are_not_called_nor_copied(cls: Any) -> None:
    owner = NotToBeCopied()
    optimizer = cls(parameters())
    for event in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            getattr(optimizer, f"register_{event}_{when}_hook")(owner.hook)
    assert steps_parameters_alone(optimizer) is True
    assert owner.called == 0


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=list(SCHEDULERS))
@pytest.mark.parametrize(("name", "expected"), [("AdamW", True), ("Adafactor", True), ("global norm", False)])
def test_a_scheduler_does_not_matter(name: str, expected: bool, make_scheduler: Callable[[Optimizer], Any]) -> None:
    optimizer = CASES[name][0]()
    scheduler = make_scheduler(optimizer)
    counted = scheduler.last_epoch, getattr(optimizer, "_opt_called", False)
    assert steps_parameters_alone(optimizer) is expected
    assert (scheduler.last_epoch, getattr(optimizer, "_opt_called", False)) == counted


class StateThatCannotBeCopied(Tensor):
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        raise AssertionError("state was copied")


def test_state_is_not_copied_even_where_a_scheduler_refers_to_the_optimizer() -> None:
    """It may fill most of a device's memory."""
    optimizer = Momentum(parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum"] = torch.zeros_like(parameter).as_subclass(StateThatCannotBeCopied)
    assert steps_parameters_alone(optimizer) is True


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor, Momentum, GlobalNorm])
def test_many_parameters_take_no_longer(cls: Any) -> None:
    optimizer = cls([nn.Parameter(torch.zeros(3, 5)) for _ in range(3000)])
    # What a first call imports is not what many parameters cost; nor is what other programs have held it up.
    steps_parameters_alone(cls([nn.Parameter(torch.zeros(3, 5))]))
    start = time.thread_time()
    assert steps_parameters_alone(optimizer) is (cls is not GlobalNorm)
    assert time.thread_time() - start < 2.0


def test_large_parameters_are_not_copied() -> None:
    # Expanded: what is asked for is no memory, which a copy would need: 16 TiB of it.
    huge = nn.Parameter(torch.zeros(1, 1).expand(2**21, 2**21))
    assert steps_parameters_alone(Momentum([huge, *parameters()])) is True


def test_one_evaluation_is_one() -> None:
    loss = torch.ones(())
    closure = OneEvaluation(lambda: loss, "Some")
    assert closure() is loss
    with pytest.raises(ClosureEvaluatedAgainError, match="Some evaluates its closure more than once"):
        closure()
