"""The command: what it takes over from the program, what it refuses, and what its job file says."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.cli.main import COMMANDS, main
from lightning_parstrat.cli.program import read_program
from lightning_parstrat.cli.sbatch import SlurmJob
from lightning_parstrat.cli.slurm import make_parser, plan_job

FIT = ("python", "train.py", "fit")


def job_file(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[str]]:
    assert main(["slurm", "--json", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    return printed["job_file"], printed["notes"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("trainer:\n  strategy: zero1_custom\n  num_nodes: 4\n  default_root_dir: all\n")
    return tmp_path


def test_the_trainer_is_told_what_it_does_not_know(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, notes = job_file(capsys, "--nodes", "4", "--devices", "2", "--", *FIT, "--config", "c.yaml")
    assert "#SBATCH --nodes=4" in text and "#SBATCH --ntasks-per-node=2" in text
    assert "--trainer.devices=2" in text and "--trainer.num_nodes" not in text
    assert 'run_dir=./all/"slurm-$SLURM_JOB_ID"' in text and '"--trainer.default_root_dir=$run_dir"' in text
    assert notes == []


def test_the_programs_own_numbers_need_not_be_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = job_file(capsys, "--", *FIT, "--config", "c.yaml", "--trainer.devices", "8")
    assert "#SBATCH --nodes=4" in text and "#SBATCH --ntasks-per-node=8" in text


def test_a_program_without_lightning_cli_is_told_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, notes = job_file(capsys, "--nodes", "2", "--", "python", "train.py", "--lr", "0.1")
    assert "--trainer" not in text
    assert "Trainer(num_nodes=2, devices=1, ...)" in notes[0]


def test_hpc_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--ckpt_path=hpc",), ("--ckpt_path", "hpc")):
        text, notes = job_file(capsys, "--", *FIT, *words)
        assert "=hpc" not in text and "    hpc" not in text and "left out" in notes[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "2", "--", *FIT, "-c", "c.yaml"), ('"--nodes 2"', 'c.yaml, line 3: "num_nodes: 4"')),
        (("--devices", "2", "--", *FIT, "--trainer.devices=3"), ('"--devices 2"', '"--trainer.devices=3"')),
        (("--",), ("no program",)),
        (("--wait", "--", *FIT), ("add --submit",)),
        (("--submit", "--dry-run", "--", *FIT), ("exclude each other",)),
        (("--env", "A", "--", *FIT), ("write KEY=VALUE",)),
        (("--", *FIT, "--trainer.devices=-1"), ('"--trainer.devices=-1"', "Add --devices")),
        (("--", *FIT, "--trainer.devices=auto"), ('"--trainer.devices=auto"', "Add --devices")),
        (("--", "mpirun", "-np", "2", "python", "train.py"), ("mpirun", "Give the program alone")),
        (("--", *FIT, "-c", "missing.yaml"), ("missing.yaml", "cannot be read")),
    ],
)
def test_contradictions_are_refused_with_both_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    assert main(["slurm", *arguments]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in said), printed


def test_every_argument_reaches_the_job(folder: Path) -> None:
    wanted = SlurmJob(
        nodes=3, devices=2, program=("./run",), name="n", time="1:00", partition="p", account="a", gres="gpu:2",
        cpus_per_task=5, mem="6G", env={"A": "b"}, setup="s.sh", requeue=False, grace_seconds=77,
    )  # fmt: skip
    words = (
        "--nodes 3 --devices 2 --name n --time 1:00 --partition p --account a --gres gpu:2 --cpus-per-task 5 --mem 6G"
        " --env A=b --setup s.sh --no-requeue --grace-seconds 77"
    )
    assert plan_job(make_parser().parse_args(words.split()), read_program(["./run"], folder))[0] == wanted


@pytest.mark.parametrize(
    "arguments", [["slurm", "--nodes", "0"], ["slurm", "--nodes=many"], ["slurm", "--what"], [], ["x"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_a_line_of_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"lightning-parstrat {command} " in printed and ("--json" in printed or command == "consolidate")


def test_without_slurm_it_says_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", "--submit", "--", *FIT]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_plain_text_is_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--time", "5", "--env", "A=b c", "--env", "D=e", "--", *FIT]) == 0
    printed: Any = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash\n") and "export A='b c'" in printed and "export D=e" in printed


def test_torchrun_gets_one_task_of_each_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = job_file(capsys, "--nodes", "2", "--devices", "4", "--", "torchrun", "--nproc-per-node=4", *FIT[1:])
    assert "#SBATCH --ntasks-per-node=1" in text and "--trainer.devices=4" in text


@pytest.mark.parametrize(
    ("given", "folder_of_runs", "argument"),
    [
        ("~/runs", f"run_dir={Path.home()}/runs/", "=$run_dir"),
        ("s3://bucket/runs/", "run_dir=./slurm-runs/", "=$remote_runs/slurm-$SLURM_JOB_ID"),
    ],
)
def test_folders_at_home_and_elsewhere(
    folder: Path, capsys: pytest.CaptureFixture[str], given: str, folder_of_runs: str, argument: str
) -> None:
    text, _ = job_file(capsys, "--", *FIT, f"--trainer.default_root_dir={given}")
    assert folder_of_runs in text and f'"--trainer.default_root_dir{argument}"' in text


def test_what_the_program_takes_can_be_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, notes = job_file(capsys, "--lightning-cli", "yes", "--nodes", "2", "--", "my-training")
    assert "--trainer.num_nodes=2" in text and not notes
    text, notes = job_file(capsys, "--lightning-cli", "no", "--nodes", "2", "--", *FIT)
    assert "--trainer" not in text and notes
