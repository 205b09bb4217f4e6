"""``lightning-parstrat doctor``: checks whether a training can run on this machine, or on all ranks of a job."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.first_meeting import backend_here, meet
from lightning_parstrat.distributed.comm.open_files import files_needed, most_open_files

_DESCRIPTION = """
Checks versions, flags, process groups and limits, and lists each check with OK or with what mends it. Alone it starts
two ranks on this machine. Under srun or torchrun all ranks of the job take part, and rank 0 prints what they found.
The exit code is 1 if a check fails.

  lightning-parstrat doctor
  srun lightning-parstrat doctor
"""
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "lightning-parstrat")
_FLAGS = ("ddp_tuned", "zero1_custom", "zero2_custom", "zero3_custom", "pipeline_custom", "auto_custom")
# The program does not mention this package, because torch's plugin mechanism must register the flags.
_PRINT_FLAGS = """
try:
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError:
    from pytorch_lightning.strategies import StrategyRegistry
print(*StrategyRegistry.available_strategies())
"""
_SWITCHES = ("LIGHTNING_PARSTRAT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_SECONDS = 60
_CONNECT = "see the error; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface"


class Check(NamedTuple):
    """The name of a check, its result, and the remedy. The remedy is None if the check passes."""

    name: str
    found: str
    mend: str | None = None


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("--rendezvous", metavar="URL", help="where ranks meet (default: MASTER_ADDR)")
    return parser


def run(arguments: Namespace) -> int:
    """Prints the checks. The exit code is 1 if one of them fails."""
    rank, size = _place(os.environ)
    if size == 1:
        return _as_two_ranks()
    ranks: list[Any] = [{"host": socket.gethostname(), "versions": _versions()}]
    try:
        where = arguments.rendezvous or _meeting_place(os.environ)
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
        ranks = meet(where, rank, size, local_rank, ranks[0], _SECONDS)
        groups = Check("process groups", f"{counted(size, 'rank')} over {backend_here()}")
    except Exception as error:
        groups = Check("process groups", f"{counted(size, 'rank')} could not exchange anything: {error}", _CONNECT)
    if rank != 0:
        return int(groups.mend is not None)
    return _print([_check_versions(ranks), _check_flags(), groups, _check_open_files(size)])


def _print(checks: list[Check]) -> int:
    for one in checks:
        print(f"{'OK' if one.mend is None else 'NOT OK'}  {one.name}: {one.found}")
        print(*([] if one.mend is None else [f"  {one.mend}\n"]), end="")
    return int(any(one.mend for one in checks))


def _as_two_ranks() -> int:
    """Runs the same command in two processes. If they do not end in time, this process prints that check."""
    command = [sys.executable, "-m", "lightning_parstrat.cli.main", "doctor"]
    with tempfile.TemporaryDirectory() as folder:
        # A file instead of a port, because another program may use the port.
        command.append(f"--rendezvous=file://{Path(folder).resolve()}/rendezvous")
        ranks = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
            for rank in range(2)
        ]
        try:
            return max([rank.wait(3 * _SECONDS) for rank in ranks])
        except subprocess.TimeoutExpired:
            found = f"two ranks of this machine did not find each other in {3 * _SECONDS} s"
            return _print([Check("process groups", found, _CONNECT)])
        finally:
            for one in ranks:
                one.kill()


def _place(variables: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and the number of ranks, from torchrun or srun."""
    # torchrun's variables come first: within a Slurm job, several of its ranks share the variables of one task.
    if {"RANK", "WORLD_SIZE"} <= variables.keys():
        return int(variables["RANK"]), int(variables["WORLD_SIZE"])
    # Slurm gives a job's script the same variables as its ranks, except for the variable of a step.
    if "SLURM_STEP_ID" in variables:
        return int(variables["SLURM_PROCID"]), int(variables["SLURM_NTASKS"])
    return 0, 1


def _meeting_place(variables: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return f"tcp://{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    shown = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True).stdout
    # Another port than the training's in a job file of `lightning-parstrat slurm`, because the training may be running.
    return f"tcp://{shown.split()[0]}:{20000 + (int(variables['SLURM_JOB_ID']) + 7919) % 20000}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _check_versions(ranks: list[dict[str, Any]]) -> Check:
    for name in ranks[0]["versions"]:
        by_host = {rank["host"]: rank["versions"][name] for rank in ranks}
        if len(set(by_host.values())) > 1:
            shown = ", ".join(f"{version} on {host}" for host, version in by_host.items())
            return Check("versions", f"{name} differs: {shown}", "install the same on all nodes, or on a shared disk")
    shown = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items() if version != "missing")
    return Check("versions", f"{shown}; on {', '.join(dict.fromkeys(rank['host'] for rank in ranks))}")


def _check_flags() -> Check:
    ran = subprocess.run([sys.executable, "-c", _PRINT_FLAGS], capture_output=True, text=True, check=False)
    missing = [flag for flag in _FLAGS if flag not in ran.stdout.split()]
    if not missing:
        return Check("flags", f"{', '.join(_FLAGS)}")
    switched = [name for name in _SWITCHES if os.environ.get(name) == "0"]
    mend = f"unset {' and '.join(switched)}" if switched else "install lightning-parstrat for this python"
    error = ran.stderr.strip().splitlines()[-1:]
    return Check("flags", f"not registered: {', '.join(error or missing)}", f"{mend}, or `import lightning_parstrat`")


def _check_open_files(ranks: int) -> Check:
    needed, most = files_needed(ranks, on_cpu=backend_here() == "gloo"), most_open_files()
    found = f"{counted(ranks, 'rank')} may need {needed} each; allowed are {'any' if most is None else most}"
    mend = f"ulimit -Hn {needed}, which an administrator sets: LimitNOFILE of slurmd, or limits.conf"
    return Check("open files", found, None if most is None or most >= needed else mend)
