"""Users' own clipping, their own precision plugins, and what clipping costs and leaves behind."""

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import process_groups
from tests.comparing import distance, worst
from tests.pool import RankPool
from tests.strategies.gradients.big_batch import Regression, Sample, train_on_big_batches, windows_of
from tests.strategies.gradients.poison import adamw
from tests.strategies.gradients.trainings import differences, fit, kinds_of, ranks_batches, strategy

BATCHES = 7


class ByTheModule(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


class ByTorch(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.2)


class TwiceByNorm(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for limit in (0.2, 0.1):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class ByNormAndValue(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class HalvesFirst(Regression):
    """Works on exposed gradients and on hidden ones; half of them is mostly less than the limit."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        with getattr(self.trainer.strategy, "full_gradients", torch.no_grad)():
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


def truly_halved(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)
    clip_grad_norm_(parameters, 0.2)


def truly_by_norm(parameters: list[Tensor]) -> None:
    clip_grad_norm_(parameters, 0.2)


def truly_twice(parameters: list[Tensor]) -> None:
    for limit in (0.2, 0.1):
        clip_grad_norm_(parameters, limit)


def truly_by_norm_and_value(parameters: list[Tensor]) -> None:
    clip_grad_norm_(parameters, 0.2)
    clip_grad_value_(parameters, 0.02)
    clip_grad_norm_(parameters, 0.05)


class ClipsBeforeSteps(torch.optim.SGD):
    """The truth's optimizer: does to gradients first what a user's hook does."""

    def __init__(self, parameters: Any, clip: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.5)
        self.clip = clip

    def step(self, closure: Any = None) -> Any:
        self.clip(self.param_groups[0]["params"])
        return super().step(closure)


def clip_by_a_hook(kind: str, module_class: type[Regression], truly: Any, accumulate: int) -> list[float]:
    """Also where something looks at gradients before the step, whose measure may not be taken for the hook's."""
    data = ranks_batches(BATCHES)
    truth = train_on_big_batches(windows_of(data, accumulate), optimizer=lambda ps: ClipsBeforeSteps(ps, truly))
    found = []
    for nonfinite in ("propagate", "skip"):
        module = module_class()
        chosen = strategy(kind, nonfinite_grads=nonfinite)
        if accumulate > 1:
            chosen.on_gradient_norm(id)
        fit(module, chosen, BATCHES, accumulate_grad_batches=accumulate)
        found.append(differences(module, truth, accumulate, BATCHES)[0])
    return found


OWN_CLIPPING = [
    (ByTheModule, truly_by_norm),
    (ByTorch, truly_by_norm),
    (TwiceByNorm, truly_twice),
    (ByNormAndValue, truly_by_norm_and_value),
    (HalvesFirst, truly_halved),
]
HIDDEN = ("zero1", ByTorch)


@pytest.mark.parametrize(
    ("kind", "module", "truly"),
    # What the user has hidden, torch's functions do not find.
    [
        *((kind, *case) for case in OWN_CLIPPING for kind in ("ddp_tuned", "zero1") if (kind, case[0]) != HIDDEN),
        ("exposed", ByTorch, truly_by_norm),
    ],
)
def test_a_users_own_clipping_is_what_steps(pool: RankPool, kind: str, module: type[Regression], truly: Any) -> None:
    for accumulate in (1, 3):
        assert worst(pool.run(2, clip_by_a_hook, kind, module, truly, accumulate)) <= 2e-6


class OwnPlugin(MixedPrecision):
    """Clips to half of what it is told, and remembers that it did."""

    calls = 0

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.calls += 1
        super().clip_grad_by_norm(optimizer, clip_val / 2)


class Fails(Callback):
    """Looks at classes in the middle of training, and ends it."""

    def __init__(self, plugin: Any, fails: bool) -> None:
        self.plugin, self.fails = plugin, fails
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.names.append(type(self.plugin).__qualname__)
        if self.fails and args[-1] == 3:
            raise KeyError("a user's own mistake")


def own_plugin(kind: str) -> tuple[int, float]:
    plugin = OwnPlugin("bf16-mixed", "cpu")
    module, reference = Regression(), Regression()
    fit(module, strategy(kind), BATCHES, precision=plugin, gradient_clip_val=0.4)
    fit(reference, strategy(kind), BATCHES, precision="bf16-mixed", gradient_clip_val=0.2)
    return plugin.calls, distance(module.seen, reference.seen)


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
def test_a_users_own_precision_plugin_wins(pool: RankPool, kind: str) -> None:
    for calls, difference in pool.run(2, own_plugin, kind):
        assert calls == BATCHES
        assert difference <= 1e-7


def classes_after(kind: str, make_plugin: Any, fails: bool) -> Any:
    plugin = make_plugin()
    scaler = getattr(plugin, "scaler", None)
    before, attributes = (type(plugin), type(scaler)), set(vars(plugin)) | set(vars(scaler) if scaler else ())
    watcher = Fails(plugin, fails)
    error = None
    try:
        fit(Regression(), strategy(kind), BATCHES, precision=plugin, callbacks=[watcher], gradient_clip_val=0.2)
    except KeyError as raised:
        error = raised
    after = set(vars(plugin)) | set(vars(scaler) if scaler else ())
    return error is not None, before == (type(plugin), type(scaler)), after - attributes, watcher.names


def scaled_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))


def own_scaled_plugin() -> MixedPrecision:
    return OwnPlugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))


@pytest.mark.parametrize(("plugin", "kind"), kinds_of([Precision, scaled_plugin, own_scaled_plugin]))
def test_plugin_and_scaler_get_their_own_classes_back(pool: RankPool, kind: str, plugin: Any) -> None:
    for fails in (False, True):
        for failed, restored, left, names in pool.run(2, classes_after, kind, plugin, fails):
            assert failed == fails
            assert restored
            assert not left - {"calls"}
            # Checkpoints file a plugin's state under this name.
            assert names == [plugin().__class__.__qualname__] * (4 if fails else BATCHES)


def norms_told(kind: str, arguments: dict[str, Any], choice: str) -> tuple[Any, ...]:
    chosen = strategy(kind, nonfinite_grads=choice)
    before = chosen.grad_norm
    found: list[Any] = []

    class Asks(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append(chosen.grad_norm)

    fit(Asks(), chosen, BATCHES, **arguments)
    return before, found


ASKED: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "propagate", False),
    ({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, "propagate", False),
    ({"gradient_clip_val": 0.2}, "propagate", True),
    ({"gradient_clip_val": 0.2, "fp16": True}, "propagate", True),
    ({"gradient_clip_val": 100.0}, "propagate", True),
    ({}, "skip", True),
    ({}, "raise", True),
]


@pytest.mark.parametrize(("case", "kind"), kinds_of(ASKED, ASKED[2]))
def test_the_norm_is_a_scalar_equal_on_all_ranks_where_anybody_asked(
    pool: RankPool, kind: str, case: tuple[dict[str, Any], str, bool]
) -> None:
    arguments, choice, known = case
    told = pool.run(3, norms_told, kind, arguments, choice)
    for before, norms in told:
        assert before is None
        assert len(norms) == BATCHES
        assert all((norm is not None) == known for norm in norms)
        if known:
            assert all(norm.shape == () and norm > 0 for norm in norms)
            assert all(torch.equal(norm, other) for norm, other in zip(norms, told[0][1], strict=True))


def reductions(kind: str, arguments: dict[str, Any], choice: str) -> tuple[int, int]:
    """Small reductions of a training, and those of them on the group of gradients."""
    groups = process_groups(default_pg_timeout)
    before = [small_reductions_of(group) for group in groups]
    fit(Regression(), strategy(kind, nonfinite_grads=choice), BATCHES, **arguments)
    sent = [small_reductions_of(group) - earlier for group, earlier in zip(groups, before, strict=True)]
    return sum(sent), sent[groups.index(groups.gradients)]


@pytest.mark.parametrize(
    ("kind", "clip", "on_all", "on_gradients"),
    [
        ("zero1", {"gradient_clip_val": 0.2}, BATCHES, BATCHES),
        ("zero1", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, 0, 0),
        ("ddp_tuned", {"gradient_clip_val": 0.2}, 0, 0),
        ("exposed", {"gradient_clip_val": 0.2}, 0, 0),
    ],
)
def test_clipping_costs_one_scalar_per_step_where_gradients_are_sharded(
    pool: RankPool, kind: str, clip: dict[str, Any], on_all: int, on_gradients: int
) -> None:
    for choice in ("propagate", "skip"):
        without = pool.run(2, reductions, kind, {}, choice)
        for before, after in zip(without, pool.run(2, reductions, kind, clip, choice), strict=True):
            # A norm that was taken to look for NaNs is not taken again to clip.
            again = choice == "propagate"
            assert after[0] - before[0] == on_all * again
            assert after[1] - before[1] == on_gradients * again


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


class TimesWeights(Regression):
    def __init__(self, times: float) -> None:
        super().__init__(adamw, weighted=True)
        self.times = times

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss_weight": output["loss_weight"] * self.times}


def weights_times(kind: str, times: float, accumulate: int, first_scale: float) -> tuple[list[Tensor], list[float]]:
    module, scales = TimesWeights(times), Scales()
    fit(
        module,
        strategy(kind),
        BATCHES,
        fp16=True,
        init_scale=first_scale,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.2,
        callbacks=[scales],
        max_epochs=2,
    )
    return module.seen, scales.seen


@pytest.mark.parametrize("kind", ["ddp_tuned", "zero1"])
@pytest.mark.parametrize(("accumulate", "first_scale"), [(1, 128.0), (3, 2.0**20)])
def test_the_size_of_weights_changes_neither_steps_nor_loss_scales(
    pool: RankPool, kind: str, accumulate: int, first_scale: float
) -> None:
    plain = pool.run(2, weights_times, kind, 1.0, accumulate, first_scale)
    for times in (65536.0, 2.0**-12):
        for one, other in zip(plain, pool.run(2, weights_times, kind, times, accumulate, first_scale), strict=True):
            assert one[1] == other[1]
            assert len(set(one[1])) > 1
            assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
