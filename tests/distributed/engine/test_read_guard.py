"""A marked parameter is waited for by whatever reads it, and by nothing that does not."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lightning_parstrat.distributed.engine.gatherer import (
    InFlightParameter,
    mark,
    unmark,
    wait_for_parameters,
)

NEW = 3.0


class OnTheWay:
    """A module whose parameters hold NaN until they are waited for, then ``NEW``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.arrivals = 0
        for parameter in self.parameters:
            parameter.data.fill_(float("nan"))
        # As the wire does, past torch.
        self.memory = [parameter.data.numpy() for parameter in self.parameters]
        mark(self.parameters, self.arrive)

    def arrive(self) -> None:
        self.arrivals += 1
        unmark(self.parameters)
        for array in self.memory:
            array.fill(NEW)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs * weight.sum()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def in_a_thread(function: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


ONES = torch.ones(1, 4)
# Each returns what it has read; a NaN in it was read too early.
READS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda m: m(ONES),
    "matmul": lambda m: ONES @ m.weight.T,
    "a keyword": lambda m: F.linear(ONES, weight=m.weight),
    "in a list": lambda m: torch.stack(torch._foreach_norm([m.weight, m.bias])),
    "data": lambda m: m.weight.data,
    "detach": lambda m: m.weight.detach(),
    "clone": lambda m: m.weight.clone(),
    "storage": lambda m: torch.tensor(m.weight.untyped_storage().tolist()[:4]).float() / 1.0,
    "state dict": lambda m: m.state_dict()["weight"],
    "deepcopy": lambda m: copy.deepcopy(m).weight,
    "copy of a parameter": lambda m: copy.deepcopy(m.weight),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).weight,
    "torch.save": lambda m: saved(m.weight),
    "operator": lambda m: torch.ops.aten.sum(m.weight),
    "custom function": lambda m: Scale.apply(ONES, m.weight),
    "functional call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (ONES,)),
    "vmap": lambda m: torch.vmap(lambda x: m.weight @ x)(ONES),
    "another thread": lambda m: in_a_thread(lambda: m.weight.detach().clone()),
    "repr": lambda m: torch.tensor(float("nan") if "nan" in repr(m.weight) else 0.0),
    "version": lambda m: torch.tensor(float(m.weight._version)),
}


def test_whoever_reads_it_waits() -> None:
    for name, read in READS.items():
        on_the_way = OnTheWay(nn.Linear(4, 4))
        found = read(on_the_way.module)
        assert on_the_way.arrivals == 1, name
        assert not torch.isnan(found).any(), name
        assert type(found) in (Tensor, nn.Parameter), name
        assert all(type(parameter) is nn.Parameter for parameter in on_the_way.module.parameters()), name


KNOWN: dict[str, Callable[[nn.Linear], Any]] = {
    "shape": lambda m: m.weight.shape,
    "size": lambda m: (m.weight.size(), m.weight.size(0), len(m.weight), m.weight.numel(), m.weight.dim()),
    "dtype and device": lambda m: (m.weight.dtype, m.weight.device, m.weight.is_cuda, m.weight.is_floating_point()),
    "gradient": lambda m: [p.grad for p in m.parameters()],
    "zero grad": lambda m: m.zero_grad(),
    "freeze": lambda m: m.requires_grad_(False).requires_grad_(True),
    "names": lambda m: [name for name, _ in m.named_parameters()],
    "hash": lambda m: {p: 1 for p in m.parameters()}[m.weight],
    "isinstance": lambda m: [isinstance(p, nn.Parameter) for p in m.parameters()],
    "hooks": lambda m: [p.register_post_accumulate_grad_hook(print).remove() for p in m.parameters()],
    "count": lambda m: sum(p.numel() * p.element_size() for p in m.parameters() if p.requires_grad),
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).zero_grad(),
}


def test_who_asks_for_no_content_does_not_wait() -> None:
    for name, ask in KNOWN.items():
        on_the_way = OnTheWay(nn.Linear(4, 4))
        ask(on_the_way.module)
        assert on_the_way.arrivals == 0, name
        assert all(type(parameter) is InFlightParameter for parameter in on_the_way.module.parameters()), name
        wait_for_parameters(on_the_way.parameters)
        assert on_the_way.arrivals == 1, name


class Foreign(nn.Module):
    """Hands its parameter to code that asks nobody, as a compiled extension does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.weight.detach().clone()


class CallsNoChild(nn.Module):
    """Its forward is put on the object, and reads what its children hold, as a captured CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Foreign()
        weight = self.child.weight

        def replay() -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return weight.detach().clone()

        self.forward = replay


def test_a_module_that_is_called_waits_for_what_it_holds() -> None:
    for make in (Foreign, CallsNoChild):
        on_the_way = OnTheWay(nn.Sequential(make()))
        assert not torch.isnan(on_the_way.module[0]()).any()
        assert on_the_way.arrivals == 1


def test_modules_are_watched_once_and_only_while_something_is_on_the_way() -> None:
    before = len(module_hooks._global_forward_pre_hooks)
    first, second = OnTheWay(nn.Linear(4, 4)), OnTheWay(nn.Linear(4, 4))
    assert len(module_hooks._global_forward_pre_hooks) == before + 1
    first.arrive()
    assert len(module_hooks._global_forward_pre_hooks) == before + 1
    second.arrive()
    assert len(module_hooks._global_forward_pre_hooks) == before


def test_what_does_not_read_leaves_others_on_the_way() -> None:
    first, second = OnTheWay(nn.Linear(4, 4)), OnTheWay(nn.Linear(4, 4))
    first.module(ONES)
    assert (first.arrivals, second.arrivals) == (1, 0)
    torch.add(first.module.bias, second.module.bias)
    assert (first.arrivals, second.arrivals) == (1, 1)
