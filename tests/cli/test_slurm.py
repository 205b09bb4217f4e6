"""Job files: what the command takes over, from its arguments and the program's, and refuses; what the file does."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.cli.main import main
from lightning_parstrat.cli.sbatch import SlurmJob
from lightning_parstrat.cli.slurm import make_parser, plan_job, read_program

FIT = ("python", "train.py", "fit")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {
        "c.yaml": "trainer:\n  strategy: zero1_custom\n  num_nodes: 4\n  default_root_dir: all\n",
        "list.yaml": "trainer: {devices: [0, 1]}\n",
        "nested.yaml": "trainer: {num_nodes: 9}\nfit:\n  trainer: {num_nodes: 3}\n",
        "own.yaml": "lr: 1\n",
        "conf.ini": "[a\nb",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def job_file(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[str]]:
    assert main(["slurm", "--json", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    return printed["job_file"], printed["notes"]


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("--nodes 3", {"nodes": 3}, "#SBATCH --nodes=3"),
    ("--devices 2", {"devices": 2}, "#SBATCH --ntasks-per-node=2"),
    ("--name n", {"name": "n"}, "#SBATCH --job-name=n"),
    ("--time 1:00:00", {"time": "1:00:00"}, "#SBATCH --time=1:00:00"),
    ("--partition p", {"partition": "p"}, "#SBATCH --partition=p"),
    ("--account a", {"account": "a"}, "#SBATCH --account=a"),
    ("--gres gpu:a100:4", {"gres": "gpu:a100:4"}, "#SBATCH --gres=gpu:a100:4"),
    ("--cpus-per-task 8", {"cpus_per_task": 8}, "#SBATCH --cpus-per-task=8"),
    ("--cpus-per-task 8", {"cpus_per_task": 8}, "export SRUN_CPUS_PER_TASK=8"),
    ("--mem 64G", {"mem": "64G"}, "#SBATCH --mem=64G"),
    ("--env A=b --env D=e=f", {"env": {"A": "b", "D": "e=f"}}, "export D=e=f"),
    ("--setup env.sh", {"setup": "env.sh"}, "source ./env.sh"),
    ("--no-requeue", {"requeue": False}, "#SBATCH --no-requeue"),
    ("--requeue", {}, "#SBATCH --requeue"),
    ("--grace-seconds 120", {"grace_seconds": 120}, "#SBATCH --signal=SIGUSR1@120"),
    ("", {}, "#SBATCH --open-mode=append"),
]


def test_every_argument_reaches_the_job_and_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words, changed, line in FIELDS:
        wanted = SlurmJob(**{"name": "training", "program": ("./run",), **changed})
        job, _ = plan_job(make_parser().parse_args(words.split()), read_program(["./run"], Path.cwd()))
        assert job == wanted, words
        assert main(["slurm", *words.split(), "--", "./run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "#!/usr/bin/env bash" and line in lines, words
        assert any(one.startswith("#SBATCH --signal") for one in lines) == (words != "--no-requeue")


# What the program asks for: its words, and the nodes and devices of the job; None where it knows no LightningCLI.
PROGRAMS: list[tuple[tuple[str, ...], int, int, bool]] = [
    ((*FIT,), 1, 1, True),
    ((*FIT, "--trainer.num_nodes", "2", "--trainer.devices=3"), 2, 3, True),
    ((*FIT, "--trainer.devices=0,1,2"), 1, 3, True),
    ((*FIT, "--trainer.devices=[0, 3]"), 1, 2, True),
    ((*FIT, "-c", "c.yaml"), 4, 1, True),
    ((*FIT, "--config=c.yaml", "--config", "list.yaml", "--trainer.num_nodes=2"), 2, 2, True),
    ((*FIT, "--config=c.yaml", "--config=nested.yaml"), 3, 1, True),
    (("train.py", "test", "--config=nested.yaml"), 9, 1, True),
    ((*FIT, "--config", "$CONFIG"), 1, 1, True),
    (("train.py", "--config=c.yaml"), 4, 1, True),
    (("python", "-m", "package.train", "fit"), 1, 1, True),
    (("apptainer", "exec", "-c", "image.sif", "python", "train.py", "fit"), 1, 1, True),
    (("train.py", "--split", "test"), 1, 1, False),
    (("train.py", "--config", "own.yaml"), 1, 1, False),
    (("train.py", "--config", "conf.ini"), 1, 1, False),
    (("train.py", "--config", "missing.yaml"), 1, 1, False),
    (("bash", "-c", "python train.py fit"), 1, 1, False),
]


def test_what_the_program_asks_for_need_not_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    for words, nodes, devices, has_cli in PROGRAMS:
        text, notes = job_file(capsys, "--", *words)
        assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={devices}\n" in text, words
        assert ("--trainer.default_root_dir=$run_dir" in text) == has_cli, words
        # A LightningCLI that does not know its numbers is told them; another program must know them.
        assert has_cli or f"Trainer(num_nodes={nodes}, devices={devices}, ...)" in notes[0], words
    text, notes = job_file(capsys, "--nodes", "4", "--devices", "2", "--", *FIT, "--config", "c.yaml")
    assert "--trainer.devices=2" in text and "--trainer.num_nodes" not in text and notes == []
    assert 'run_dir=./all/"slurm-$SLURM_JOB_ID"' in text
    text, _ = job_file(capsys, "--", *FIT, "--trainer.default_root_dir=~/runs")
    assert f"run_dir={Path.home()}/runs/" in text


REFUSED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--nodes", "2", "--", *FIT, "-c", "c.yaml"), ('"--nodes 2"', 'c.yaml: "num_nodes: 4"')),
    (("--devices", "2", "--", *FIT, "--trainer.devices=3"), ('"--devices 2"', '"--trainer.devices=3"')),
    (("--", *FIT, "--trainer.devices=-1"), ('"--trainer.devices=-1"', "Add --devices")),
    (("--", *FIT, "--trainer.devices", "auto"), ('"--trainer.devices auto"', "Add --devices")),
    (("--", *FIT, "--trainer.devices=$DEV"), ("Add --devices",)),
    (("--",), ("no program",)),
    (("--env", "A", "--", *FIT), ("write KEY=VALUE",)),
    (("--env", "A B=c", "--", *FIT), ("not a valid name of a variable",)),
    (("--", "mpirun", "-np", "2", "python", "train.py"), ("mpirun", "Give the program alone")),
    (("--", "torchrun", "--nproc-per-node=4", *FIT[1:]), ("torchrun", "Give the program alone")),
    (("--", *FIT, "-c", "missing.yaml"), ("missing.yaml", "cannot be read", "No such file")),
    (("--", *FIT, "--trainer.default_root_dir=s3://bucket/runs"), ("s3://bucket/runs", "file system")),
    (("--partition", "a\n#SBATCH --nodes=9", "--", *FIT), ("--partition",)),
    (("--name", "two words", "--", *FIT), ("--name",)),
    (("--submit", "--setup", "none.sh", "--", *FIT), ("there is no such file",)),
    (("--submit", "--", *FIT), ("without --submit",)),
]


def test_contradictions_are_refused_with_both_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no Slurm.
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments, said in REFUSED:
        assert main(["slurm", *arguments]) == 2
        printed = capsys.readouterr().err
        assert all(part in printed for part in said), (arguments, printed)


def run_job(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Runs the file with stand-ins for Slurm's programs; what srun was given, and its variables."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {
        "scontrol": "#!/bin/bash\necho first\n",
        "srun": '#!/bin/bash\nprintf "%s\\0" "$@" > given\nenv -0 > environment\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first"}
    text, _ = job_file(capsys, *arguments)
    done = subprocess.run(["bash"], input=text, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given, environment = ((folder / name).read_text().split("\0")[:-1] for name in ("given", "environment"))
    return given, dict(one.split("=", 1) for one in environment)


NASTY = ["two words", "it's", '"', "$HOME", "$(touch injected)", "`touch injected`", "; touch injected", "\\", "*", "~"]
NASTY += ["a\ntouch injected", "a\n#SBATCH --nodes=99", "", "!!", "ünï"]


def test_arguments_arrive_as_they_were_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "setup it's.sh").write_text("export FROM_SETUP=$UNSET\n")
    for text in NASTY:
        root = f"--trainer.default_root_dir='runs {text}'" if "\n" not in text and "'" not in text else "--x"
        given, variables = run_job(
            capsys, folder, "--env", f"GIVEN={text}", "--setup", "setup it's.sh", "--", "./run", text, root
        )
        words = [word for word in given if not word.startswith("--")]
        assert words == ["./run", text]
        assert variables["GIVEN"] == text and variables["MASTER_ADDR"] == "first" and "FROM_SETUP" in variables
        assert not list(folder.rglob("injected*"))
        assert root == "--x" or (folder / f"runs {text}" / "slurm-7").is_dir()


def test_a_requeued_run_goes_on_from_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, _ = run_job(capsys, folder, "--", *FIT)
    assert not any("ckpt_path" in word for word in given)
    runs = folder / "slurm-runs/slurm-7"
    (runs / "checkpoints").mkdir(parents=True)
    (runs / "config.yaml").write_text("old")
    for path, seconds in ((runs / "checkpoints/last.ckpt", 1000), (runs / "hpc_ckpt_1.ckpt", 2000)):
        path.touch()
        os.utime(path, (seconds, seconds))
    given, _ = run_job(capsys, folder, "--", *FIT)
    assert "--ckpt_path=./slurm-runs/slurm-7/hpc_ckpt_1.ckpt" in given
    assert "--trainer.default_root_dir=./slurm-runs/slurm-7" in given
    # LightningCLI refuses to write over it.
    (kept,) = runs.glob("config-*.yaml")
    assert kept.read_text() == "old" and not (runs / "config.yaml").exists()
