"""``lightning-parstrat slurm``: writes a job file for a training, and submits it on request."""

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.program import Program, read_program
from lightning_parstrat.cli.sbatch import RUNS, SlurmJob, render
from lightning_parstrat.core.wording import counted

_DESCRIPTION = """
Writes a Slurm job file that starts a training on all devices of some nodes, and prints it, or submits it (--submit).
The job saves and requeues itself when its time is up or it is preempted, and resumes from there.

  lightning-parstrat slurm --nodes 2 --devices 4 --gres gpu:4 --time 8:00:00 --submit -- python train.py fit -c c.yaml

What follows `--` is the program. If it uses LightningCLI, its arguments and YAML files are read: numbers of nodes and
devices in them need not be repeated here, contradictions are refused, and missing ones are added to its command line.
"""
_LAUNCHERS = ("mpirun", "mpiexec", "accelerate", "deepspeed", "srun", "torchrun", "torch.distributed.run")


def make_parser() -> ArgumentParser:
    """The command's arguments, without the program."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=PositiveInt | None, help="number of nodes (default: the program's num_nodes, or 1)")
    add("--devices", type=PositiveInt | None, help="devices per node, each with a task (default: the program's, or 1)")
    add("--name", type=str | None, help="name of the job (default: the program's file)")
    add("--time", type=str | None, help="limit, as Slurm takes it: minutes, h:mm:ss, or days-hours")
    add("--partition", type=str | None, help="partition to run in")
    add("--account", type=str | None, help="account to charge")
    add("--gres", type=str | None, help="generic resources of each node, such as gpu:4")
    add("--cpus-per-task", type=PositiveInt | None, help="cores for each device's process")
    add("--mem", type=str | None, help="host memory of each node, such as 64G")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="variable to export; repeatable")
    add("--setup", type=str | None, metavar="FILE", help="file to source before the program, to load modules, say")
    add("--requeue", action=ActionYesNo(no_prefix="no-"), default=True, help="requeue if preempted or out of time")
    add("--grace-seconds", type=PositiveInt, default=90, help="seconds before the time limit at which to save")
    add("--submit", action="store_true", help="submit the job, instead of printing its file")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace, program: list[str]) -> int:
    """Prints or submits the job.

    Raises:
        UsageError: The arguments contradict each other, or Slurm refuses the job.
    """
    folder = Path.cwd()
    job, notes = plan_job(arguments, read_program(program, folder))
    text = render(job)
    if not arguments.submit:
        print(json.dumps({"job_file": text, "notes": notes}) if arguments.json else text.rstrip("\n"))
        return 0
    if job.setup is not None and not (folder / job.setup).is_file():
        raise UsageError(f"--setup {job.setup}: there is no such file in {folder}.")
    number = submit(text, folder)
    found = {
        "job": number,
        "folder": str(folder / job.runs / f"slurm-{number}"),
        "log": str(folder / f"slurm-{number}.log"),
        "notes": notes,
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        size = f"{counted(job.nodes * job.devices, 'rank')} on {counted(job.nodes, 'node')}"
        print(*notes, f"Submitted job {number}: {size}. Logs: {found['folder']}, {found['log']}", sep="\n")
    return 0


def plan_job(arguments: Namespace, program: Program) -> tuple[SlurmJob, list[str]]:
    """Makes the job, and notes about it for the user.

    Raises:
        UsageError: The arguments contradict the program's own.
    """
    launcher = next((word for word in program.command[:3] if Path(word).name in _LAUNCHERS), None)
    if launcher is not None:
        raise UsageError(
            f"{launcher}: the job's srun starts the ranks itself. Give the program alone: -- python train.py ..."
        )
    nodes = _agreed("nodes", arguments.nodes, program, "num_nodes")
    devices = _agreed("devices", arguments.devices, program, "devices")
    command, notes = list(program.command), []
    if program.has_lightning_cli:
        # Added to its command line, because the Trainer's arguments there override those in files.
        for name, number in (("num_nodes", nodes), ("devices", devices)):
            if program.count(name) is None:
                command.append(f"--trainer.{name}={number}")
    else:
        notes.append(
            f"The program does not seem to use LightningCLI, so it must itself create"
            f" Trainer(num_nodes={nodes}, devices={devices}, ...)."
        )
    root = program.settings.get("default_root_dir")
    if root is not None and "://" in str(root.value):
        raise UsageError(f"{root.source}: a job's folder must lie on a file system that all nodes share.")
    job = SlurmJob(
        **{
            **{one.name: arguments[one.name] for one in fields(SlurmJob) if one.name in arguments},
            "nodes": nodes,
            "devices": devices,
            "program": tuple(command),
            "name": arguments.name or _name_of(command),
            "env": _variables(arguments.env),
            "runs": RUNS if root is None or root.value is None else str(Path(str(root.value)).expanduser()),
            "folder_option": "--trainer.default_root_dir" if program.has_lightning_cli else None,
            "resumes": program.has_lightning_cli and program.subcommand == "fit",
        }
    )
    return job, notes


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


def _agreed(option: str, given: int | None, program: Program, name: str) -> int:
    setting, wanted = program.settings.get(name), program.count(name)
    if given is not None and wanted is not None and given != wanted and setting is not None:
        raise UsageError(
            f'These two contradict each other:\n  the argument "--{option} {given}"\n'
            f"  {setting.source}\nGive the number in one place only, or the same in both."
        )
    if given is None and wanted is None and setting is not None and setting.value is not None:
        raise UsageError(
            f"{setting.source}: this number is not known before the job runs, and the job must ask for one. Add"
            f" --{option} with the number."
        )
    return given or wanted or 1


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--env {assignment}: write KEY=VALUE.")
        variables[name] = value
    return variables


def _name_of(command: list[str]) -> str:
    files = [Path(word).stem for word in command if word.endswith(".py")]
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in files[0]) if files else ""
    return name.strip("-") or "training"
