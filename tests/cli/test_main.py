"""The commands as programs: their help, wrong usage, and what they need that a training does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_parstrat.cli import main as cli
from tests.scripts import run_script


def test_every_argument_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert f"lightning-parstrat {command}" in printed


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["slurm", "--nodes", "0", "--devices=1"],
        ["slurm", "--nodes=2"],
        ["slurm", "--what"],
        ["plan"],
        [],
        ["x"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
    for command in ("doctor", "plan", "inspect"):
        needed = {"plan": ["--world-size", "2"], "inspect": ["a.ckpt"]}.get(command, [])
        assert cli.main([command, *needed, "--", "python", "train.py"]) == 2
        assert f"lightning-parstrat {command}: " in capsys.readouterr().err


@pytest.mark.slow
def test_trainings_and_commands_need_no_jsonargparse(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["jsonargparse"] = None  # importing it is an ImportError
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
for name in ("ddp_tuned", "zero1_custom", "zero3_custom"):
    trainer = Trainer(accelerator="cpu", devices=1, strategy=name, fast_dev_run=True, logger=False)
    trainer.fit(BoringModel())
    print("steps of", name, trainer.global_step)
from lightning_parstrat.cli.main import main
assert main(["plan", "--parameters", "1M", "--world-size", "2"]) == 0
"""
    assert run_script(script, tmp_path).count("steps of ") == 3


def test_what_is_printed_may_be_read_in_part() -> None:
    program = f"{sys.executable} -m lightning_parstrat.cli.main plan --parameters 1M --world-size 2"
    # `true` has ended before the program prints.
    done = subprocess.run(["bash", "-c", f"{program} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
