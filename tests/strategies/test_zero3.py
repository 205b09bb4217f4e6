"""``zero3_custom`` and loss scales; optimizers that are made too early. The table of cases has its trainings."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.tensor import DTensor

from tests.pool import RankPool
from tests.strategies import odd, zoo
from tests.strategies.parity import ddp, largest_difference, train, zero3


def scaled(model: type, init_scale: float) -> tuple[float, float]:
    """How far a training with a loss scale gets from that of ``ddp``; and how far their last scales are apart."""

    def train_by(chosen: Any) -> tuple[Any, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        return train(model, chosen, precision=MixedPrecision("16-mixed", "cpu", scaler)), scaler.get_scale()

    expected, expected_scale = train_by(ddp())
    actual, scale = train_by(zero3())
    return largest_difference(actual, expected), abs(scale - expected_scale)


# Convolutions' weights may stay whole, beside others that are sharded: torch unscales no mixture.
@pytest.mark.parametrize("init_scale", [128.0, 2.0**24])
@pytest.mark.parametrize("model", [zoo.Convolutional, zoo.MLP])
def test_whole_and_sharded_gradients_are_unscaled_together(pool: RankPool, model: type, init_scale: float) -> None:
    for parameters, scale in pool.run(2, scaled, model, init_scale):
        assert parameters <= 1e-3 and scale == 0


class OverflowsInOneShard(zoo.MLP):
    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and dist.get_rank() == 1:
            parameter = next(iter(self.parameters()))
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().fill_(torch.inf)


def parameters_and_scale_after_overflow() -> tuple[list[torch.Tensor], float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    run = train(OverflowsInOneShard, zero3(), precision=MixedPrecision("16-mixed", "cpu", scaler))
    return run.parameters[-1], scaler.get_scale()


def test_what_overflows_on_one_rank_lowers_the_scale_of_all(pool: RankPool) -> None:
    (first, first_scale), (second, second_scale) = pool.run(2, parameters_and_scale_after_overflow)
    # As long as the overflow comes back: the step is left out every time.
    assert first_scale == second_scale < 128.0
    assert first and all(map(torch.equal, first, second))


def train_with_early_optimizer() -> str:
    class Early(odd.MLP):
        def build(self) -> None:
            super().build()
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

    with pytest.raises(ValueError, match="Make it in `configure_optimizers`") as raised:
        train(Early, zero3())
    return str(raised.value)


def test_an_optimizer_of_parameters_before_they_were_sharded_is_refused(pool: RankPool) -> None:
    assert all("SGD" in message for message in pool.run(2, train_with_early_optimizer))
