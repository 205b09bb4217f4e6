"""When gradients become ready, measured by a backward that takes its time."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.ddp.backward_clock import BackwardClock

CPU = torch.device("cpu")
PAUSE = 0.02
LATE = 0.015
"""How much longer a pause may get on a busy machine; all that is asked is that most of them do not."""


class Pause(torch.autograd.Function):
    """Sleeps when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(count)]


def chain(layers: list[nn.Parameter]) -> Tensor:
    """The last is used last; before the gradient of each there is a pause."""
    hidden = torch.ones(3)
    for layer in layers:
        hidden = Pause.apply(hidden * layer, PAUSE)
    return hidden.sum()


def step(clock: BackwardClock, layers: list[nn.Parameter], forward_seconds: float = 0, wire_seconds: float = 0) -> None:
    clock.begin_forward()
    loss = chain(layers)
    time.sleep(forward_seconds)
    clock.begin_backward()
    loss.backward()
    time.sleep(wire_seconds)
    clock.end_backward()


def test_times_are_those_of_the_backward() -> None:
    layers = parameters(4)
    clock = BackwardClock(layers, CPU)
    # What is slow at times is another process; the fastest of some steps is what was asked for.
    timings = []
    for _ in range(3):
        step(clock, layers, forward_seconds=0.05, wire_seconds=0.03)
        timings.append(clock.timing())
    for timing in timings:
        assert timing.ready_seconds[0] == max(timing.ready_seconds) == timing.backward_seconds
        assert timing.seconds >= 0.05 + 4 * PAUSE + 0.03
        assert timing.exposed_seconds >= 0.03
    for index in range(4):
        pauses = 4 - index
        soonest = min(timing.ready_seconds[index] for timing in timings)
        assert pauses * PAUSE <= soonest < pauses * PAUSE + LATE
    assert min(timing.exposed_seconds for timing in timings) < 0.03 + LATE
    assert min(timing.seconds for timing in timings) < 0.05 + 4 * PAUSE + 0.03 + LATE


def test_times_are_in_the_order_of_parameters_not_of_gradients() -> None:
    layers = parameters(3)
    clock = BackwardClock([layers[1], layers[2], layers[0]], CPU)
    step(clock, layers)
    middle, last, first = clock.timing().ready_seconds
    assert 0 < last < middle < first


def test_what_is_used_twice_is_ready_when_the_first_use_has_been_gone_through() -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    step(clock, [layers[0], layers[1], layers[0]])
    twice, once = clock.timing().ready_seconds
    assert once >= 2 * PAUSE and twice >= once + PAUSE


def test_without_a_gradient_there_is_no_time() -> None:
    layers = parameters(3)
    clock = BackwardClock(layers, CPU)
    step(clock, layers)
    assert all(seconds > 0 for seconds in clock.timing().ready_seconds)
    # What an earlier step has left behind is forgotten.
    step(clock, layers[1:])
    unused, *used = clock.timing().ready_seconds
    assert unused == 0.0 and all(seconds > 0 for seconds in used)


def test_a_backward_that_sends_nothing_does_not_count() -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    clock.begin_forward()
    assert (clock.backwards, clock.has_measured) == (0, False)
    chain(layers).backward()
    loss = chain(layers[:1])
    clock.begin_backward()
    loss.backward()
    clock.end_backward()
    assert (clock.backwards, clock.has_measured) == (1, True)
    measured = clock.timing()
    assert measured.ready_seconds[0] >= PAUSE and measured.ready_seconds[1] == 0.0
    # Nor does one that comes after it.
    chain(layers).backward()
    assert clock.timing() == measured
    clock.begin_forward()
    assert (clock.backwards, clock.has_measured) == (0, False)


def test_all_backwards_are_counted() -> None:
    layers = parameters(1)
    clock = BackwardClock(layers, CPU)
    clock.begin_forward()
    for _ in range(3):
        clock.begin_backward()
        chain(layers).backward()
        clock.end_backward()
    assert clock.backwards == 3


@pytest.mark.parametrize("until", ["nothing", "forward", "backward"])
def test_times_of_a_step_that_has_not_ended_are_not_to_be_had(until: str) -> None:
    clock = BackwardClock(parameters(1), CPU)
    if until != "nothing":
        clock.begin_forward()
    if until == "backward":
        clock.begin_backward()
    with pytest.raises(AssertionError, match="not ended"):
        clock.timing()


def test_once_closed_it_leaves_parameters_alone() -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    clock.close()
    step(clock, layers)
    assert clock.timing().ready_seconds == (0.0, 0.0)
    assert not any(layer._post_accumulate_grad_hooks for layer in layers)
    # Hooks are copied along with what they stand on.
    copy.deepcopy(layers)
