"""``lightning-parstrat slurm``: writes a job file for a training, and submits it where asked."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.program import Program, read_program
from lightning_parstrat.cli.sbatch import RUNS, SlurmJob, render
from lightning_parstrat.cli.submission import Follower, submit, wait_for
from lightning_parstrat.core.wording import counted

_DESCRIPTION = """
Writes a Slurm job file that starts a training on all devices of some nodes, and prints it (--dry-run, the default) or
submits it (--submit). The job saves and requeues itself when its time is up or it is preempted, and resumes from there.

  lightning-parstrat slurm --nodes 2 --devices 4 --gres gpu:4 --time 8:00:00 --submit -- python train.py fit -c c.yaml

What follows `--` is the program. If it uses LightningCLI, its arguments and YAML files are read: numbers of nodes and
devices in them need not be repeated here, contradictions are refused, and missing ones are added to its command line.
"""


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
    add(
        "--lightning-cli",
        type=Literal["auto", "yes", "no"],
        default="auto",
        help="whether the program uses LightningCLI",
    )
    add("--submit", action="store_true", help="submit the job, instead of printing its file")
    add("--dry-run", action="store_true", help="print the job file and do nothing else; the default")
    add("--wait", action="store_true", help="with --submit: show the job's state and log, and exit with its exit code")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace, program: list[str]) -> int:
    """Prints or submits the job; returns the exit code, with ``--wait`` the job's.

    Raises:
        UsageError: The arguments contradict each other, or Slurm refuses.
    """
    if arguments.submit and arguments.dry_run:
        raise UsageError("--submit and --dry-run exclude each other.")
    if arguments.wait and not arguments.submit:
        raise UsageError("--wait waits for a job that is submitted: add --submit.")
    folder = Path.cwd()
    found = read_program(program, folder)
    if arguments.lightning_cli != "auto":
        found = found._replace(has_lightning_cli=arguments.lightning_cli == "yes")
    job, notes = plan_job(arguments, found)
    text = render(job)
    if not arguments.submit:
        return _print(arguments.json, text, {"job_file": text, "notes": notes})
    _check_setup(job, folder)
    number = submit(text, folder)
    log = folder / f"slurm-{number}.log"
    run_dir = folder / job.runs / f"slurm-{number}"
    size = f"{counted(job.task_count, 'rank')} on {counted(job.nodes, 'node')}"
    said = [*notes, f"Submitted job {number}: {size}. Logs: {run_dir}, {log}"]
    if not arguments.wait:
        value = {"job": number, "folder": str(run_dir), "log": str(log), "notes": notes}
        return _print(arguments.json, "\n".join(said), value)
    _say("\n".join(said))
    state = wait_for(
        number, Follower([log, run_dir / "rank-0.log"], sys.stderr if arguments.json else sys.stdout), _say
    )
    if arguments.json:
        print(json.dumps({"job": number, "folder": str(run_dir), "log": str(log), **state._asdict()}))
    # A job that was cancelled or timed out has failed, though its script may have exit code 0.
    return state.exit_code or (0 if state.name == "COMPLETED" else 1)


def plan_job(arguments: Namespace, program: Program) -> tuple[SlurmJob, list[str]]:
    """Makes the job, and notes for the user about it.

    Raises:
        UsageError: The arguments contradict the program's own.
    """
    _check_launcher(program)
    nodes = _agreed("nodes", arguments.nodes, program, "num_nodes")
    devices = _agreed("devices", arguments.devices, program, "devices")
    command, notes = list(program.command), []
    if program.settings.get("ckpt_path", (None, ""))[0] == "hpc":
        command = _without_hpc(command, program)
        notes.append("--ckpt_path=hpc is left out: a requeued job resumes by itself, and a first run has none.")
    if program.has_lightning_cli:
        # Added to its command line, where the Trainer's arguments override those in files.
        for name, number in (("num_nodes", nodes), ("devices", devices)):
            if program.count(name) is None:
                command.append(f"--trainer.{name}={number}")
    else:
        notes.append(
            f"The program does not seem to use LightningCLI, so it must itself create"
            f" Trainer(num_nodes={nodes}, devices={devices}, ...). If it does use it, add --lightning-cli yes."
        )
    given = {one.name: arguments[one.name] for one in fields(SlurmJob) if one.name in arguments}
    root = program.settings.get("default_root_dir")
    runs = RUNS if root is None or root.value is None else str(root.value)
    job = SlurmJob(
        **{
            **given,
            "nodes": nodes,
            "devices": devices,
            "program": tuple(command),
            "name": arguments.name or _name_of(command),
            "env": _variables(arguments.env),
            "runs": RUNS if "://" in runs else str(Path(runs).expanduser()),
            "remote_runs": runs.rstrip("/") if "://" in runs else None,
            "folder_option": "--trainer.default_root_dir" if program.has_lightning_cli else None,
            "resumes": program.has_lightning_cli and program.subcommand == "fit",
            "has_launcher": program.launcher is not None,
        }
    )
    return job, notes


def _check_launcher(program: Program) -> None:
    others = ("mpirun", "mpiexec", "accelerate", "deepspeed", "srun")
    found = next((word for word in program.command[:3] if Path(word).name in others), None)
    if found is not None:
        raise UsageError(
            f"{found}: the job's srun starts the ranks itself. Give the program alone: -- python train.py ..."
        )


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


def _without_hpc(command: list[str], program: Program) -> list[str]:
    if not program.settings["ckpt_path"].source.startswith("the argument"):
        raise UsageError(
            f"{program.settings['ckpt_path'].source}: a first run has no such checkpoint, and Lightning would refuse to"
            " start. Leave the line out: a requeued job resumes by itself."
        )
    kept = [word for word in command if word != "--ckpt_path=hpc"]
    # From the end, so that what is deleted does not shift what is still to be looked at.
    for position in range(len(kept) - 1, 0, -1):
        if kept[position - 1 : position + 1] == ["--ckpt_path", "hpc"]:
            del kept[position - 1 : position + 1]
    return kept


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


def _check_setup(job: SlurmJob, folder: Path) -> None:
    if job.setup is not None and not (folder / job.setup).is_file():
        raise UsageError(f"--setup {job.setup}: there is no such file in {folder}.")


def _print(as_json: bool, text: str, value: dict[str, Any]) -> int:
    print(json.dumps(value) if as_json else text.rstrip("\n"))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
