"""Users' own precision plugins, and what a training leaves of the plugins that it got."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision

from tests.comparing import distance
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression
from tests.strategies.gradients.trainings import KINDS, by_pairs, fit, strategy

BATCHES = 7


class OwnPlugin(MixedPrecision):
    """Clips to half of the given norm, and counts."""

    calls = 0

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.calls += 1
        super().clip_grad_by_norm(optimizer, clip_val / 2)


def own_plugin() -> list[tuple[int, float]]:
    found = []
    for kind in KINDS:
        plugin = OwnPlugin("bf16-mixed", "cpu")
        module, reference = Regression(), Regression()
        fit(module, strategy(kind), BATCHES, precision=plugin, gradient_clip_val=0.4)
        fit(reference, strategy(kind), BATCHES, precision="bf16-mixed", gradient_clip_val=0.2)
        found.append((plugin.calls, distance(module.seen, reference.seen)))
    return found


def test_a_users_own_precision_plugin_wins(pool: RankPool) -> None:
    for found in pool.run(2, own_plugin):
        assert all(calls == BATCHES and difference <= 1e-7 for calls, difference in found)


class Fails(Callback):
    """Notes the plugin's class during a training, and ends it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.names.append(type(trainer.precision_plugin).__qualname__)
        if args[-1] == 3:
            raise KeyError("a user's own mistake")


PLUGINS: dict[str, Any] = {
    "plain": Precision,
    "scaled": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0)),
    "own, scaled": lambda: OwnPlugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0)),
}


def check_classes(name: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        plugin, fails = PLUGINS[name](), Fails()
        parts = [plugin, getattr(plugin, "scaler", plugin)]
        before = [(type(one), set(vars(one)) | {"calls"}) for one in parts]
        with pytest.raises(KeyError):
            fit(Regression(), strategy(kind), BATCHES, precision=plugin, callbacks=[fails], gradient_clip_val=0.2)
        assert [(type(one), set(vars(one)) | {"calls"}) for one in parts] == before
        # Checkpoints file a plugin's state under this name.
        assert fails.names == [type(plugin).__qualname__] * 4


@pytest.mark.parametrize(("name", "kinds"), by_pairs(PLUGINS))
def test_plugin_and_scaler_get_their_own_classes_back(pool: RankPool, name: str, kinds: tuple[str, ...]) -> None:
    pool.run(2, check_classes, name, kinds)
