"""Ranks and devices must be as many as the Trainer was told of; in a Slurm job the error has the line to change."""

import os
from collections.abc import Mapping

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_parstrat.distributed.comm.process_groups import world_size


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


class SizedStrategy(DDPStrategy):
    """DDP that refuses, before training, jobs and process groups of another size than the Trainer was told of."""

    @override
    def _configure_launcher(self) -> None:
        """Looks at the Slurm job as soon as the numbers of nodes and devices are known, within ``Trainer()``."""
        environment = self.cluster_environment
        # What users derive from it may look for its size elsewhere.
        if type(environment) is SLURMEnvironment and environment.detect():
            wrong = wrong_job_size(os.environ, self.num_nodes, self.num_processes)
            if wrong is not None:
                raise MisconfigurationException(wrong)
        super()._configure_launcher()

    @override
    def setup_distributed(self) -> None:
        """Joins the process group, and makes sure that it has the ranks the Trainer was told of."""
        super().setup_distributed()
        joined = world_size()
        if joined != self.world_size:
            raise MisconfigurationException(
                f"The process group has {joined} ranks, but the Trainer was told of {self.world_size}"
                f" (num_nodes={self.num_nodes} times {self.num_processes} devices). Launch as many processes as"
                " `num_nodes * devices`, or correct these two arguments."
            )
