"""``lightning-parstrat doctor``: shows what a machine or allocation has, and what would go wrong in a training."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_parstrat.cli.facts import NodeFacts, facts_from_json, facts_of_this_node
from lightning_parstrat.cli.known_issues import (
    KNOWN_ISSUES,
    Finding,
    Situation,
    find_known_issues,
    program_of,
    read_job_file,
)
from lightning_parstrat.cli.program import Program, read_program
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.link_probe import between_two_processes, read_result
from lightning_parstrat.distributed.comm.open_files import files_needed

_DESCRIPTION = """
Shows what this machine has, measures an all-reduce between two ranks, and looks for known issues in the environment, in
a Slurm job file, and in the configuration of a program. Within a Slurm job it asks all nodes, and measures between two
of them. The exit code is 1 if it finds an issue.

  lightning-parstrat doctor
  lightning-parstrat doctor --job-file train.sbatch
  lightning-parstrat doctor -- python train.py fit --config c.yaml
"""
_SECONDS = 180
_LONGEST_PART = 400


def make_parser() -> ArgumentParser:
    """The command's arguments, without the program."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--job-file", type=str | None, metavar="FILE", help="job file to check, with its program")
    add("--no-measurement", action="store_true", help="do not measure the all-reduce")
    add("--this-node", action="store_true", help="within a Slurm job: this node only, without measurement")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace, program: list[str]) -> int:
    """Prints what it finds; the exit code is 1 if that includes an issue.

    Raises:
        UsageError: A file cannot be read.
    """
    here = facts_of_this_node()
    if arguments.this_node:
        print(in_short_lines(json.dumps(_node_as_json(here))))
        return 0
    everywhere = _in_allocation()
    nodes, problems = _all_nodes() if everywhere else ([here], [])
    findings = [
        *problems,
        *_differences(nodes),
        *_too_few_files(nodes),
        *find_known_issues(_situation(arguments, program, here)),
    ]
    measured: dict[str, Any] | None = None
    if not arguments.no_measurement:
        try:
            measured = _between_nodes(nodes) if everywhere and len(nodes) > 1 else between_two_processes()
        except (RuntimeError, ValueError, KeyError, subprocess.SubprocessError, OSError) as error:
            what = f"Two ranks could not exchange anything: {error}"
            findings.append(Finding("no connection", what, "see the message; GLOO_SOCKET_IFNAME chooses an interface"))
    if arguments.json:
        print(json.dumps(_as_json(nodes, measured, findings)))
    else:
        _print(nodes, measured, findings)
    return 1 if findings else 0


def _situation(arguments: Namespace, command: Sequence[str], here: NodeFacts) -> Situation:
    job_file = None if arguments.job_file is None else read_job_file(Path(arguments.job_file))
    program: Program | None = None
    if command:
        program = read_program(command, Path.cwd(), strict=False)
    elif job_file is not None:
        program = program_of(job_file, Path.cwd())
    return Situation(os.environ, job_file, program, here.interfaces)


def _in_allocation() -> bool:
    """Whether there are nodes to ask, and this process is the one to ask them."""
    # Slurm gives a job's script the same variables as its ranks, except for that of a step.
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ and shutil.which("srun") is not None


def _srun(*arguments: str) -> str:
    # `--overlap`: a training may occupy all that the job has, and without it srun would wait for its end.
    done = subprocess.run(
        ["srun", "--overlap", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:] or f"srun ended with exit code {done.returncode}")
    return done.stdout


def _all_nodes() -> tuple[list[NodeFacts], list[Finding]]:
    count = os.environ.get("SLURM_NNODES", "1")
    # By module: on other nodes the console script need not be in PATH.
    module = "lightning_parstrat.cli.main"
    try:
        printed = _srun(
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            module,
            "doctor",
            "--this-node",
        )
    except (RuntimeError, subprocess.SubprocessError) as error:
        what = f"The nodes of this job did not answer: {error}"
        return [facts_of_this_node()], [Finding("nodes that do not answer", what, "see the message")]
    nodes = [facts_from_json(json.loads(told)) for told in from_short_lines(printed)] or [facts_of_this_node()]
    return sorted(nodes, key=lambda node: node.variables.get("SLURM_NODEID", node.host)), []


def in_short_lines(text: str) -> str:
    """Splits a text into lines so short that srun does not mix them with those of other nodes."""
    # Lines of several nodes arrive in any order: a key puts those of one text together.
    key = uuid.uuid4().hex
    parts = [text[start : start + _LONGEST_PART] for start in range(0, len(text), _LONGEST_PART)]
    return "\n".join(f"parstrat:{key}:{number}:{part}:" for number, part in enumerate(parts))


def from_short_lines(printed: str) -> list[str]:
    """Joins the texts of all nodes; srun may put the number of the task before each line (``--label``)."""
    texts: dict[str, dict[int, str]] = {}
    for key, number, part in re.findall(r"parstrat:([0-9a-f]{32}):(\d+):(.*):$", printed, re.MULTILINE):
        texts.setdefault(key, {})[int(number)] = part
    return ["".join(part for _, part in sorted(parts.items())) for parts in texts.values()]


def _between_nodes(nodes: Sequence[NodeFacts]) -> dict[str, Any]:
    """Measures between the first two nodes of the job."""
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    ).stdout.split()
    # Not the port that a job file of `lightning-parstrat slurm` gives the training, which may be running.
    port = 20000 + (int(os.environ["SLURM_JOB_ID"]) + 7919) % 20000
    return read_result(
        _srun(
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            "lightning_parstrat.distributed.comm.link_probe",
            f"tcp://{hosts[0]}:{port}",
            # Both ranks must choose alike; by the weakest node, since GPUs on one side cannot reduce with CPUs on the
            # other.
            "cuda" if all(node.devices for node in nodes) else "cpu",
        )
    )


def _differences(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Findings for nodes that differ in versions or devices."""
    findings = []
    for name in nodes[0].versions:
        by_version: dict[str, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.versions[name], []).append(node.host)
        if len(by_version) > 1:
            shown = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
            what = f"The nodes have different versions of {name}: {shown}."
            findings.append(Finding("versions", what, "install the same on all nodes, or in a folder that they share"))
    counts = {len(node.devices) for node in nodes}
    if len(counts) > 1:
        shown = "; ".join(f"{len(node.devices)} on {node.host}" for node in nodes)
        what = f"The nodes have different numbers of devices: {shown}."
        findings.append(Finding("devices", what, "#SBATCH --gpus-per-node=<the smallest>, or --exclude nodes"))
    return findings


def _too_few_files(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """A finding where a rank of this job may need more open files than a node allows.

    That is 256 + N + g N for N ranks, where g is 5 between CPUs and 2 between GPUs: see
    :func:`~lightning_parstrat.distributed.comm.open_files.files_needed`.
    """
    told = next((os.environ[name] for name in _NUMBERS_OF_RANKS if os.environ.get(name, "").isdigit()), "1")
    needed = files_needed(int(told), on_cpu=not all(node.devices for node in nodes))
    few = [(node.open_files, node.host) for node in nodes if node.open_files is not None and node.open_files < needed]
    if not few:
        return []
    least, host = min(few)
    what = f"Each of {told} ranks may need {needed} open files, mostly connections, and {host} allows {least}."
    change = f"-> ulimit -Hn {needed}, which an administrator sets: LimitNOFILE of slurmd, or limits.conf"
    return [Finding("open files", what, change)]


_NUMBERS_OF_RANKS = ("SLURM_NTASKS", "WORLD_SIZE")


def _node_as_json(node: NodeFacts) -> dict[str, Any]:
    return {**node._asdict(), "interfaces": [list(one) for one in node.interfaces]}


def _as_json(
    nodes: Sequence[NodeFacts], measured: dict[str, Any] | None, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        "nodes": [_node_as_json(node) for node in nodes],
        "all_reduce": measured,
        "looked_for": list(KNOWN_ISSUES),
        "findings": [finding._asdict() for finding in findings],
    }


def _print(nodes: Sequence[NodeFacts], measured: dict[str, Any] | None, findings: Sequence[Finding]) -> None:
    for node in nodes:
        print(f"{node.host}: {counted(node.cores, 'core')}, {_devices(node)}; {', '.join(node.backends)}")
        for one in node.interfaces:
            speed = "" if one.megabits_per_second is None else f", {one.megabits_per_second} Mbit/s"
            print(f"  interface {one.name}{speed}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in nodes[0].versions.items()))
    for name, value in nodes[0].variables.items():
        print(f"  {name}={value}")
    if measured is not None:
        where = "two nodes" if len(nodes) > 1 else "two processes of this machine"
        megabytes = 1e-6 / measured["seconds_per_byte"]
        print(
            f"all-reduce between {where}, {measured['backend']} on {measured['device']}:"
            f" {measured['latency_seconds'] * 1e6:.0f} us and {megabytes:.0f} MB/s"
        )
    print()
    for finding in findings:
        print(f"{finding.issue}: {finding.what}\n  {finding.change}\n")
    if not findings:
        print(f"No known issues found, among: {', '.join(KNOWN_ISSUES)}.")


def _devices(node: NodeFacts) -> str:
    if not node.devices:
        return "no GPU"
    return ", ".join(f"{node.devices.count(name)} x {name}" for name in dict.fromkeys(node.devices))
