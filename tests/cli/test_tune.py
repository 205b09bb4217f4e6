"""Programs that are run under each strategy: what is predicted, measured, left out and written."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parstrat import AutoStrategy
from lightning_parstrat.cli.main import main
from lightning_parstrat.cli.tune import _costs, _run, candidates
from tests.pool import RankPool
from tests.scripts import run_python, run_script
from tests.strategies import zoo
from tests.strategies.parity import train
from tests.strategies.test_report import listening

PROGRAM = """
import time
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def __init__(self, fails: str = ""):
        super().__init__()
        self.fails = fails

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validated"}}

    def validation_step(self, batch, batch_idx):
        self.log("validated", self(batch).mean(), sync_dist=True)

    def training_step(self, batch, batch_idx):
        # A link cannot be the reason for a slow step.
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        if type(self.trainer.strategy).__name__ in self.fails:
            raise ValueError("not under this strategy")

if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule)
"""
TRAINS = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim import AdamW

class Model(BoringModel):
    def configure_optimizers(self):
        return AdamW(self.parameters())

trainer = Trainer(strategy="auto_custom", accelerator="cpu", devices=2, max_steps=1, logger=False, limit_val_batches=0)
trainer.fit(Model())
print(type(trainer.strategy).__name__)
"""
SAYS_TIMES = """
import json
import os
import sys
import yaml

strategy = yaml.safe_load(open(sys.argv[-1]))["trainer"]["strategy"]["class_path"].rpartition(".")[2]
with open("runs.txt", "a+") as runs:
    runs.seek(0)
    ran = runs.read().split().count(strategy)
    runs.write(strategy + " ")
first = json.load(open("first.json"))
seconds = first["seconds"][strategy][ran]
json.dump({**first, "seconds": seconds}, open(os.environ["LIGHTNING_PARSTRAT_TUNE"], "w"))
"""
OF_GPT = {"accumulate_grad_batches": 1, "parameters": 33_700_000, "precision": "32-true"}
MEMORY = {"peak": 2**30, "memory": 2**33, "values": 2.0, "cut": 0}
FIRST = {**OF_GPT, **MEMORY, "nodes": 2, "devices": 1, "machine": "", "loading": 0.0}


def write_program(folder: Path, **model: Any) -> list[str]:
    """A program that saves, validates and logs, and its command line."""
    saves = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "saved"}}
    # It needs a logger.
    monitors = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    bar = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}
    # Epochs end within a run.
    of_epoch = {"limit_train_batches": 10, "limit_val_batches": 2}
    ranks = {"accelerator": "cpu", "devices": 2, "max_steps": 1000, "callbacks": [saves, monitors, bar], **of_epoch}
    (folder / "main.py").write_text(PROGRAM)
    config = {"trainer": ranks, "model": model}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "main.py", "fit", "--config", "c.yaml"]


@pytest.mark.slow
def test_the_fastest_is_written_and_trained(tmp_path: Path) -> None:
    # What runs first fails.
    program = write_program(tmp_path, fails="ZeRO1Strategy")
    found = run_python(
        ["-m", "lightning_parstrat.cli.main", "tune", "--steps", "25", "--", *program], tmp_path, timeout=600.0
    )
    assert found.returncode == 0, found.stderr
    rows = {line.split("  ")[0]: line for line in found.stdout.splitlines()}
    of_run = r"zero3_custom +\d\.\d{3} s +\d\.\d{3} s +[\d.]+ +\d+%"
    assert re.search(of_run, rows["zero3_custom"]), found.stdout
    assert re.search(r"  exit code 1: .*not under this strategy", rows["zero1_custom"]), found.stdout
    section = yaml.safe_load((tmp_path / "chosen.yaml").read_text())["trainer"]
    chosen = section["strategy"]["class_path"].rpartition(".")[2]
    assert chosen != "ZeRO1Strategy" and section.keys() == {"strategy"}
    # Neither checkpoints nor logs.
    assert {one.name for one in tmp_path.iterdir()} == {"main.py", "c.yaml", "chosen.yaml"}
    output = run_script(TRAINS, tmp_path)
    assert output.count(chosen) >= 1
    again = run_python([*program[1:], "--config", "chosen.yaml", "--trainer.max_steps", "2"], tmp_path)
    assert again.returncode == 0, again.stderr


def test_what_is_close_to_the_fastest_runs_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # The first has been disturbed less in its first run. Both runs count.
    seconds = {"ZeRO1Strategy": [1.0, 1.2], "TunedDDPStrategy": [1.05, 1.05]}
    Path("first.json").write_text(json.dumps({**FIRST, "nodes": 1, "devices": 1, "waiting": 0.0, "seconds": seconds}))
    Path("times.py").write_text(SAYS_TIMES)
    assert main(["tune", "--", sys.executable, "times.py", "fit"]) == 0
    runs = Path("runs.txt").read_text().split()
    # One fails, and is a row of the table.
    assert {name: runs.count(name) for name in runs} == {"ZeRO1Strategy": 2, "TunedDDPStrategy": 2, "ZeRO3Strategy": 1}
    assert re.search(r"zero3_custom .*  exit code 1: .*'ZeRO3Strategy'", capsys.readouterr().out)
    assert yaml.safe_load(Path("chosen.yaml").read_text())["trainer"]["strategy"]["class_path"].endswith(
        "TunedDDPStrategy"
    )


def test_nothing_is_left_out_by_its_time_if_waiting_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on GPUs, where the host does not see it.
    monkeypatch.chdir(tmp_path)
    seconds = {"ZeRO1Strategy": [1.0] * 2, "PipelineStrategy": [0.3] * 2}
    Path("first.json").write_text(json.dumps({**FIRST, "waiting": None, "seconds": seconds}))
    Path("times.py").write_text(SAYS_TIMES)
    assert main(["tune", "--", sys.executable, "times.py", "fit"]) == 0
    chosen = yaml.safe_load(Path("chosen.yaml").read_text())["trainer"]["strategy"]["class_path"]
    assert chosen.endswith("PipelineStrategy")


def test_predictions_put_first_what_suits_the_link() -> None:
    slow, fast = ({**FIRST, "seconds": seconds, "waiting": waiting} for seconds, waiting in ((6.0, 0.9), (0.6, 0.0)))
    own, *others = candidates(slow)
    costs = _costs(own, slow)
    assert costs.predicted(own) == pytest.approx(6.0, rel=0.01)
    first = min(others, key=costs.predicted)
    assert (first.name, first.windows) == ("pipeline_custom, data_parallel_size=1", 2) and costs.predicted(first) < 1
    # All others send as much as zero1_custom, or more, and are left out after it.
    assert all(costs.predicted(one) > 5 for one in others if one is not first)
    # If ranks do not wait, nothing can be ruled out but by its bubble.
    own, *others = candidates(fast)
    assert {_costs(own, fast).predicted(one) for one in [own, *others] if one.windows == 1} == {0.6}


def test_a_run_may_print_any_bytes(tmp_path: Path) -> None:
    printed = r"import sys; sys.stdout.buffer.write(b'ValueError: caf\xe9\n'); sys.exit(3)"
    assert _run([sys.executable, "-c", printed], tmp_path / "times", 60.0) == "exit code 3: ValueError: caf\ufffd"


def test_a_signal_ends_the_program_too(tmp_path: Path) -> None:
    sleeps = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-m", "lightning_parstrat.cli.main", "tune", "--", sys.executable, "-c", sleeps, "fit"]
    process, written = subprocess.Popen(command, cwd=tmp_path), tmp_path / "pid"
    while not (written.exists() and written.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60.0) == 128 + signal.SIGTERM
    state = Path(f"/proc/{written.read_text()}/stat")
    # It may not have been waited for yet.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert list(tmp_path.iterdir()) == [written]


def test_a_program_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--output", str(tmp_path / "chosen.yaml"), "--", "/nowhere/python", "main.py", "fit"]) == 2
    assert "lightning-parstrat tune: [Errno 2] No such file or directory: '/nowhere/python'" in capsys.readouterr().err


def test_a_slow_loader_is_as_slow_under_each_strategy() -> None:
    first = {**FIRST, "seconds": 1.0, "waiting": 0.0, "loading": 0.75}
    own, *others = candidates(first)
    costs = _costs(own, first)
    assert {costs.predicted(one) for one in [own, *others] if one.windows == 1} == {1.0}
    # All ranks of a pipeline wait for each of its batches.
    (staged,) = (one for one in others if one.windows == 2)
    assert costs.predicted(staged) == pytest.approx(2 * 0.75 + 5 / 4 * 0.25)
    assert costs.speed_up(0.5) == 4.0


def test_what_does_not_fit_is_known() -> None:
    first = {**FIRST, "seconds": 1.0, "waiting": 0.0, "devices": 4}
    zero1, ddp, zero3, *_ = candidates(first)
    costs = _costs(zero1, first)
    assert costs.needs(zero1) == 2**30
    # Without sharding, all of Adam's state instead of an eighth, and no buckets beside the gradients.
    assert costs.needs(ddp) - costs.needs(zero1) == pytest.approx(4 * 33.7e6 * (2 * 7 / 8 - 1 / 8), rel=0.01)
    assert costs.needs(zero3) < costs.needs(zero1)


def test_groups_and_16_bits_are_tried_where_they_may_pay() -> None:
    first = {**FIRST, "seconds": 1.0, "waiting": 0.5, "devices": 8, "precision": "bf16-mixed"}
    names = {one.name for one in candidates(first)}
    node, halves = "shard_group=node", "comm_dtype=bf16, gather_dtype=bf16"
    assert {f"zero1_custom, {node}", f"zero3_custom, {node}", f"zero1_custom, {halves}"} <= names
    assert not any("outer" in name or "tensor" in name for name in names)
    assert {f"pipeline_custom, data_parallel_size={size}" for size in (1, 2, 4, 8)} <= names
    planned = [one for one in candidates({**first, "cut": 10**7}) if "tensor_parallel_size" in one.name]
    assert [(dict(one.arguments)["tensor_parallel_size"], one.windows) for one in planned] == [(2, 2), (4, 4), (8, 8)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune", "write the program of a LightningCLI after `--`"),
        ("tune -- python main.py", "such as `-- python main.py fit -c c.yaml`"),
        ("tune --steps 5 -- python main.py fit", "times of fewer than 25 steps are not reliable"),
        ("tune --output none/c.yaml -- python main.py fit", "--output none/c.yaml: there is no such folder"),
        ("tune --output . -- python main.py fit", "--output . is a folder"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "timeout", "message"),
    [
        ("print('trained')", "60", "it has written no times"),
        ("raise ValueError('no module\\nwas made')", "60", "exit code 1: ValueError: no module"),
        ("import os; open(os.environ['LIGHTNING_PARSTRAT_TUNE'], 'w').write('{')", "60", "it has written no times"),
        ("import time; time.sleep(60)", "2", "it took longer than 2 s (--timeout)"),
    ],
)
def test_another_program_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str, timeout: str, message: str
) -> None:
    assert main(["tune", "--timeout", timeout, "--", sys.executable, "-c", script, "fit"]) == 1
    said = capsys.readouterr().out
    assert message in said and "The program must be a LightningCLI's" in said


def lines_of_choice(path: str, parameters: int) -> list[str]:
    measured = {"measured": "2026-01-02", "seconds": 0.5, **OF_GPT, "parameters": parameters, "nodes": 1, "devices": 2}
    measured["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    measured["accumulate_grad_batches"] = 1 if parameters > 7 else 2
    strategy = {"class_path": "lightning_parstrat.ZeRO1Strategy", "init_args": {"bucket_cap_mb": 1.0}}
    text = f"# {json.dumps(measured)}\n{yaml.safe_dump({'trainer': {'strategy': strategy}})}"
    Path(f"{path}-{dist.get_rank()}").write_text(text)
    with listening() as lines:
        train(zoo.MLP, AutoStrategy(path=f"{path}-{dist.get_rank()}"), max_steps=1)
    return [line for line in lines if "measured" in line]


def test_a_fit_says_what_was_chosen_and_warns_of_another_training(pool: RankPool, tmp_path: Path) -> None:
    count = sum(one.numel() for one in zoo.MLP().parameters())
    (same, *_), (other, *_) = (pool.run(2, lines_of_choice, str(tmp_path / "c"), number) for number in (count, 7))
    assert len(same) == 1 and "measured 2026-01-02: 0.500 s per step" in same[0]
    assert len(other) == 2 and f"here there are parameters {count}, not 7" in other[1]
    # A pipeline was measured with more batches a step.
    assert "accumulate_grad_batches 1, not 2" in other[1]


def chosen(first: str, name: str, arguments: str = "{}") -> str:
    return f"# {first}\ntrainer: {{strategy: {{class_path: {name}, init_args: {arguments}}}}}\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "trainer:\n  strategy: zero1_custom\n",
        '# {"seconds": 1}\ntrainer: {}\n',
        chosen("[1]", "lightning_parstrat.ZeRO1Strategy"),
        chosen("{}", "lightning_parstrat.ZeRO1Strategy", "[1]"),
        chosen("{}", "lightning_parstrat.AutoStrategy"),
        chosen("{}", "lightning_parstrat.GradNormMonitor"),
        chosen("{}", "5"),
    ],
)
def test_a_file_that_tune_has_not_written_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "chosen.yaml").write_text(text)
    with pytest.raises(MisconfigurationException, match=re.escape("lightning-parstrat tune -- python main.py fit")):
        AutoStrategy(path=tmp_path / "chosen.yaml")
