"""When gradients become ready, measured by a backward that takes its time."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.ddp.backward_clock import BackwardClock
from tests.held_time import HeldTime

CPU = torch.device("cpu")
PAUSE = 0.25


class Pause(torch.autograd.Function):
    """Lets time pass when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, held_time: HeldTime) -> Tensor:
        ctx.held_time = held_time
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.held_time.pass_by(PAUSE)
        return gradients[0], None


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(count)]


def chain(held_time: HeldTime, layers: list[nn.Parameter]) -> Tensor:
    """The last is used last; before the gradient of each there is a pause."""
    hidden = torch.ones(3)
    for layer in layers:
        hidden = Pause.apply(hidden * layer, held_time)
    return hidden.sum()


def step(
    held_time: HeldTime,
    clock: BackwardClock,
    layers: list[nn.Parameter],
    forward_seconds: float = 0,
    wire_seconds: float = 0,
) -> None:
    clock.begin_forward()
    loss = chain(held_time, layers)
    held_time.pass_by(forward_seconds)
    clock.begin_backward()
    loss.backward()
    held_time.pass_by(wire_seconds)
    clock.end_backward()


def test_times_are_those_of_the_backward(held_time: HeldTime) -> None:
    layers = parameters(4)
    clock = BackwardClock(layers, CPU)
    for wire_seconds in (2.0, 0.5):
        step(held_time, clock, layers, forward_seconds=8.0, wire_seconds=wire_seconds)
        timing = clock.timing()
        assert timing.ready_seconds == (4 * PAUSE, 3 * PAUSE, 2 * PAUSE, PAUSE)
        assert timing.backward_seconds == 4 * PAUSE
        assert timing.exposed_seconds == wire_seconds
        assert timing.seconds == 8.0 + 4 * PAUSE + wire_seconds


def test_times_are_in_the_order_of_parameters_not_of_gradients(held_time: HeldTime) -> None:
    layers = parameters(3)
    clock = BackwardClock([layers[1], layers[2], layers[0]], CPU)
    step(held_time, clock, layers)
    middle, last, first = clock.timing().ready_seconds
    assert (last, middle, first) == (PAUSE, 2 * PAUSE, 3 * PAUSE)


def test_what_is_used_twice_is_ready_when_the_first_use_has_been_gone_through(held_time: HeldTime) -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    step(held_time, clock, [layers[0], layers[1], layers[0]])
    twice, once = clock.timing().ready_seconds
    assert (once, twice) == (2 * PAUSE, 3 * PAUSE)


def test_without_a_gradient_there_is_no_time(held_time: HeldTime) -> None:
    layers = parameters(3)
    clock = BackwardClock(layers, CPU)
    step(held_time, clock, layers)
    assert clock.timing().ready_seconds == (3 * PAUSE, 2 * PAUSE, PAUSE)
    # What an earlier step has left behind is forgotten.
    step(held_time, clock, layers[1:])
    assert clock.timing().ready_seconds == (0.0, 2 * PAUSE, PAUSE)


def test_a_backward_that_sends_nothing_does_not_count(held_time: HeldTime) -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    clock.begin_forward()
    assert (clock.backwards, clock.has_measured) == (0, False)
    chain(held_time, layers).backward()
    loss = chain(held_time, layers[:1])
    clock.begin_backward()
    loss.backward()
    clock.end_backward()
    assert (clock.backwards, clock.has_measured) == (1, True)
    measured = clock.timing()
    assert measured.ready_seconds == (PAUSE, 0.0)
    # Nor does one that comes after it.
    chain(held_time, layers).backward()
    assert clock.timing() == measured
    clock.begin_forward()
    assert (clock.backwards, clock.has_measured) == (0, False)


def test_all_backwards_are_counted(held_time: HeldTime) -> None:
    layers = parameters(1)
    clock = BackwardClock(layers, CPU)
    clock.begin_forward()
    for _ in range(3):
        clock.begin_backward()
        chain(held_time, layers).backward()
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


def test_once_closed_it_leaves_parameters_alone(held_time: HeldTime) -> None:
    layers = parameters(2)
    clock = BackwardClock(layers, CPU)
    clock.close()
    step(held_time, clock, layers)
    assert clock.timing().ready_seconds == (0.0, 0.0)
    assert not any(layer._post_accumulate_grad_hooks for layer in layers)
    # Hooks are copied along with what they stand on.
    copy.deepcopy(layers)
