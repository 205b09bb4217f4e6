"""World size 1: what is left out of the path of more ranks, and that it makes no difference."""

from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parstrat.distributed.comm.backends import LocalCollectives
from lightning_parstrat.distributed.zero1 import engine as engine_module
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from lightning_parstrat.distributed.zero1.local_reductions import LocalReductions
from tests.distributed.engines import adafactor, adamw, backward, make_engine, sgd
from tests.pool import RankPool

WIDTH = 6


class AsOfMany(LocalCollectives):
    """Sends nothing, but does not say so."""

    sends_nothing = False


def as_of_many_ranks(group: object, *_: object) -> AsOfMany:
    return AsOfMany(group)  # type: ignore[arg-type]


def make_module(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    # Strides of its own.
    kernel = nn.Conv1d(2, 2, 3)
    kernel.weight.data = torch.randn(3, 2, 2).permute(2, 1, 0)
    return nn.Sequential(*layers, kernel).to(dtype)


def loss_of(module: nn.Sequential, step: int) -> Tensor:
    torch.manual_seed(step)
    hidden = torch.randn(3, WIDTH, dtype=next(module.parameters()).dtype)
    # The second layer is left out of every other step, the kernel of the first two.
    for number, layer in enumerate(module[:4]):
        if number != 1 or step % 2 == 0:
            hidden = torch.tanh(layer(hidden))
    if step > 1:
        hidden = module[4](torch.stack([hidden, -hidden], dim=1))
    return hidden.float().square().sum()


Way = Callable[[ShardedDataParallel, Optimizer, nn.Sequential, int], None]


def one_backward(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    backward(engine, loss_of(module, step))


def several_backwards(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    for number in range(3):
        backward(engine, loss_of(module, step + number))


def accumulated(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    with engine.no_sync():
        backward(engine, loss_of(module, step))
    backward(engine, loss_of(module, step + 1))


def filled_with_zeros(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(engine, loss_of(module, step))


def never_zeroed(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    backward(engine, loss_of(module, step))


def partly_zeroed(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    backward(engine, loss_of(module, step))
    engine.reducer.finish(engine.buckets)
    engine.reducer.zero([engine.slots[module[0].weight], engine.slots[module[2].bias]])
    backward(engine, loss_of(module, step + 1))


def changed_while_shown(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    backward(engine, loss_of(module, step))
    with engine.full_gradients():
        for number, parameter in enumerate(module.parameters()):
            if parameter.grad is not None:
                parameter.grad.mul_(number)
        module[3].bias.grad = None
    assert all(parameter.grad is None for parameter in module.parameters())
    # Another backward is added to what was shown.
    backward(engine, loss_of(module, step + 1))


def weighted(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    for number in range(2):
        engine.prepare_backward(loss := loss_of(module, step + number), lambda: 0.7)
        loss.backward()


def exposed(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    engine.expose_gradients(True)
    optimizer.zero_grad()
    for number in range(2):
        backward(engine, loss_of(module, step + number))
    module[0].weight.grad.mul_(2)


def after_one_that_failed(engine: ShardedDataParallel, optimizer: Optimizer, module: nn.Sequential, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(module, step)
    handle = module[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(engine, loss)
    handle.remove()
    backward(engine, loss_of(module, step))


WAYS: list[Way] = [
    one_backward,
    several_backwards,
    accumulated,
    filled_with_zeros,
    never_zeroed,
    partly_zeroed,
    changed_while_shown,
    weighted,
    exposed,
    after_one_that_failed,
]


def train(way: Way, make: Callable[..., Optimizer], cap: float, dtype: torch.dtype) -> tuple[list[Tensor], type]:
    module = make_module(dtype)
    optimizer = make(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=cap)
    for step in range(4):
        way(engine, optimizer, module, step)
        optimizer.step()
    engine.close()
    return [parameter.detach().clone() for parameter in module.parameters()], type(engine.reducer.reductions)


def both_ways_agree(way: Way, make: Callable[..., Optimizer], cap: float, dtype: torch.dtype) -> None:
    short, kind = train(way, make, cap, dtype)
    with mock.patch.object(engine_module, "make_collectives", as_of_many_ranks):
        ordinary, other_kind = train(way, make, cap, dtype)
    assert kind is LocalReductions and other_kind is not LocalReductions
    before = list(make_module(dtype).parameters())
    # NaN is not equal to itself.
    assert all(torch.equal(one, other) for one, other in zip(short, ordinary, strict=True))
    assert not any(torch.equal(one, first) for one, first in zip(short, before, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_ordinary_path(pool: RankPool, way: Way) -> None:
    for make, cap, dtype in (
        (adamw, 1e-6, torch.float32),
        (sgd, 1.0, torch.float32),
        (adafactor, 1.0, torch.float32),
        (adamw, 1.0, torch.bfloat16),
    ):
        pool.run(1, both_ways_agree, way, make, cap, dtype)


def addresses() -> None:
    module = make_module()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0)
    accumulated: dict[Tensor, int] = {}
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: accumulated.update({p: p.grad.data_ptr()}))
    backward(engine, loss_of(module, 2))
    assert len(accumulated) == 10
    engine.reducer.finish(engine.buckets)
    assert all(parameter.grad is None for parameter in module.parameters())
    for parameter, address in accumulated.items():
        shard = engine.slots[parameter].shard
        assert shard is not None and shard.grad is not None and shard.grad.data_ptr() == address
    assert all(bucket.shard_gradient is None for bucket in engine.buckets)


def test_gradients_are_not_copied(pool: RankPool) -> None:
    pool.run(1, addresses)


class Alike(nn.Module):
    """Autograd gives parameters of different buckets one gradient, in the same memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = (nn.Parameter(torch.full((2, 3), float(number))) for number in (1, 2))

    def forward(self) -> Tensor:
        if self.how == "stacked":
            both = torch.stack([self.first, self.second]).sum(0)
        else:
            both = self.first.unsqueeze(0) + self.second.unsqueeze(0)
        return both.square().sum()


def gradients_in_the_same_memory(how: str, cap: float) -> tuple[list[Tensor], list[Tensor]]:
    module, plain = Alike(how), Alike(how)
    engine = make_engine(module, sgd(module.parameters()), bucket_cap_mb=cap)
    for scale in (0.5, 0.25):
        engine.prepare_backward(loss := module(), lambda scale=scale: scale)
        loss.backward()
        # Else this tests nothing.
        plain().backward()
        assert len({p.grad.untyped_storage().data_ptr() for p in plain.parameters() if p.grad is not None}) == 1
        plain.zero_grad()
    engine.reducer.finish(engine.buckets)
    shards = [engine.slots[parameter].shard for parameter in module.parameters()]
    expected = [torch.full((2, 3), 2.0 * 3 * 0.75) for _ in plain.parameters()]
    return [shard.grad.clone() for shard in shards if shard is not None and shard.grad is not None], expected


@pytest.mark.parametrize("cap", [1e-6, 1.0], ids=["two buckets", "one bucket"])
@pytest.mark.parametrize("how", ["stacked", "unsqueezed"])
def test_gradients_in_the_same_memory_are_scaled_once(pool: RankPool, how: str, cap: float) -> None:
    found, expected = pool.run(1, gradients_in_the_same_memory, how, cap)[0]
    assert len(found) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def looked_at_within_a_window() -> tuple[list[Tensor], list[Tensor]]:
    """``full_gradients()`` where nothing has been reduced since the last step."""
    module, plain = make_module(), make_module()
    optimizer = sgd(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0)
    for step in (2, 4, 6):
        optimizer.zero_grad()
        with engine.no_sync():
            backward(engine, loss_of(module, step))
            with engine.full_gradients():
                pass
        engine.prepare_backward(loss := loss_of(module, step), lambda: 0.5)
        loss.backward()
        optimizer.step()
    reference = sgd(plain.parameters())
    for step in (2, 4, 6):
        reference.zero_grad()
        loss_of(plain, step).backward()
        reference.step()
    engine.close()
    return [p.detach() for p in module.parameters()], [p.detach() for p in plain.parameters()]


def test_full_gradients_leave_what_is_accumulated_where_it_is(pool: RankPool) -> None:
    found, expected = pool.run(1, looked_at_within_a_window)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self) -> Tensor:
        # Its gradient is conjugated lazily.
        return (self.weight.conj() * torch.full((3, 3), 1 + 2j) - 1).abs().square().sum()


def complex_parameters() -> tuple[Tensor, Tensor]:
    module, plain = Complex(), Complex()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    engine = make_engine(module, optimizer)
    for _ in range(3):
        backward(engine, module())
        optimizer.step()
        optimizer.zero_grad()
        plain().backward()
        assert plain.weight.grad is not None and plain.weight.grad.is_conj()
        plain.weight.grad = plain.weight.grad.resolve_conj()
        reference.step()
        reference.zero_grad()
    engine.close()
    return module.weight.detach(), plain.weight.detach()


def test_complex_parameters_are_stepped(pool: RankPool) -> None:
    found, expected = pool.run(1, complex_parameters)[0]
    assert torch.equal(found, expected) and not torch.equal(found, Complex().weight)


class Operators(TorchDispatchMode):
    """Counts operators that allocate, read or write tensors, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view and "detach" not in func.name() and func.namespace != "profiler":
            self.counted[func.name()] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step() -> tuple[Counter[str], Counter[str]]:
    found = []
    for shards in (False, True):
        module = make_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
        engine = make_engine(module, optimizer) if shards else None
        for step in range(6):
            with Operators() as operators:
                loss = loss_of(module, 2 * step + 2)
                if engine is None:
                    loss.backward()
                else:
                    engine.prepare_forward()
                    backward(engine, loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(operators.counted)
        if engine is not None:
            engine.close()
    return found[0], found[1]


def test_a_step_has_the_operators_of_a_step_on_one_device(pool: RankPool) -> None:
    plain, sharded = pool.run(1, operators_of_a_step)[0]
    assert sum(plain.values()) > 50
    assert sharded - plain == Counter(), sharded - plain
