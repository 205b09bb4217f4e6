"""Writes a job file for Slurm that people can read, and in which every value is quoted or checked.

``srun`` starts one task per device, and ranks find each other by Slurm's variables. The job gets a signal before the
time limit, and when it is preempted. At that signal, the strategies save and requeue it.
"""

import re
import shlex
from dataclasses import dataclass, field

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.core.wording import counted

SIGNAL = "SIGUSR1"
RUNS = "slurm-runs"
"""The parent of all jobs' folders if the program does not set one, relative to the folder of their submission."""

_RESUME = [
    "",
    "# A requeued run resumes from the newest checkpoint that the job has saved.",
    'newest=""',
    'while IFS= read -r -d "" file; do',
    '    if [ -z "$newest" ] || [ "$file" -nt "$newest" ]; then newest="$file"; fi',
    'done < <(find "$run_dir" \\( -name "hpc_ckpt_*.ckpt" -o -name "last*.ckpt" \\) -print0)',
    'if [ -n "$newest" ]; then program+=("--ckpt_path=$newest"); fi',
]

# Slurm has no quoting in #SBATCH lines. Any other character could end the option, or begin another.
_WORD = re.compile(r"[\w.:,=+%@/*\[\]()-]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A training on a Slurm cluster. Arguments without an explanation here are the command's arguments of that name.

    Args:
        devices: Devices of each node, which is also the number of its tasks.
        program: The training program and its arguments.
        env: Variables to export.
        runs: Parent of the jobs' folders. Each has a job's logs and checkpoints.
        folder_option: The program's option for the folder of checkpoints. None for a program without such an option.
        resumes: Whether the program takes ``--ckpt_path``, to resume from a checkpoint of the job's earlier run.
    """

    nodes: int = 1
    devices: int = 1
    program: tuple[str, ...]
    name: str = "training"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    setup: str | None = None
    requeue: bool = True
    grace_seconds: int = 90
    runs: str = RUNS
    folder_option: str | None = None
    resumes: bool = False

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("There is no program. Write it after `--`, such as: -- python train.py fit -c c.yaml")
        for option in ("nodes", "devices", "cpus_per_task", "grace_seconds"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise UsageError(f"--{option.replace('_', '-')} {number}: must be 1 or more.")
        for option in ("name", "time", "partition", "account", "gres", "mem"):
            word = getattr(self, option)
            if word is not None and not _WORD.fullmatch(word):
                raise UsageError(
                    f"--{option} {word!r}: cannot be written in a line of the job file. Letters, digits and"
                    " .:,=+%@/*[]()_- are allowed."
                )
        for name, value in self.env.items():
            if not _NAME.fullmatch(name):
                raise UsageError(f"--env {name}={value}: {name!r} is not a valid name of a variable.")


def render(job: SlurmJob) -> str:
    """The job file. Submit it from the folder that the program runs in."""
    head = ["#!/usr/bin/env bash", *_directives(job), "", "set -euo pipefail"]
    return "\n".join([*head, *_environment(job), *_folders(job), *_launch(job)]) + "\n"


def _directives(job: SlurmJob) -> list[str]:
    # Not --ntasks, because that counts the tasks of all nodes.
    asked = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": job.devices}
    asked |= {"cpus-per-task": job.cpus_per_task}
    asked |= {name: getattr(job, name) for name in ("mem", "gres", "partition", "account", "time")}
    lines = [f"#SBATCH --{option}={value}" for option, value in asked.items() if value is not None]
    if job.requeue:
        lines += [
            f"# {counted(job.grace_seconds, 'second')} before the time is up all ranks save after the same batch, and"
            " the job is requeued.",
            f"#SBATCH --signal={SIGNAL}@{job.grace_seconds}",
            "#SBATCH --requeue",
        ]
    else:
        lines.append("#SBATCH --no-requeue")
    # The output of the job file itself. A requeued run appends to the log of the run before.
    return [*lines, "#SBATCH --output=slurm-%j.log", "#SBATCH --open-mode=append"]


def _folders(job: SlurmJob) -> list[str]:
    # At the start of a path, srun's --output gives "all" and "none" a special meaning.
    runs = job.runs if job.runs.startswith("/") else f"./{job.runs}"
    return [
        "",
        "# The number of a job stays when it is requeued, and no other job has it: so each has a folder of its own,",
        "# from which it resumes.",
        f'run_dir={shlex.quote(runs)}/"slurm-$SLURM_JOB_ID"',
        'mkdir -p "$run_dir"',
        "# LightningCLI refuses to write over the configuration that an earlier run has left.",
        'if [ -e "$run_dir/config.yaml" ]; then mv "$run_dir/config.yaml" "$run_dir/config-$(date +%s).yaml"; fi',
    ]


def _environment(job: SlurmJob) -> list[str]:
    lines = [
        "",
        "# Where ranks meet: the first node, and a port by the job's number.",
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
    ]
    if job.cpus_per_task is not None:
        lines += [
            "# srun does not take this over from the job by itself.",
            f"export SRUN_CPUS_PER_TASK={job.cpus_per_task}",
        ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    if job.setup is not None:
        # Without a slash, `source` searches PATH first. `set +u`, because such files often read unset variables.
        setup = job.setup if "/" in job.setup else f"./{job.setup}"
        lines += ["", "set +u", f"source {shlex.quote(setup)}", "set -u"]
    return lines


def _launch(job: SlurmJob) -> list[str]:
    words = [f"    {shlex.quote(word)}" for word in job.program]
    if job.folder_option is not None:
        words.append(f'    "{job.folder_option}=$run_dir"')
    return [
        "",
        "program=(",
        *words,
        ")",
        *(_RESUME if job.resumes else ()),
        "",
        "# Each rank has a log of its own. When one of them fails, the others are ended.",
        'srun --kill-on-bad-exit=1 --open-mode=append --output="$run_dir/rank-%t.log" "${program[@]}"',
    ]
