"""Averages under ``zero3_custom`` beside those of the table of callbacks."""

from typing import Any

from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import train, zero3
from tests.strategies.test_zero3_lifecycle import MadeOnMeta


def average_of_meta() -> tuple[float, float]:
    """How far the averages of a module made on the meta device are from those of its like, and whether they moved."""
    values = []

    class Keeps(EMAWeightAveraging):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            values.append([p.detach().full_tensor().clone() for p in self._average_model.module.parameters()])
            super().on_train_end(trainer, pl_module)

    run = train(MadeOnMeta, zero3(), callbacks=[Keeps(decay=0.5)])
    expected = [one.clone() for one in run.parameters[0]]
    for step in run.parameters[1:]:
        for mean, parameter in zip(expected, step, strict=True):
            mean.lerp_(parameter, 0.5)
    apart = max(float((a - b).abs().max()) for a, b in zip(values[0], expected, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(run.parameters[-1], expected, strict=True))
    return apart, moved


def test_weights_of_a_module_made_on_the_meta_device_are_averaged(pool: RankPool) -> None:
    for apart, moved in pool.run(2, average_of_meta):
        assert apart <= 1e-5 and moved > 1e-4


def keeps_what_was_the_users() -> bool:
    module = zoo.MLP()
    asked: list[bool] = []
    module.configure_model = own = lambda: asked.append(True)  # type: ignore[method-assign]
    train(lambda: module, zero3(), callbacks=[EMAWeightAveraging(decay=0.5)])
    return bool(asked) and vars(module)["configure_model"] is own


def test_a_method_that_the_user_has_put_into_the_module_is_there_after_the_training(pool: RankPool) -> None:
    assert all(pool.run(2, keeps_what_was_the_users))
