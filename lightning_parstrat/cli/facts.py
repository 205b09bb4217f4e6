"""Facts about a machine or an allocation."""

import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_parstrat.distributed.comm.link_probe import backends
from lightning_parstrat.distributed.comm.open_files import most_open_files

_INTERFACES = Path("/sys/class/net")
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "jsonargparse", "lightning-parstrat")
_VARIABLES = re.compile(r"SLURM_|MASTER_|CUDA_VISIBLE|NCCL_|GLOO_|TORCHELASTIC_|OMP_|(LOCAL_|NODE_)?RANK$|WORLD_SIZE$")


class Interface(NamedTuple):
    """A network interface that is up.

    Attributes:
        name: Its name.
        megabits_per_second: As the driver reports it; None where it does not.
    """

    name: str
    megabits_per_second: int | None


class NodeFacts(NamedTuple):
    """What one node has, as seen from that node.

    Attributes:
        host: Its name.
        versions: By package, and Python's.
        cores: Number of cores that this process may use.
        devices: Names of accelerators that are visible to this process.
        backends: Backends of torch.distributed, with their versions.
        interfaces: Network interfaces that are up, without loopback.
        variables: Environment variables that decide how ranks are started and find each other.
        open_files: How many files a process may have open, at most; None for any number.
    """

    host: str
    versions: dict[str, str]
    cores: int
    devices: list[str]
    backends: list[str]
    interfaces: list[Interface]
    variables: dict[str, str]
    open_files: int | None = None


def facts_of_this_node() -> NodeFacts:
    """The facts about this machine."""
    return NodeFacts(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        # Not the machine's cores: Slurm binds a job to some of them.
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        devices=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        backends=backends(),
        interfaces=_interfaces(),
        variables={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
        open_files=most_open_files(),
    )


def facts_from_json(value: Mapping[str, Any]) -> NodeFacts:
    """The facts that another node has printed as JSON."""
    return NodeFacts(**{**value, "interfaces": [Interface(*one) for one in value["interfaces"]]})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _interfaces() -> list[Interface]:
    found = []
    for path in sorted(_INTERFACES.iterdir()) if _INTERFACES.is_dir() else []:
        if path.name == "lo" or _read(path / "operstate") == "down":
            continue
        speed = _read(path / "speed")
        # Virtual interfaces report -1, and some cannot be asked: neither is a number of digits.
        found.append(Interface(path.name, int(speed) if speed.isdigit() else None))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
