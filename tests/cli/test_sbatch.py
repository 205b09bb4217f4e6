"""Job files: what they ask for, and that nothing in an argument gets out of its quotes."""

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.sbatch import SlurmJob, render, seconds_of

PROGRAM = ("python", "train.py")


def directives(job: SlurmJob) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in render(job).splitlines() if line.startswith("#SBATCH")]


def test_what_is_asked_for_is_in_the_file() -> None:
    job = SlurmJob(
        nodes=2, devices=4, program=PROGRAM, time="1:00:00", partition="gpu", account="me", gres="gpu:a100:4",
        cpus_per_task=8, mem="64G", grace_seconds=120,
    )  # fmt: skip
    wanted = {
        "nodes=2", "ntasks-per-node=4", "time=1:00:00", "partition=gpu", "account=me", "gres=gpu:a100:4",
        "cpus-per-task=8", "mem=64G", "signal=SIGUSR1@120", "requeue", "open-mode=append",
    }  # fmt: skip
    assert wanted <= set(directives(job))
    assert "SRUN_CPUS_PER_TASK=8" in render(job)


def test_a_job_that_is_not_to_be_requeued_gets_no_signal() -> None:
    found = directives(SlurmJob(program=PROGRAM, requeue=False))
    assert "no-requeue" in found and not any(line.startswith("signal") for line in found)


def run_job(job: SlurmJob, folder: Path) -> dict[str, Any]:
    """Runs the file with stand-ins for Slurm's programs, and returns what srun was given."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {
        "scontrol": "#!/bin/bash\necho first\n",
        "srun": '#!/bin/bash\nprintf "%s\\0" "$@" > given\nenv -0 > environment\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first"}
    done = subprocess.run(["bash"], input=render(job), cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = (folder / "given").read_text().split("\0")[:-1]
    environment = dict(one.split("=", 1) for one in (folder / "environment").read_text().split("\0")[:-1])
    return {
        "program": [word for word in given if not word.startswith("--")],
        "given": given,
        "environment": environment,
    }


NASTY = [
    "two words",
    "it's",
    '"',
    "$HOME",
    "$(touch injected)",
    "`touch injected`",
    "; touch injected",
    "a\ntouch injected",
    "a\n#SBATCH --nodes=99",
    "\\",
    "*",
    "~",
    "",
    "!!",
    "ünï",
]


@pytest.mark.parametrize("text", NASTY)
def test_arguments_arrive_as_they_were_given(tmp_path: Path, text: str) -> None:
    (tmp_path / "setup it's.sh").write_text("export FROM_SETUP=$UNSET\n")
    job = SlurmJob(
        program=(*PROGRAM, text), env={"GIVEN": text}, setup="setup it's.sh", runs=f"runs {text}".replace("\0", "")
    )
    result = run_job(job, tmp_path)
    assert result["program"] == [*PROGRAM, text]
    assert result["environment"]["GIVEN"] == text
    assert result["environment"]["MASTER_ADDR"] == "first"
    assert not list(tmp_path.rglob("injected*"))
    assert (tmp_path / f"runs {text}" / "slurm-7").is_dir()


def test_each_job_has_a_folder_of_its_own_and_an_old_configuration_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "slurm-runs/slurm-7"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("old")
    result = run_job(SlurmJob(program=PROGRAM, folder_option="--trainer.default_root_dir"), tmp_path)
    assert "--trainer.default_root_dir=./slurm-runs/slurm-7" in result["given"]
    (kept,) = folder.glob("config-*.yaml")
    assert kept.read_text() == "old" and not (folder / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": ()}, "no program"),
        ({"nodes": 0}, "--nodes 0"),
        ({"devices": -1}, "--devices -1"),
        ({"cpus_per_task": 0}, "--cpus-per-task 0"),
        ({"partition": "a\n#SBATCH --nodes=9"}, "--partition"),
        ({"name": "two words"}, "--name"),
        ({"account": "a b"}, "--account"),
        ({"gres": "gpu:4; rm"}, "--gres"),
        ({"mem": "4 G"}, "--mem"),
        ({"time": "soon"}, "--time 'soon'"),
        ({"time": "1"}, "not longer than the 90 seconds"),
        ({"env": {"A B": "c"}}, "not a valid name of a variable"),
        ({"program": ("a\0b",)}, "NUL"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SlurmJob(**{"program": PROGRAM, **arguments})


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-0", 172800), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_times_as_slurm_takes_them(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_a_requeued_run_goes_on_from_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "slurm-runs/slurm-7"
    (folder / "checkpoints").mkdir(parents=True)
    job = SlurmJob(program=PROGRAM, resumes=True)
    older, newer = folder / "checkpoints/last.ckpt", folder / "hpc_ckpt_1.ckpt"
    for path, seconds in ((older, 1000), (newer, 2000)):
        path.touch()
        os.utime(path, (seconds, seconds))
    assert "--ckpt_path=./slurm-runs/slurm-7/hpc_ckpt_1.ckpt" in run_job(job, tmp_path)["given"]


def test_a_first_run_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert not any("ckpt_path" in word for word in run_job(SlurmJob(program=PROGRAM, resumes=True), tmp_path)["given"])


@pytest.mark.parametrize("time", ["0", "UNLIMITED", "infinite"])
def test_a_job_without_limit(time: str) -> None:
    assert seconds_of(time) is None and f"time={time}" in directives(SlurmJob(program=PROGRAM, time=time))
