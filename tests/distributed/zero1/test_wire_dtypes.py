"""What travels in bf16 is rounded once, and nothing else is: sums and steps are made in fp32."""

import copy
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.distributed.zero1.state_parts import MASTER_WEIGHTS
from tests.accounting import traffic_of
from tests.comparing import distance
from tests.distributed.engines import backward, make_engine, perceptron, squared_error
from tests.pool import RankPool

WORLD_SIZES = [1, 2, 3]
STEPS = 4


def make_optimizer(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def rounded(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.bfloat16().float() if wanted else tensor


def by_hand(world_size: int, reduce_narrow: bool, gather_narrow: bool, first: int = 0, steps: int = STEPS) -> Any:
    """The same in one process: parameters as all ranks see them, and the fp32 copies that are stepped."""
    module = perceptron()
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
    optimizer = make_optimizer(masters)
    for step in range(first, first + steps):
        total = [torch.zeros_like(master) for master in masters]
        for rank in range(world_size):
            gradients = torch.autograd.grad(squared_error(module, 10 * step + rank), list(module.parameters()))
            for whole, gradient in zip(total, gradients, strict=True):
                whole += rounded(gradient, reduce_narrow)
        for master, whole in zip(masters, total, strict=True):
            master.grad = whole * (1 / world_size)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), masters, strict=True):
                parameter.copy_(rounded(master, gather_narrow))
    return [parameter.detach() for parameter in module.parameters()], [master.detach() for master in masters]


def sums_that_overflow() -> list[float]:
    module = nn.Linear(16, 16, bias=False).half()
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=1e-6), master_weights=False)
    backward(engine, (module.weight * 40_000).sum())
    engine.reducer.finish(engine.buckets)
    owned = [slot.shard for bucket in engine.buckets for slot in bucket.slots if slot.shard is not None]
    return [number for shard in owned for number in shard.grad.reshape(-1).tolist()]


def test_a_mean_in_float16_is_found_where_the_sum_is_too_large(pool: RankPool) -> None:
    # 40,000 fits, and twice as much does not.
    for gradients in pool.run(2, sums_that_overflow):
        assert gradients and set(gradients) == {40_000.0}


def step_once(engine: Any, module: nn.Module, optimizer: Optimizer, step: int) -> None:
    loss = squared_error(module, 10 * step + dist.get_rank())
    engine.prepare_backward(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(policy: dict[str, Any], exposed: bool = False, cap: float = 1e-4) -> tuple[list[Tensor], Any, bool]:
    module = perceptron()
    optimizer = make_optimizer(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=cap, **policy)
    engine.expose_gradients(exposed)
    for step in range(STEPS):
        step_once(engine, module, optimizer, step)
    engine.gatherer.finish()
    sent, home, formula = engine.reducer.collectives.traffic, engine.gatherer.collectives.traffic, traffic_of(engine)
    counted = (sent.reduce_scatter_bytes, home.all_gather_bytes)
    right = counted == (STEPS * formula.reduce_scatter_bytes, STEPS * formula.all_gather_bytes)
    state = optimizer.state_dict()
    return [parameter.detach().clone() for parameter in module.parameters()], state, right


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("cap", [1e-6, 1.0])
@pytest.mark.parametrize(("reduce_dtype", "gather_dtype"), [("bf16", None), (None, "bf16"), ("bf16", "bf16")])
def test_each_gradient_and_each_parameter_is_rounded_once(
    pool: RankPool, world_size: int, cap: float, reduce_dtype: Any, gather_dtype: Any
) -> None:
    several = world_size > 1
    parameters, masters = by_hand(world_size, several and reduce_dtype == "bf16", several and gather_dtype == "bf16")
    policy = {"reduce_dtype": reduce_dtype, "gather_dtype": gather_dtype}
    for found, state, right in pool.run(world_size, trained, policy, False, cap):
        # To the last bit but where AdamW's vectorised tail rounds otherwise; a rounding to bf16 is 4e-3.
        for one, other in zip(found, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0 if gather_dtype and several else 1e-7)
        assert right
        kept = state.get(MASTER_WEIGHTS, {})
        assert bool(kept) == (several and gather_dtype == "bf16")
        for position, master in kept.items():
            torch.testing.assert_close(master, masters[position], rtol=0, atol=1e-7)
            assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.parametrize("world_size", [2, 3])
def test_shown_gradients_have_travelled_in_the_narrow_dtype_too(pool: RankPool, world_size: int) -> None:
    parameters, _ = by_hand(world_size, True, False)
    for found, *_ in pool.run(world_size, trained, {"reduce_dtype": "bf16"}, True):
        torch.testing.assert_close(found, parameters, rtol=0, atol=1e-7)


def bytes_per_step(policy: dict[str, Any]) -> tuple[int, int]:
    module = perceptron()
    engine = make_engine(module, make_optimizer(module.parameters()), bucket_cap_mb=1.0, **policy)
    traffic = traffic_of(engine)
    return traffic.reduce_scatter_bytes, traffic.all_gather_bytes


def test_half_of_the_bytes_travel(pool: RankPool) -> None:
    ((away, home), *_) = pool.run(2, bytes_per_step, {})
    assert pool.run(2, bytes_per_step, {"reduce_dtype": "bf16"}) == [(away // 2, home)] * 2
    assert pool.run(2, bytes_per_step, {"gather_dtype": "bf16"}) == [(away, home // 2)] * 2


def resumed() -> tuple[list[Tensor], list[Tensor]]:
    """Parameters of a training that goes through, and of one that is saved and resumed in the middle."""
    found = []
    for stop in (None, 2):
        module = perceptron()
        optimizer = make_optimizer(module.parameters())
        engine = make_engine(module, optimizer, gather_dtype="bf16")
        for step in range(STEPS):
            if step == stop:
                saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
                engine.close()
                module = perceptron()
                optimizer = make_optimizer(module.parameters())
                module.load_state_dict(saved[0])
                engine = make_engine(module, optimizer, gather_dtype="bf16")
                optimizer.load_state_dict(saved[1])
            step_once(engine, module, optimizer, step)
        engine.gatherer.finish()
        found.append([parameter.detach().clone() for parameter in module.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_training_goes_on_with_what_was_not_rounded(pool: RankPool, world_size: int) -> None:
    for through, again in pool.run(world_size, resumed):
        assert distance(through, again) == 0


def written_into() -> list[list[float]]:
    """What a user writes into a parameter is what steps, rounded only on the way."""
    module = perceptron()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine = make_engine(module, optimizer, gather_dtype="bf16")
    step_once(engine, module, optimizer, 0)
    engine.gatherer.finish()
    with torch.no_grad():
        module[0].weight.fill_(1.0 + 2.0**-12)
    step_once(engine, module, optimizer, 1)
    engine.gatherer.finish()
    masters = optimizer.state_dict()[MASTER_WEIGHTS]
    return [masters[0].unique().tolist(), module[0].weight.unique().tolist()]


def test_what_is_written_into_a_parameter_is_taken_over(pool: RankPool) -> None:
    assert pool.run(2, written_into) == [[[1.0 + 2.0**-12], [1.0]]] * 2


class Mixed(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(40))
        self.b = nn.Parameter(torch.ones(40, dtype=torch.float64))
        self.c = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
        self.d = nn.Parameter(torch.ones(40, dtype=torch.complex64))


def dtypes_on_the_wire() -> dict[str, tuple[str, str, bool]]:
    module = Mixed()
    engine = make_engine(module, make_optimizer(module.parameters()), reduce_dtype="bf16", gather_dtype="bf16")
    return {str(b.dtype): (str(b.reduce_dtype), str(b.gather_dtype), b.has_master_weights) for b in engine.buckets}


def test_only_fp32_is_narrowed(pool: RankPool) -> None:
    bf16 = "torch.bfloat16"
    expected = {
        "torch.float32": (bf16, bf16, True),
        "torch.float64": ("torch.float64", "torch.float64", False),
        bf16: (bf16, bf16, True),
        "torch.complex64": ("torch.complex64", "torch.complex64", False),
    }
    assert pool.run(2, dtypes_on_the_wire) == [expected] * 2


def read_in_another_thread() -> bool:
    """Whether a thread that reads a parameter while another one brings its bucket home sees what was gathered."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0, gather_dtype="bf16")
    (bucket,) = engine.buckets
    taken, finish_gather = threading.Event(), bucket.finish_gather

    def finish_gather_slowly(buffer: Tensor) -> None:
        taken.set()
        time.sleep(0.2)
        finish_gather(buffer)

    bucket.finish_gather = finish_gather_slowly  # type: ignore[method-assign]
    backward(engine, module(torch.ones(2, 4)).sum())
    optimizer.step()
    thread = threading.Thread(target=lambda: module[0].weight.sum())
    thread.start()
    assert taken.wait(20)
    meanwhile = [parameter.detach().clone() for parameter in module[1].parameters()]
    thread.join()
    return all(map(torch.equal, meanwhile, module[1].parameters()))


def test_a_thread_that_reads_while_parameters_are_taken_home_waits_for_them(pool: RankPool) -> None:
    assert pool.run(2, read_in_another_thread) == [True, True]
