"""After an exception that a program catches within its training step, the next step is as it would be without it."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.odd import Block, Blocks
from tests.strategies.parity import ddp, largest_difference, make_trainer, reference, train, zero1, zero3
from tests.torch_versions import needs_torch

STRATEGIES: dict[str, Any] = {
    "zero1_custom": zero1,
    "zero1_custom, gradients exposed": partial(zero1, expose_gradients=True),
    "zero2_custom": partial(zero1, shard_gradients=True),
    "zero3_custom": zero3,
    "zero3_custom, kept gathered": partial(zero3, reshard_after_forward=False),
}

WHERE = ("forward, within a unit", "backward", "backward, within a unit")
HANDLED = ("leaves it out", "takes half of it", "steps what came before")

TOO_LARGE = 3
"""The batch that does not fit into memory."""


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


class Knows(Blocks):
    """Knows which batch is too large, and does not try."""

    automatic_optimization = False

    def __init__(self, where: str, handled: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Deep() for _ in range(3))
        self.where, self.handled = where, handled

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        fits = batch_idx != TOO_LARGE
        if fits or self.handled == "steps what came before":
            self.manual_backward(self.compute_loss(batch))
        if not fits:
            self.attempt(batch)
            if self.handled == "takes half of it":
                optimizer.zero_grad()
                self.manual_backward(self.compute_loss(batch[:2]))
        if fits or self.handled != "leaves it out":
            optimizer.step()
        return torch.zeros(())

    def attempt(self, batch: Tensor) -> None:
        pass


class Catches(Knows):
    """Tries, and runs out of memory."""

    def attempt(self, batch: Tensor) -> None:
        layer = self.blocks[1] if self.where == "backward" else self.blocks[1].first
        hook = layer.register_forward_hook(run_out if self.where == WHERE[0] else run_out_in_backward)
        with pytest.raises(torch.OutOfMemoryError):
            self.manual_backward(self.compute_loss(batch))
        hook.remove()


class KnowsInBackward(Blocks):
    """In automatic optimization, the module's ``backward`` knows which batch is too large, and does not try."""

    def __init__(self, takes_half: bool) -> None:
        super().__init__()
        self.takes_half = takes_half

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batch, self.fits = batch, batch_idx != TOO_LARGE
        return self.compute_loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.fits:
            loss.backward()
            return
        self.attempt(loss)
        self.optimizers().zero_grad()
        if self.takes_half:
            self.compute_loss(self.batch[:2]).backward()

    def attempt(self, loss: Tensor) -> None:
        pass


class CatchesInBackward(KnowsInBackward):
    """Its ``backward`` tries, and runs out of memory."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hook = self.blocks[1].register_forward_hook(run_out_in_backward) if batch_idx == TOO_LARGE else None
        loss = super().training_step(batch, batch_idx)
        if hook is not None:
            hook.remove()
        return loss

    def attempt(self, loss: Tensor) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()


class Weighed(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.compute_loss(batch), "loss_weight": float(1 + batch_idx % 3)}


class TriesAnother(Weighed):
    """Each backward comes after another one that fails, and that has nothing to do with the module."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(RuntimeError):
            torch.ones(()).backward()
        loss.backward()


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("as a GPU would")


def run_out_in_backward(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.register_hook(run_out)


# Without the gradients of what has failed: those that it has left are added to what came before, as under `ddp`.
CASES = [(where, handled) for where in WHERE for handled in HANDLED if where == WHERE[0] or handled != HANDLED[2]]


def compare(name: str) -> dict[tuple[str, str], float]:
    found = {}
    for where, handled in CASES:
        actual = train(partial(Catches, where, handled), STRATEGIES[name]())
        # It does not depend on where the exception comes from.
        expected = reference(("caught", handled), lambda: train(partial(Knows, where, handled), ddp()))  # noqa: B023
        found[where, handled] = largest_difference(actual, expected)
    return found


of_zero3 = needs_torch("2.13", "FSDP2 cannot go on")
NAMES = [
    pytest.param(name, marks=[*([of_zero3] * ("zero3" in name)), *([pytest.mark.slow] * ("," in name or "2" in name))])
    for name in STRATEGIES
]


@pytest.mark.parametrize("name", NAMES)
def test_the_next_step(pool: RankPool, name: str) -> None:
    for found in pool.run(2, compare, name):
        assert {case: difference for case, difference in found.items() if not difference <= FP32} == {}


def compare_in_backward(name: str, takes_half: bool, accumulate: int) -> float:
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    actual = train(partial(CatchesInBackward, takes_half), STRATEGIES[name](), **arguments)
    expected = reference(
        ("caught in backward", takes_half, accumulate),
        lambda: train(partial(KnowsInBackward, takes_half), ddp(), **arguments),
    )
    return largest_difference(actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_step_if_the_modules_backward_catches_it(pool: RankPool, name: str) -> None:
    # A forward there reads the shards of what zero3_custom gathers with the root.
    for takes_half in (False,) if "zero3" in name else (False, True):
        for accumulate in (1, 2, 3):
            for difference in pool.run(2, compare_in_backward, name, takes_half, accumulate):
                assert difference <= FP32, (takes_half, accumulate)


def compare_weighed(name: str, accumulate: int) -> float:
    runs = [train(module, STRATEGIES[name](), accumulate_grad_batches=accumulate) for module in (TriesAnother, Weighed)]
    return largest_difference(*runs)


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_that_counts_after_one_that_fails(pool: RankPool, name: str) -> None:
    for accumulate in (1, 2):
        assert all(one <= FP32 for one in pool.run(2, compare_weighed, name, accumulate))


def ends_of_backwards() -> list[int]:
    """How often FSDP2 ends a unit's backward in each step: there it waits for reductions, on a GPU."""
    ends = [0]

    class Counts(Catches):
        def on_train_batch_start(self, *_: Any) -> None:
            ends.append(0)

    end = FSDPParamGroup.finalize_backward

    def count(group: FSDPParamGroup) -> None:
        ends[-1] += 1
        end(group)

    with patch.object(FSDPParamGroup, "finalize_backward", count):
        train(partial(Counts, "backward", "leaves it out"), zero3(), samples_per_rank=24)
    return ends


@of_zero3
def test_fsdp_ends_the_next_backward_too(pool: RankPool) -> None:
    for ends in pool.run(2, ends_of_backwards):
        assert ends == [0, 4, 4, 4, 0, 4, 4]


def go_on_by(strategy: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        train(partial(Catches, "backward", "leaves it out"), strategy)
    return str(raised.value)


def go_on_with_an_older_torch() -> list[str]:
    """The error of the training whose exception was caught, and that of another training of the module."""
    module, errors = Catches("backward", "leaves it out"), []
    with patch.object(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                make_trainer(zero3()).fit(module, zoo.loader(32, 4))
            errors.append(str(raised.value))
    return errors


@of_zero3
def test_an_older_torch_does_not_go_on(pool: RankPool) -> None:
    for first, second in pool.run(2, go_on_with_an_older_torch):
        assert "ended an earlier backward" in first and "torch 2.13 or newer" in first
        assert "ended an earlier forward or backward" in second and "torch 2.13 or newer" in second


@pytest.mark.parametrize("name", ["ddp_tuned", "ddp_tuned_find_unused_parameters_true"])
def test_the_error_of_ddp_names_the_strategy_that_goes_on(pool: RankPool, name: str) -> None:
    for error in pool.run(2, go_on_by, name):
        assert "exception" in error and "zero1_custom" in error
