"""Job files: what reaches them of the command's arguments and the program, what is refused; what the file does."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from lightning_parstrat.cli.main import main

FIT = ("python", "train.py", "fit")
SIZE = ("--nodes", "2", "--devices", "4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_file(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[str]]:
    assert main(["slurm", "--json", *SIZE, *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    return printed["job_file"], printed["notes"]


LINES = [
    ("--nodes 3", "#SBATCH --nodes=3"),
    ("--devices 2", "#SBATCH --ntasks-per-node=2"),
    ("--name n", "#SBATCH --job-name=n"),
    ("", "#SBATCH --job-name=training"),
    ("--time 1:00:00", "#SBATCH --time=1:00:00"),
    ("--partition p", "#SBATCH --partition=p"),
    ("--account a", "#SBATCH --account=a"),
    ("--gres gpu:a100:4", "#SBATCH --gres=gpu:a100:4"),
    ("--cpus-per-task 8", "#SBATCH --cpus-per-task=8"),
    ("--cpus-per-task 8", "export SRUN_CPUS_PER_TASK=8"),
    ("--mem 64G", "#SBATCH --mem=64G"),
    ("--env A=b --env D=e=f", "export D=e=f"),
    ("--setup env.sh", "source ./env.sh"),
    ("--runs /all", 'run_dir=/all/"slurm-$SLURM_JOB_ID"'),
    ("--no-requeue", "#SBATCH --no-requeue"),
    ("--requeue", "#SBATCH --requeue"),
    ("--grace-seconds 120", "#SBATCH --signal=SIGUSR1@120"),
    ("", "#SBATCH --open-mode=append"),
]


def test_every_argument_reaches_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in LINES:
        assert main(["slurm", *SIZE, *words.split(), "--", "./run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "#!/usr/bin/env bash" and line in lines, words
        assert any(one.startswith("#SBATCH --signal") for one in lines) == (words != "--no-requeue")


# The program's words, and whether it takes the Trainer's arguments; and, of a fit, a checkpoint to resume from.
PROGRAMS: list[tuple[tuple[str, ...], bool, bool]] = [
    (FIT, True, True),
    ((*FIT, "--trainer.devices=3", "-c", "c.yaml"), True, True),
    (("train.py", "test", "--config=c.yaml"), True, False),
    (("train.py", "--config=c.yaml", "--trainer.max_epochs=1"), True, False),
    (("python", "-m", "package.train", "fit"), True, True),
    (("apptainer", "exec", "-c", "image.sif", *FIT), True, True),
    (("train.py", "--split", "test"), False, False),
    (("train.py", "--config", "c.yaml"), False, False),
    (("bash", "-c", "python train.py fit"), False, False),
]


def test_a_lightning_cli_gets_the_jobs_numbers_and_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for words, has_cli, resumes in PROGRAMS:
        text, notes = job_file(capsys, "--", *words)
        # After the program's own arguments, so that they count.
        added = '    --trainer.num_nodes=2\n    --trainer.devices=4\n    "--trainer.default_root_dir=$run_dir"\n)\n'
        assert (added in text) == has_cli and ("--ckpt_path" in text) == resumes, words
        # Another program must know them.
        assert notes == [] if has_cli else "Trainer(num_nodes=2, devices=4, ...)" in notes[0], words


REFUSED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--",), ("no program",)),
    (("--env", "A", "--", *FIT), ("write KEY=VALUE",)),
    (("--env", "A B=c", "--", *FIT), ("a valid name of a variable",)),
    (("--", "mpirun", "-np", "2", "python", "train.py"), ("mpirun", "Give the program alone")),
    (("--", "torchrun", "--nproc-per-node=4", *FIT[1:]), ("torchrun", "Give the program alone")),
    (("--partition", "a\n#SBATCH --nodes=9", "--", *FIT), ("--partition",)),
    (("--name", "two words", "--", *FIT), ("--name",)),
    (("--submit", "--setup", "none.sh", "--", *FIT), ("there is no such file",)),
    (("--submit", "--", *FIT), ("without --submit",)),
]


def test_what_no_job_file_can_hold_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no Slurm.
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments, said in REFUSED:
        assert main(["slurm", *SIZE, *arguments]) == 2
        printed = capsys.readouterr().err
        assert all(part in printed for part in said), (arguments, printed)


def run_job(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Runs the file with stand-ins for Slurm's programs; what srun was given, and its variables."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {
        # More names than a pipe takes at once.
        "scontrol": "#!/bin/bash\nset -o pipefail\necho first\nseq 20000\n",
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
        runs = f"runs {text}"
        given, variables = run_job(
            capsys, folder, "--env", f"GIVEN={text}", "--setup", "setup it's.sh", "--runs", runs, "--", "./run", text
        )
        words = [word for word in given if not word.startswith("--")]
        assert words == ["./run", text]
        assert variables["GIVEN"] == text and variables["MASTER_ADDR"] == "first" and "FROM_SETUP" in variables
        assert not list(folder.rglob("injected*"))
        assert (folder / runs / "slurm-7").is_dir()


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
