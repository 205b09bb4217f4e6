"""A Slurm job must be of the size that the Trainer was told of; the error has the lines to change."""

import os
from collections.abc import Mapping

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_job_size(environment: ClusterEnvironment | None, num_nodes: int, devices: int) -> None:
    """Refuses a Slurm job of another size than the Trainer was told of. Not collective.

    Raises:
        MisconfigurationException: It is; the message has the lines of the job file to change.
    """
    # What users derive from it may look for its size elsewhere.
    if type(environment) is SLURMEnvironment and environment.detect():
        wrong = wrong_job_size(os.environ, num_nodes, devices)
        if wrong is not None:
            raise MisconfigurationException(wrong)


def wrong_job_size(variables: Mapping[str, str], num_nodes: int, devices: int) -> str | None:
    """What is wrong with the size of a Slurm job, and the lines of the job file that set it right.

    Args:
        variables: The environment of a task. Only what Slurm sets in it is compared.
        num_nodes: What the Trainer was told of.
        devices: Of a node; each has a task of its own.

    Returns:
        The message, or None where the job is as the Trainer was told, so far as Slurm says.
    """
    nodes, tasks, per_node = (_count(variables, name) for name in ("NNODES", "NTASKS", "NTASKS_PER_NODE"))
    ranks = num_nodes * devices
    lines = [] if nodes in (None, num_nodes) else [f"`#SBATCH --nodes={num_nodes}`"]
    # Several tasks without a number per node may be placed unevenly.
    placed = tasks is None or tasks == ranks == 1 if per_node is None else per_node == devices
    complete = tasks in (None, ranks) or nodes not in (None, num_nodes)
    if not (placed and complete):
        instead = " instead of `--ntasks`" if per_node in (None, devices) else ""
        lines.append(f"`#SBATCH --ntasks-per-node={devices}`{instead}")
    if not lines:
        return None
    found = {"nodes": nodes, "ntasks": tasks, "ntasks-per-node": per_node}
    given = [f"--{name}={count}" for name, count in found.items() if count is not None]
    given += [] if per_node else ["no --ntasks-per-node"]
    return (
        f"The Trainer was told of num_nodes={num_nodes} and devices={devices}: {devices} tasks on each node. This Slurm"
        f" job has {', '.join(given)}. In the job file, write {' and '.join(lines)}"
        f" (srun takes it from there).{_other_way_out(nodes or 1, tasks, ranks)}"
    )


def _count(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(f"SLURM_{name}", "")
    return int(value) if value.isdecimal() else None


def _other_way_out(nodes: int, tasks: int | None, ranks: int) -> str:
    """What the Trainer could be told instead, where the job has another number of tasks."""
    if tasks in (None, ranks):
        return ""
    if tasks % nodes:
        return f" {tasks} tasks cannot be divided evenly among {nodes} nodes."
    return f" If the job is to stay as it is, tell the Trainer of num_nodes={nodes} and devices={tasks // nodes}."
