import importlib.metadata
import sys
from itertools import product
from pathlib import Path

import lightning.pytorch.strategies
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_parstrat import (
    PipelineStrategy,
    TunedDDPStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
    _autoload,
)
from lightning_parstrat.strategies.registry import register_strategies
from tests.scripts import run_script

LAUNCHERS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
UNUSED = {"": None, "_find_unused_parameters_false": False, "_find_unused_parameters_true": True}
CLASSES: dict[str, type] = {"ddp_tuned": TunedDDPStrategy}
for number, cls in enumerate((ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy), 1):
    CLASSES |= dict.fromkeys((f"zero{number}_custom", f"zero{number}", f"ddp_zero{number}"), cls)
CLASSES |= dict.fromkeys(("pipeline_custom", "pipeline", "ddp_pipeline"), PipelineStrategy)
NAMES = [f"{name}{launcher}{unused}" for name, launcher, unused in product(CLASSES, LAUNCHERS, UNUSED)]
OURS_OFF = {"LIGHTNING_PARSTRAT_AUTOLOAD": "0"}
TORCHS_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

TRAINER = """
trainer = Trainer(accelerator="cpu", devices=1, strategy={name!r}, logger=False, enable_checkpointing=False)
print("strategy:", type(trainer.strategy).__module__, type(trainer.strategy).__name__)
"""
ZERO1 = "strategy: lightning_parstrat.strategies.zero1 ZeRO1Strategy"
BY_FLAG = "from lightning.pytorch import Trainer" + TRAINER.format(name="zero1_custom")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [OURS_OFF, TORCHS_OFF], ids=["ours", "torch's"])
def test_switched_off_the_names_are_unknown_until_the_import(tmp_path: Path, environment: dict[str, str]) -> None:
    script = f"""
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
left = [name for name in sys.modules if name.startswith("lightning_parstrat")]
left += [finder for finder in sys.meta_path if "parstrat" in type(finder).__module__]
assert not left, left
assert "zero1_custom" not in StrategyRegistry
try:
    Trainer(strategy="zero1_custom")
except ValueError as error:
    print(error)
import lightning_parstrat
{BY_FLAG}
"""
    printed = run_script(script, tmp_path, environment=environment)
    assert "You selected an invalid strategy name: `strategy='zero1_custom'`" in printed
    assert ZERO1 in printed


def test_importing_the_package_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    script = """
import sys
import lightning_parstrat
dir(lightning_parstrat)
print(lightning_parstrat.__version__)
heavy = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse"}
print("heavy:", sorted(heavy & {name.split(".")[0] for name in sys.modules}))
lightning_parstrat.ZeRO1Strategy, lightning_parstrat.TunedDDPStrategy
print("checkpoint:", "torch.distributed.checkpoint" in sys.modules)
"""
    version, heavy, *others = run_script(script, tmp_path).splitlines()
    assert version == importlib.metadata.version("lightning-parstrat")
    assert heavy == "heavy: []" and "checkpoint: False" in others


def test_every_name_of_stock_ddp_has_its_like() -> None:
    stock = {name.removeprefix("ddp") for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy}
    assert stock == {name.removeprefix("ddp_tuned") for name in NAMES if name.startswith("ddp_tuned")}
    assert set(NAMES) <= set(StrategyRegistry.available_strategies())
    assert all(StrategyRegistry[name]["description"] for name in NAMES)


def test_a_name_instantiates_its_class_with_its_launcher() -> None:
    for (name, cls), launcher, unused in product(CLASSES.items(), LAUNCHERS, UNUSED):
        strategy = StrategyRegistry.get(f"{name}{launcher}{unused}")
        stock = StrategyRegistry.get(f"ddp{launcher}{unused}")
        assert type(strategy) is cls
        assert strategy._start_method == LAUNCHERS[launcher] == stock._start_method
        if cls is ZeRO1Strategy:
            assert strategy._policy.shard_gradients == ("zero2" in name)
            assert strategy.flag == ("zero2_custom" if "zero2" in name else "zero1_custom")
        if cls is TunedDDPStrategy:
            expected = {} if UNUSED[unused] is None else {"find_unused_parameters": UNUSED[unused]}
            assert strategy._ddp_kwargs == expected
            assert {**strategy._ddp_kwargs, **stock._ddp_kwargs} == strategy._ddp_kwargs


def test_registering_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(*OURS_OFF, raising=False)
    names = {name: {**entry} for name, entry in StrategyRegistry.items()}
    finders = list(sys.meta_path)
    register_strategies(lightning.pytorch.strategies)
    _autoload.register_on_import()
    _autoload.autoload()
    assert {name: {**entry} for name, entry in StrategyRegistry.items()} == names
    assert sys.meta_path == finders


@pytest.mark.slow
def test_both_namespaces_look_untouched(tmp_path: Path) -> None:
    script = """
import importlib, inspect, sys, warnings
warnings.simplefilter("error", UserWarning)
def waiting():
    return [finder for finder in sys.meta_path if type(finder).__module__ == "lightning_parstrat._autoload"]

import torch
assert len(waiting()) == 1
for name in ("lightning.pytorch", "pytorch_lightning"):
    for module in (importlib.import_module(f"{name}.{last}") for last in ("strategies", "cli")):
        sibling = importlib.import_module(f"{name}.strategies.ddp")
        assert type(module.__loader__) is type(sibling.__loader__), module.__loader__
        assert module.__spec__.loader is module.__loader__
        assert module.__spec__.name == module.__loader__.name == module.__name__
        assert "StrategyRegistry" in inspect.getsource(module) or "LightningCLI" in inspect.getsource(module)
    registry = sys.modules[f"{name}.strategies"].StrategyRegistry
    assert {"zero1_custom", "ddp_zero1_fork", "ddp_tuned_spawn"} <= registry.keys()
assert not waiting()
print("untouched")
"""
    assert "untouched" in run_script(script, tmp_path)


@pytest.mark.slow
def test_a_failing_registration_is_one_warning_and_lightning_works(tmp_path: Path) -> None:
    script = f"""
import sys, warnings
sys.modules["lightning_parstrat.strategies.registry"] = None  # importing it is an ImportError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from lightning.pytorch import Trainer
for warning in caught:
    print("warning:", warning.message)
{TRAINER.format(name="ddp")}
"""
    printed = run_script(script, tmp_path).splitlines()
    warned = [line for line in printed if line.startswith("warning:") and "parstrat" in line]
    assert len(warned) == 1
    assert "could not register its strategies with 'lightning.pytorch.strategies'" in warned[0]
    assert "strategy: lightning.pytorch.strategies.ddp DDPStrategy" in printed


def test_an_import_of_lightning_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "pytorch_lightning").mkdir()
    (tmp_path / "pytorch_lightning" / "__init__.py").touch()
    (tmp_path / "pytorch_lightning" / "strategies.py").write_text("""
import sys
sys.tries = getattr(sys, "tries", 0) + 1
if sys.tries == 1:
    raise ImportError("not yet")
class StrategyRegistry(dict):
    def register(self, name, strategy, **_):
        self[name] = strategy
StrategyRegistry = StrategyRegistry()
""")
    script = """
import contextlib, lightning_parstrat
with contextlib.suppress(ImportError):
    import pytorch_lightning.strategies
import pytorch_lightning.strategies
print(sorted(pytorch_lightning.strategies.StrategyRegistry))
"""
    of_auto = [f"auto_custom{launcher}{unused}" for launcher, unused in product(LAUNCHERS, UNUSED)]
    assert run_script(script, tmp_path) == f"{sorted([*NAMES, *of_auto])}\n"
