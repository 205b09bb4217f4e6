"""Programs on `pytorch_lightning` have the strategies, too: the same source, executed under other names."""

import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
from lightning.pytorch import Trainer

import lightning_parstrat
from lightning_parstrat import pytorch_lightning as other_package
from tests.scripts import run_script

ROOT = Path(lightning_parstrat.__file__).parent
OURS = {"lightning.pytorch": "lightning_parstrat", "pytorch_lightning": "lightning_parstrat.pytorch_lightning"}
"""By package of Lightning's; the second one executes the modules of the first."""
BOTH = pytest.mark.parametrize(
    "lightning", [pytest.param("lightning.pytorch", marks=pytest.mark.slow), *list(OURS)[1:]]
)
"""What the second one can do, the first one has many other tests of."""
TOPS = {"lightning.pytorch": ("lightning",), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


def other_than(lightning: str) -> str:
    return next(name for name in OURS if name != lightning)


QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"


# What is imported.


@BOTH
def test_one_of_the_two_packages_is_enough(tmp_path: Path, lightning: str) -> None:
    """Every module of ours can be imported, and a Trainer made, where the other one is not installed."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "strategies").rglob("*.py")]
    ours = OURS[lightning]
    script = f"""
import importlib, inspect, pickle, sys
for top in {TOPS[other_than(lightning)]}:
    sys.modules[top] = None  # importing it is an ImportError
from {lightning} import Trainer
for name, cls in (
    ("zero1_custom", "ZeRO1Strategy"), ("ddp_tuned", "TunedDDPStrategy"), ("ddp_zero1", "ZeRO1Strategy"),
    ("zero2_custom", "ZeRO2Strategy"), ("ddp_zero2", "ZeRO2Strategy"),
    ("zero3_custom", "ZeRO3Strategy"), ("pipeline_custom", "PipelineStrategy"), ("ddp_zero3", "ZeRO3Strategy"),
):
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, {QUIET}).strategy
    print(type(strategy).__module__, type(strategy).__name__)
    import lightning_parstrat
    assert getattr(lightning_parstrat, cls) is getattr(importlib.import_module("{ours}"), cls) is type(strategy)
    assert f"class {{cls}}" in inspect.getsource(type(strategy))
    assert pickle.loads(pickle.dumps(type(strategy))) is type(strategy)
from lightning_parstrat._namespaces import PUBLIC
assert PUBLIC.keys() == {{*importlib.import_module("{ours}").__all__}} - {{"__version__"}}
for name in {modules}:
    importlib.import_module(f"{ours}.{{name.removesuffix('.__init__')}}")
for name in ("inspect", "plan", "doctor", "consolidate", "slurm"):
    importlib.import_module(f"lightning_parstrat.cli.{{name}}")
loaded = {{name for name, module in sys.modules.items() if module is not None}}
print("others:", sorted(n for n in loaded if n.startswith({tuple(f"{top}." for top in TOPS[other_than(lightning)])})))
print("modules:", sum(name.startswith("{ours}.strategies.") for name in loaded))
"""
    printed = run_script(script, tmp_path).splitlines()
    assert f"{ours}.strategies.zero1 ZeRO1Strategy" in printed and f"{ours}.strategies.ddp TunedDDPStrategy" in printed
    assert "others: []" in printed
    # Packages are among them, but for `strategies` itself.
    assert f"modules: {len(modules) - 1}" in printed


# Training.

TRAINING = """
import sys
import torch
import PACKAGE as pl
from PACKAGE.demos.boring_classes import BoringModel, RandomDataset
from OURS import GradNormMonitor, ZeRO1Strategy


class Module(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class WithMonitor(ZeRO1Strategy):
    "A user's own."


def train(strategy, **arguments):
    torch.manual_seed(0)
    module = Module()
    data = torch.utils.data.DataLoader(RandomDataset(32, 48), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, limit_val_batches=0, gradient_clip_val=0.1,
        QUIET, **arguments,
    )
    trainer.fit(module, data)
    # By all ranks where these have shards.
    wholes = [getattr(one, "full_tensor", lambda: one)() for one in module.parameters()]
    return torch.cat([one.detach().flatten() for one in wholes])


if __name__ == "__main__":
    stock, *names = sys.argv[1:]
    expected = train(stock)
    for name in names:
        found = train(name)
        assert found.isfinite().all()
        print("distance", name, (found - expected).abs().max().item(), flush=True)
    instance = WithMonitor(bucket_cap_mb=0.001, start_method=stock.partition("_")[2] or "popen")
    found = train(instance, callbacks=[GradNormMonitor()])
    print("distance instance", (found - expected).abs().max().item(), flush=True)
    assert "OTHER" not in sys.modules
"""


@pytest.mark.parametrize(
    ("lightning", "names"),
    [
        pytest.param(
            "pytorch_lightning",
            ["ddp_fork", "zero1_custom_fork", "ddp_tuned_fork", "ddp_zero1_notebook", "zero3_custom_fork"],
            id="forked",
        ),
        pytest.param(
            "pytorch_lightning",
            ["ddp_spawn", "zero1_custom_spawn", "zero3_custom_spawn"],
            id="spawned",
            marks=pytest.mark.slow,
        ),
        pytest.param("lightning.pytorch", ["ddp", "zero1_custom"], id="started again", marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_program_trains_as_its_ddp_does(tmp_path: Path, lightning: str, names: list[str]) -> None:
    script, other = TRAINING.replace("QUIET", QUIET), other_than(lightning)
    for placeholder, name in (("PACKAGE", lightning), ("OURS", OURS[lightning]), ("OTHER", other)):
        script = script.replace(placeholder, name)
    printed = run_script(script, tmp_path, names)
    distances = dict(re.findall(r"^distance (\S+) (\S+)$", printed, flags=re.MULTILINE))
    assert set(distances) == {*names[1:], "instance"}
    assert all(float(distance) <= 1e-6 for distance in distances.values()), distances
    # Its base class's hooks are nobody's who looks at gradients.
    assert "expose_gradients" not in printed


AGAIN_IN_FORKED_PROCESSES = """
import os
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

quiet = dict(QUIET)
for _ in range(2):
    trainer = Trainer(accelerator="cpu", devices=1, strategy="zero1_custom", max_steps=3, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel())
    dist.destroy_process_group()
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        os.environ.pop(name, None)
Trainer(
    accelerator="cpu", devices=2, strategy="zero1_custom_fork", max_steps=3, limit_val_batches=0, **quiet
).fit(BoringModel())
print("trained again")
"""


@pytest.mark.slow
def test_processes_forked_after_an_earlier_training_do_not_hang(tmp_path: Path) -> None:
    # Whatever they inherit of destroyed process groups waits, when it is freed, for threads that were not forked.
    assert "trained again" in run_script(AGAIN_IN_FORKED_PROCESSES.replace("QUIET", QUIET), tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_one_is_resumed_under_the_other(tmp_path: Path) -> None:
    script = """
import importlib, itertools, torch

def train(package, ours, epochs, resumed=None, saved=None, **arguments):
    demos = importlib.import_module(f"{package}.demos.boring_classes")
    torch.manual_seed(0)
    module = demos.BoringModel()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.05)
    data = torch.utils.data.DataLoader(demos.RandomDataset(32, 48), batch_size=4)
    strategy = importlib.import_module(ours).ZeRO1Strategy(**arguments)
    trainer = importlib.import_module(package).Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, limit_val_batches=0, QUIET
    )
    trainer.fit(module, data, ckpt_path=resumed)
    if saved:
        trainer.save_checkpoint(saved)
    return [torch.tensor(trainer.global_step), *module.parameters()]

namespaces = PAIRS
for (writer, loader), format in itertools.product((namespaces, namespaces[::-1]), ("full", "sharded")):
    path = f"{writer[1]}-{format}.ckpt"
    train(*writer, 1, saved=path, state_dict_type=format)
    assert all(map(torch.equal, train(*loader, 2, resumed=path), train(*loader, 2)))
    print("resumed", path)
"""
    printed = run_script(script.replace("PAIRS", str(list(OURS.items()))).replace("QUIET", QUIET), tmp_path)
    assert printed.count("resumed ") == 4


# The wrong one.


@pytest.mark.parametrize("lightning", OURS)
@pytest.mark.parametrize(
    "name", ["ZeRO1Strategy", "TunedDDPStrategy", "ZeRO2Strategy", "ZeRO3Strategy", "PipelineStrategy"]
)
def test_the_wrong_trainer_refuses_and_says_what_to_write(lightning: str, name: str) -> None:
    packages = {"lightning.pytorch": lightning_parstrat, "pytorch_lightning": other_package}
    trainers = {"lightning.pytorch": Trainer, "pytorch_lightning": pytorch_lightning.Trainer}
    kind: Any = getattr(packages[other_than(lightning)], name)
    for cls in (kind, type("Mine", (kind,), {})):
        with pytest.raises(ValueError, match="invalid strategy name") as caught:
            trainers[lightning](strategy=cls(), accelerator="cpu")
        line = re.search(f"for {lightning}, write `(.*?)`", str(caught.value))
        assert line is not None, caught.value
        found: dict[str, Any] = {}
        exec(line[1], found)
        assert isinstance(trainers[lightning](strategy=found[name](), accelerator="cpu").strategy, found[name])


# Command lines.


@pytest.mark.parametrize("lightning", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_command_line_knows_the_short_names(tmp_path: Path, lightning: str) -> None:
    script = f"""
import sys
from {lightning}.cli import LightningCLI
from {lightning}.demos.boring_classes import BoringModel
if __name__ == "__main__":
    assert "zero1_custom" not in sys.argv and not any("parstrat" in word for word in sys.argv)
    trainer = LightningCLI(BoringModel, run=False, save_config_callback=None).trainer
    print("strategy:", type(trainer.strategy).__module__, trainer.strategy._policy.bucket_cap_mb,
          trainer.strategy._shares._policy.rank_shares)
    print("callbacks:", [type(callback).__module__ for callback in trainer.callbacks])
    print("other:", {other_than(lightning)!r} in sys.modules)
"""
    ours = OURS[lightning]
    short = [
        "--trainer.strategy=ZeRO1Strategy",
        "--trainer.strategy.bucket_cap_mb=4",
        "--trainer.strategy.rank_shares=[2,1]",
    ]
    arguments = ["--trainer.accelerator=cpu", *short, "--trainer.callbacks+=GradNormMonitor"]
    printed = run_script(script, tmp_path, arguments).splitlines()
    assert f"strategy: {ours}.strategies.zero1 4.0 [2.0, 1.0]" in printed
    assert f"{ours}.strategies.gradients.grad_norm_monitor" in next(line for line in printed if "callbacks:" in line)
    assert "other: False" in printed
