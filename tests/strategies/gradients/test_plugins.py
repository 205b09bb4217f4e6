"""Users' own precision plugins, and what a training leaves of those that it was given."""

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
    """Clips to half of what it is told, and remembers that it did."""

    calls = 0

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.calls += 1
        super().clip_grad_by_norm(optimizer, clip_val / 2)


def own_plugin(kind: str) -> tuple[int, float]:
    plugin = OwnPlugin("bf16-mixed", "cpu")
    module, reference = Regression(), Regression()
    fit(module, strategy(kind), BATCHES, precision=plugin, gradient_clip_val=0.4)
    fit(reference, strategy(kind), BATCHES, precision="bf16-mixed", gradient_clip_val=0.2)
    return plugin.calls, distance(module.seen, reference.seen)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_users_own_precision_plugin_wins(pool: RankPool, kind: str) -> None:
    for calls, difference in pool.run(2, own_plugin, kind):
        assert calls == BATCHES
        assert difference <= 1e-7


class Fails(Callback):
    """Looks at classes in the middle of training, and ends it."""

    def __init__(self, plugin: Any, fails: bool) -> None:
        self.plugin, self.fails = plugin, fails
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.names.append(type(self.plugin).__qualname__)
        if self.fails and args[-1] == 3:
            raise KeyError("a user's own mistake")


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=128.0)


PLUGINS: dict[str, Any] = {
    "plain": Precision,
    "scaled": lambda: MixedPrecision("16-mixed", "cpu", scaler()),
    "own, scaled": lambda: OwnPlugin("16-mixed", "cpu", scaler()),
}


def classes_after(name: str, kinds: tuple[str, ...]) -> list[Any]:
    found = []
    for kind in kinds:
        for fails in (False, True):
            plugin = PLUGINS[name]()
            its_scaler = getattr(plugin, "scaler", None)
            before = type(plugin), type(its_scaler)
            attributes = set(vars(plugin)) | set(vars(its_scaler) if its_scaler else ())
            watcher = Fails(plugin, fails)
            error = None
            try:
                fit(Regression(), strategy(kind), BATCHES, precision=plugin, callbacks=[watcher], gradient_clip_val=0.2)
            except KeyError as raised:
                error = raised
            left = (set(vars(plugin)) | set(vars(its_scaler) if its_scaler else ())) - attributes
            found.append(
                (error is not None, before == (type(plugin), type(its_scaler)), left - {"calls"}, watcher.names)
            )
    return found


@pytest.mark.parametrize(("name", "kinds"), by_pairs(PLUGINS))
def test_plugin_and_scaler_get_their_own_classes_back(pool: RankPool, name: str, kinds: tuple[str, ...]) -> None:
    # Checkpoints file a plugin's state under this name.
    qualname = type(PLUGINS[name]()).__qualname__
    expected = [(fails, True, set(), [qualname] * (4 if fails else BATCHES)) for fails in (False, True)]
    for found in pool.run(2, classes_after, name, kinds):
        assert found == expected * len(kinds)
