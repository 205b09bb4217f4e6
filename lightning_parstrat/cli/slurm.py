"""``lightning-parstrat slurm``: writes a Slurm job file for a training, and submits it on request.

People can read the file. Every value in it is quoted or checked. ``srun`` starts one task per device, and ranks find
each other by Slurm's variables. The job gets a signal before the time limit, and when it is preempted. At that signal,
the strategies save and requeue it.
"""

import json
import re
import shlex
import shutil
import subprocess
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from itertools import pairwise
from pathlib import Path

from lightning_parstrat.cli.text import UsageError, positive
from lightning_parstrat.core.wording import counted

_DESCRIPTION = """
Writes a Slurm job file that starts a training on all devices of some nodes, and prints it, or submits it (--submit).
The job saves and requeues itself when its time is up or it is preempted, and resumes from there.

  lightning-parstrat slurm --nodes 2 --devices 4 --gres gpu:4 --time 8:00:00 --submit -- python train.py fit -c c.yaml

What follows `--` is the program. If it uses LightningCLI, its num_nodes, devices and default_root_dir are set by
arguments that are added to its own, and override them.
"""
_LAUNCHERS = ("mpirun", "mpiexec", "accelerate", "deepspeed", "srun", "torchrun", "torch.distributed.run")
_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SIGNAL = "SIGUSR1"
# Slurm has no quoting in #SBATCH lines. Any other character could end the option, or begin another.
_WORD = re.compile(r"[\w.:,=+%@/*\[\]()-]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_FOLDER = """
# The number of a job stays when it is requeued, and no other job has it: so each has a folder of its own,
# from which it resumes.
run_dir={runs}/"slurm-$SLURM_JOB_ID"
mkdir -p "$run_dir"
# LightningCLI refuses to write over the configuration that an earlier run has left.
if [ -e "$run_dir/config.yaml" ]; then mv "$run_dir/config.yaml" "$run_dir/config-$(date +%s).yaml"; fi
"""
_MEETING = """
# Where ranks meet: the first node, and a port by the job's number.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
"""
_RESUME = """
# A requeued run resumes from the newest checkpoint that the job has saved.
newest=""
while IFS= read -r -d "" file; do
    if [ -z "$newest" ] || [ "$file" -nt "$newest" ]; then newest="$file"; fi
done < <(find "$run_dir" \\( -name "hpc_ckpt_*.ckpt" -o -name "last*.ckpt" \\) -print0)
if [ -n "$newest" ]; then program+=("--ckpt_path=$newest"); fi
"""
_LAUNCH = """
# Each rank has a log of its own. When one of them fails, the others are ended.
srun --kill-on-bad-exit=1 --open-mode=append --output="$run_dir/rank-%t.log" "${program[@]}"
"""


def make_parser() -> ArgumentParser:
    """The command's arguments, without the program."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=positive, required=True, help="number of nodes")
    add("--devices", type=positive, required=True, help="devices per node, each with a task")
    add("--name", help="name of the job (default: the program's file)")
    add("--time", help="limit, as Slurm takes it: minutes, h:mm:ss, or days-hours")
    add("--partition", help="partition to run in")
    add("--account", help="account to charge")
    add("--gres", help="generic resources of each node, such as gpu:4")
    add("--cpus-per-task", type=positive, help="cores for each device's process")
    add("--mem", help="host memory of each node, such as 64G")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="variable to export; repeatable")
    add("--setup", metavar="FILE", help="file to source before the program, to load modules, say")
    add("--runs", default="slurm-runs", help="parent of the jobs' folders, which hold logs and checkpoints")
    add("--requeue", action=BooleanOptionalAction, default=True, help="requeue if preempted or out of time")
    add("--grace-seconds", type=positive, default=90, help="seconds before the time limit at which to save")
    add("--submit", action="store_true", help="submit the job, instead of printing its file")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace) -> int:
    """Prints or submits the job.

    Raises:
        UsageError: An argument cannot be written into a job file, or Slurm refuses the job.
    """
    program = arguments.program
    _check(arguments, program)
    text, notes, folder = render(arguments, program), [], Path.cwd()
    if not _takes_trainers_arguments(program):
        notes.append(
            "The program does not seem to use LightningCLI: it has no subcommand and no `--trainer.` argument. So it"
            f" must itself create Trainer(num_nodes={arguments.nodes}, devices={arguments.devices}, ...)."
        )
    if not arguments.submit:
        print(json.dumps({"job_file": text, "notes": notes}) if arguments.json else text.rstrip("\n"))
        return 0
    if arguments.setup is not None and not (folder / arguments.setup).is_file():
        raise UsageError(f"--setup {arguments.setup}: there is no such file in {folder}.")
    number = submit(text, folder)
    runs, log = str(folder / arguments.runs / f"slurm-{number}"), str(folder / f"slurm-{number}.log")
    if arguments.json:
        print(json.dumps({"job": number, "folder": runs, "log": log, "notes": notes}))
    else:
        size = f"{counted(arguments.nodes * arguments.devices, 'rank')} on {counted(arguments.nodes, 'node')}"
        print(*notes, f"Submitted job {number}: {size}. Logs: {runs}, {log}", sep="\n")
    return 0


def _check(arguments: Namespace, program: list[str]) -> None:
    if not program:
        raise UsageError("There is no program. Write it after `--`, such as: -- python train.py fit -c c.yaml")
    launcher = next((word for word in program[:3] if Path(word).name in _LAUNCHERS), None)
    if launcher is not None:
        raise UsageError(
            f"{launcher}: the job's srun starts the ranks itself. Give the program alone: -- python train.py ..."
        )
    for option in ("name", "time", "partition", "account", "gres", "mem"):
        word = getattr(arguments, option)
        if word is not None and not _WORD.fullmatch(word):
            raise UsageError(
                f"--{option} {word!r}: cannot be written in a line of the job file. Letters, digits and"
                " .:,=+%@/*[]()_- are allowed."
            )
    for assignment in arguments.env:
        name, equals, _ = assignment.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(f"--env {assignment}: write KEY=VALUE, with a valid name of a variable.")


def _subcommand(program: list[str]) -> str | None:
    """LightningCLI's subcommand in a program's command line, such as ``fit``."""
    # The words before its file or module start it. After an option without `=`, a word is that option's value.
    start = next((at for at, word in enumerate(program) if word.endswith(".py") or word == "-m"), 0)
    words = (word for before, word in pairwise(program[start:]) if before[:1] != "-" or "=" in before)
    return next((word for word in words if word in _SUBCOMMANDS), None)


def _takes_trainers_arguments(program: list[str]) -> bool:
    return _subcommand(program) is not None or any(word.startswith("--trainer.") for word in program)


def render(arguments: Namespace, program: list[str]) -> str:
    """The job file. Submit it from the folder that the program runs in."""
    # Without a slash, srun's --output gives "all" and "none" a special meaning.
    runs = arguments.runs if arguments.runs.startswith("/") else f"./{arguments.runs}"
    words = [shlex.quote(word) for word in program]
    if _takes_trainers_arguments(program):
        words += [f"--trainer.num_nodes={arguments.nodes}", f"--trainer.devices={arguments.devices}"]
        words.append('"--trainer.default_root_dir=$run_dir"')
    command = "\n".join(["", "program=(", *(f"    {word}" for word in words), ")", ""])
    resume = _RESUME if _subcommand(program) == "fit" else ""
    folder = _FOLDER.format(runs=shlex.quote(runs))
    return "".join(
        [_directives(arguments, program), _MEETING, *_environment(arguments), folder, command, resume, _LAUNCH]
    )


def _directives(arguments: Namespace, program: list[str]) -> str:
    files = [Path(word).stem for word in program if word.endswith(".py")]
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in (files or [""])[0]).strip("-")
    # Not --ntasks, because that counts the tasks of all nodes.
    asked = {"job-name": arguments.name or name or "training", "nodes": arguments.nodes}
    asked |= {"ntasks-per-node": arguments.devices, "cpus-per-task": arguments.cpus_per_task}
    asked |= {name: getattr(arguments, name) for name in ("mem", "gres", "partition", "account", "time")}
    lines = [f"#SBATCH --{option}={value}" for option, value in asked.items() if value is not None]
    if arguments.requeue:
        lines += [
            f"# {counted(arguments.grace_seconds, 'second')} before the time is up all ranks save after the same"
            " batch, and the job is requeued.",
            f"#SBATCH --signal={_SIGNAL}@{arguments.grace_seconds}",
            "#SBATCH --requeue",
        ]
    else:
        lines.append("#SBATCH --no-requeue")
    # The output of the job file itself. A requeued run appends to the log of the run before.
    lines += ["#SBATCH --output=slurm-%j.log", "#SBATCH --open-mode=append", "", "set -euo pipefail", ""]
    return "\n".join(["#!/usr/bin/env bash", *lines])


def _environment(arguments: Namespace) -> list[str]:
    lines = []
    if arguments.cpus_per_task is not None:
        lines.append("# srun does not take this over from the job by itself.")
        lines.append(f"export SRUN_CPUS_PER_TASK={arguments.cpus_per_task}")
    for name, _, value in (assignment.partition("=") for assignment in arguments.env):
        lines.append(f"export {name}={shlex.quote(value)}")
    if arguments.setup is not None:
        # Without a slash, `source` searches PATH first. `set +u`, because such files often read unset variables.
        setup = arguments.setup if "/" in arguments.setup else f"./{arguments.setup}"
        lines += ["", "set +u", f"source {shlex.quote(setup)}", "set -u"]
    return [f"{line}\n" for line in lines]


def submit(job_file: str, folder: Path) -> int:
    """Submits a job file, and returns the job's number.

    Raises:
        UsageError: There is no Slurm here, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(
            "`sbatch` was not found on this machine. Run this on a login node of the Slurm cluster, or write the job"
            " file without --submit, and submit it there."
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], cwd=folder, input=job_file, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UsageError(f"sbatch refuses the job: {done.stderr.strip() or done.stdout.strip()}")
    # With several clusters, sbatch adds the cluster's name after a semicolon.
    return int(done.stdout.strip().split(";")[0])
