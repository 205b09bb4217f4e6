"""Checks that a Slurm job has the size that the Trainer asks for; the error names the lines to change."""

import os
from collections.abc import Mapping

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parstrat.core.wording import counted


def check_job_size(environment: ClusterEnvironment | None, num_nodes: int, devices: int) -> None:
    """Refuses a Slurm job of another size than the Trainer asks for. Not collective.

    Raises:
        MisconfigurationException: The sizes differ; the message has the lines of the job file to change.
    """
    # Slurm gives every job a number: variables without one were set by hand.
    in_job = "SLURM_JOB_ID" in os.environ
    # The exact class: a user's subclass may take its size from elsewhere.
    if in_job and type(environment) is SLURMEnvironment and environment.detect():
        wrong = wrong_job_size(os.environ, num_nodes, devices)
        if wrong is not None:
            raise MisconfigurationException(wrong)


def wrong_job_size(variables: Mapping[str, str], num_nodes: int, devices: int) -> str | None:
    """What is wrong with the size of a Slurm job, and which lines of the job file correct it.

    Args:
        variables: The environment of a task. Only variables that Slurm has set are compared.
        num_nodes: The Trainer's.
        devices: The Trainer's, per node; each has a task of its own.

    Returns:
        The message; None where the job has the right size, as far as Slurm's variables show.
    """
    nodes, tasks, per_node = (_count(variables, name) for name in ("NNODES", "NTASKS", "NTASKS_PER_NODE"))
    ranks = num_nodes * devices
    lines = [] if nodes in (None, num_nodes) else [f"`#SBATCH --nodes={num_nodes}`"]
    # Without a number per node, Slurm may place several tasks unevenly.
    placed = tasks is None or tasks == ranks == 1 if per_node is None else per_node == devices
    # With another number of nodes the total must differ, too: changing the nodes may be all that is needed.
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
        f"The Trainer asks for num_nodes={num_nodes} and devices={devices}: {counted(devices, 'task')} on each node."
        f" This Slurm job has {', '.join(given)}. In the job file, write {' and '.join(lines)}"
        f" (srun takes it from there).{_other_way_out(nodes or 1, tasks, ranks)}"
    )


def _count(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(f"SLURM_{name}", "")
    return int(value) if value.isdecimal() else None


def _other_way_out(nodes: int, tasks: int | None, ranks: int) -> str:
    """How to change the Trainer instead, where the job has another number of tasks."""
    if tasks in (None, ranks):
        return ""
    if tasks % nodes:
        return f" {counted(tasks, 'task')} cannot be divided evenly among {nodes} nodes."
    return f" To keep the job as it is, give the Trainer num_nodes={nodes} and devices={tasks // nodes}."
