"""Each known issue has a case that must be found, with the line to change, and a healthy twin in which nothing is."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.cli.doctor import from_short_lines, in_short_lines
from lightning_parstrat.cli.facts import Interface
from lightning_parstrat.cli.known_issues import Situation, find_known_issues, program_of, read_job_file
from lightning_parstrat.cli.program import read_program
from lightning_parstrat.cli.sbatch import SlurmJob, render

HEALTHY = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --signal=SIGUSR1@90
srun python train.py fit --trainer.strategy=zero1_custom --trainer.num_nodes=2 --trainer.devices=4 \\
    --trainer.default_root_dir="runs/$SLURM_JOB_ID"
"""

TASKS = "-> #SBATCH --ntasks-per-node=4"
DEVICES = "-> #SBATCH --gpus-per-node=4"
SIGNAL = "-> #SBATCH --signal=SIGUSR1@90"
JOB_FILES = {
    "signal handler": ("=zero1_custom", "=ddp", "checkpoint in a signal handler", "-> strategy: zero1_custom"),
    "SIGTERM": ("SIGUSR1@", "TERM@", "SIGTERM as a warning", f"line 5: #SBATCH --signal=TERM@90\n  {SIGNAL}"),
    "shell alone": ("SIGUSR1@", "B:USR1@", "signal to the shell alone", SIGNAL),
    "ntasks": ("--ntasks-per-node=4", "--ntasks=8", "--ntasks", f"line 3: #SBATCH --ntasks=8\n  {TASKS}"),
    "short ntasks": ("--ntasks-per-node=4", "-n 8", "--ntasks", TASKS),
    "tasks and devices": ("--ntasks-per-node=4", "--ntasks-per-node=1", "tasks and devices", TASKS),
    "nodes": ("#SBATCH --nodes=2", "#SBATCH --nodes=3", "nodes", "-> #SBATCH --nodes=2"),
    "device per task": ("--gpus-per-node=4", "--gpus-per-task=1", "one device per task", DEVICES),
    "bound devices": ("--gpus-per-node=4", "--gpu-bind=single:1", "one device per task", DEVICES),
    "hpc": ("fit ", "fit --ckpt_path=hpc ", 'ckpt_path "hpc"', "-> leave it out"),
    "shared folder": ("runs/$SLURM_JOB_ID", "runs", "jobs that share a folder", "runs/slurm-$SLURM_JOB_ID"),
}  # fmt: skip


def look(folder: Path, text: str, **environment: str) -> list[Any]:
    (folder / "job.sh").write_text(text)
    job_file = read_job_file(folder / "job.sh")
    return find_known_issues(Situation(environment, job_file, program_of(job_file, folder), [Interface("eth0", 1000)]))


def test_a_healthy_job_file(tmp_path: Path) -> None:
    assert look(tmp_path, HEALTHY) == []


@pytest.mark.parametrize("name", JOB_FILES)
def test_a_job_file_that_is_not(tmp_path: Path, name: str) -> None:
    healthy, sick, issue, change = JOB_FILES[name]
    assert healthy in HEALTHY
    (finding,) = look(tmp_path, HEALTHY.replace(healthy, sick))
    assert finding.issue == issue and change in finding.change


def test_torchrun_loses_requeue_under_other_strategies_alone(tmp_path: Path) -> None:
    text = HEALTHY.replace("srun python", "srun torchrun --nproc-per-node 4").replace("per-node=4", "per-node=1", 1)
    text = text.replace("#SBATCH --ntasks-per-node=1\n", "")
    assert look(tmp_path, text) == []
    found = look(tmp_path, text.replace("=zero1_custom", "=ddp"))
    assert [finding.issue for finding in found] == ["checkpoint in a signal handler", "torchrun in Slurm"]


IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
ENVIRONMENTS = {
    "ntasks": ({"SLURM_NTASKS_PER_NODE": None}, "--ntasks", "-> #SBATCH --ntasks-per-node=4"),
    "tasks and devices": ({"SLURM_NTASKS_PER_NODE": "2"}, "tasks and devices", "SLURM_NTASKS_PER_NODE=2"),
    "nodes": ({"SLURM_NNODES": "3"}, "nodes", "-> #SBATCH --nodes=2"),
    "device per task": ({"SLURM_GPUS_PER_TASK": "1"}, "one device per task", "-> #SBATCH --gpus-per-node=4"),
    "visible": ({"SLURM_STEP_ID": "0", "CUDA_VISIBLE_DEVICES": "0"}, "one device per task", "CUDA_VISIBLE_DEVICES=0"),
}  # fmt: skip


def look_in_job(folder: Path, strategy: str = "zero1_custom", **changed: str | None) -> list[Any]:
    environment = {name: value for name, value in {**IN_JOB, **changed}.items() if value is not None}
    command = ("train.py", "fit", f"--trainer.strategy={strategy}", "--trainer.num_nodes=2", "--trainer.devices=4")
    return find_known_issues(Situation(environment, None, read_program(command, folder), [Interface("eth0", 1000)]))


def test_a_healthy_allocation(tmp_path: Path) -> None:
    assert look_in_job(tmp_path) == []
    assert look_in_job(tmp_path, SLURM_STEP_ID="0", CUDA_VISIBLE_DEVICES="0,1,2,3") == []


@pytest.mark.parametrize(
    "strategy",
    ["ddp_zero1", "zero2_custom", "ddp_zero2_fork", "zero3_custom", "ddp_zero3", "ddp_tuned_spawn", "ZeRO3Strategy"],
)
def test_every_stage_is_known(tmp_path: Path, strategy: str) -> None:
    assert look_in_job(tmp_path, strategy) == []
    assert look_in_job(tmp_path, strategy, TORCHELASTIC_RUN_ID="1") == []
    # Of others the same job is not healthy.
    assert look_in_job(tmp_path, "fsdp", TORCHELASTIC_RUN_ID="1") != []


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_allocation_that_is_not(tmp_path: Path, name: str) -> None:
    changed, issue, change = ENVIRONMENTS[name]
    (finding,) = look_in_job(tmp_path, **changed)
    assert finding.issue == issue and change in finding.change


def test_torchrun_in_an_allocation(tmp_path: Path) -> None:
    assert look_in_job(tmp_path, TORCHELASTIC_RUN_ID="1") == []
    assert "torchrun in Slurm" in [one.issue for one in look_in_job(tmp_path, "ddp", TORCHELASTIC_RUN_ID="1")]


INTERFACES = [Interface("eth0", 1000), Interface("ib0", 200000)]


@pytest.mark.parametrize(
    ("environment", "interfaces", "found"),
    [
        (IN_JOB, INTERFACES, True),
        (IN_JOB, INTERFACES[:1], False),
        (IN_JOB, [INTERFACES[0], Interface("docker0", None), Interface("veth12", 10)], False),
        ({**IN_JOB, "GLOO_SOCKET_IFNAME": "ib0"}, INTERFACES, False),
        ({**IN_JOB, "SLURM_NNODES": "1"}, INTERFACES, False),
        ({}, INTERFACES, False),
    ],
)
def test_several_interfaces_are_named_where_none_was_chosen(
    environment: dict[str, str], interfaces: list[Interface], found: bool
) -> None:
    findings = find_known_issues(Situation(environment, None, None, interfaces))
    assert [finding.issue for finding in findings] == (["several interfaces"] if found else [])
    assert all("export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in finding.change for finding in findings)


@pytest.mark.parametrize(
    ("group", "change"),
    [("node", ""), ("4", ""), ("8", ""), ("3", "a number that divides 8"), ("rack", "a number that divides 8")],
)
def test_shard_groups_that_do_not_divide_the_ranks(tmp_path: Path, group: str, change: str) -> None:
    strategy = f"--trainer.strategy={{class_path: ZeRO1Strategy, init_args: {{shard_group: {group}}}}}"
    command = ("train.py", "fit", strategy, "--trainer.num_nodes=2", "--trainer.devices=4")
    found = find_known_issues(Situation({}, None, read_program(command, tmp_path), []))
    assert [finding.issue for finding in found] == (["shard groups"] if change else [])
    assert all(change in finding.change for finding in found)


OTHERWISE = {
    "several options in a line": ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4", "#SBATCH -N 2 --ntasks-per-node=4"),
    "bound to none": ("--gpus-per-node=4", "--gpus-per-task=1 --gpu-bind=none"),
    "a shell that hands the signal on": (
        "SIGUSR1@90\n",
        "B:USR1@90\ntrap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n",
    ),
    "another program": ("srun python", "python report.py --num_nodes 1 --config done.json\nsrun python"),
    "a program after it": ('_ID"\n', '_ID"\npython report.py --num_nodes 1 > out.txt\n'),
    "a comment and an apostrophe": ("srun python", "# not torchrun, don't\necho don't\nsrun python"),
    "numbers from the job": ("num_nodes=2 --trainer.devices=4", "num_nodes=$SLURM_NNODES --trainer.devices=$DEV"),
    "a configuration from a variable": ("fit ", 'fit --config "$CONFIG" '),
    "an array of words": (
        "srun python train.py",
        'program=(\n  python\n  train.py fit\n)\nsrun "${program[@]}" python train.py',
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_healthy_job_files_of_other_kinds(tmp_path: Path, name: str) -> None:
    before, after = OTHERWISE[name]
    assert before in HEALTHY
    assert look(tmp_path, HEALTHY.replace(before, after)) == []


def test_glued_options_and_directives_that_come_too_late(tmp_path: Path) -> None:
    (finding,) = look(tmp_path, HEALTHY.replace("--ntasks-per-node=4", "-n8"))
    assert finding.issue == "--ntasks"
    late = HEALTHY.replace("#SBATCH --signal=SIGUSR1@90\n", "") + "#SBATCH --signal=TERM@60\n"
    assert look(tmp_path, late) == []


@pytest.mark.parametrize("program", [("python", "train.py"), ("torchrun", "--nproc-per-node=4", "train.py")])
def test_the_commands_own_job_files_are_healthy(tmp_path: Path, program: tuple[str, ...]) -> None:
    arguments = ("fit", "--trainer.strategy=zero1_custom", "--trainer.num_nodes=2", "--trainer.devices=4")
    job = SlurmJob(
        nodes=2,
        devices=4,
        program=(*program, *arguments),
        gres="gpu:4",
        folder_option="--trainer.default_root_dir",
        resumes=True,
        has_launcher=program[0] == "torchrun",
    )
    assert look(tmp_path, render(job)) == []
    found = look(tmp_path, render(job).replace("=zero1_custom", "=ddp"))
    assert found[0].issue == "checkpoint in a signal handler"


def test_what_nodes_tell_survives_srun() -> None:
    """Which numbers lines, and cuts long ones where those of two nodes meet."""
    texts = [json.dumps({"host": f"node{number}", "packages": "x:y " * 700}) for number in range(2)]
    lines = [in_short_lines(text).splitlines() for text in texts]
    assert max(map(len, lines[0])) < 500
    printed = "\n".join(f"{task}: {line}" for pair in zip(*lines, strict=True) for task, line in enumerate(pair))
    assert from_short_lines("a banner\n" + printed) == texts
