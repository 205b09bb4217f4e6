"""Under torchrun, the number of started ranks counts, not the number that the Trainer asks for.

If a node is lost, torchrun restarts a training with fewer ranks. If a node joins, it restarts with more. The program
does not change, nor do its ``devices`` and ``num_nodes``. Lightning would refuse to continue. If only some nodes have
fewer ranks, it would split the data among ranks that do not exist. And torch would wait for ranks that have ended.
"""

import os
from datetime import timedelta
from typing import NamedTuple

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agent_store import join_over_agent_store
from lightning_parstrat.distributed.comm.process_groups import is_initialized

_NODES, _LOCAL_RANKS = "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"
_AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class StartedRanks(NamedTuple):
    """The ranks of torchelastic's current start. Nodes may have different numbers of ranks."""

    ranks: int
    nodes: int
    on_this_node: int


def started_ranks(environment: ClusterEnvironment | None) -> StartedRanks | None:
    """The ranks that torchelastic has started. None if it has not started them, or if the Trainer does not use it.

    Args:
        environment: The strategy's cluster environment, detected or the user's own.
    """
    uses_torchelastic = isinstance(environment, TorchElasticEnvironment) and TorchElasticEnvironment.detect()
    # Programs that set torchelastic's variables themselves, for Lightning to detect, do not set these two.
    if not uses_torchelastic or not {_NODES, _LOCAL_RANKS} <= os.environ.keys():
        return None
    return StartedRanks(
        ranks=environment.world_size(), nodes=int(os.environ[_NODES]), on_this_node=int(os.environ[_LOCAL_RANKS])
    )


def connect_started(strategy: DDPStrategy, backend: str, timeout: timedelta | None) -> None:
    """Joins the ranks of this start, over a store without entries of earlier starts. Collective.

    Does nothing under any other launcher, or if the process group exists already.

    Args:
        strategy: The strategy whose ranks they are.
        backend: Backend of the process group.
        timeout: Timeout of the process group. None for the backend's default.
    """
    environment = strategy.cluster_environment
    # Without the agent's store, each start has a new store, on rank 0. torchelastic writes Python's `True`.
    starts_over = started_ranks(environment) is not None and os.environ.get(_AGENT_HAS_STORE) == str(True)
    if not starts_over or is_initialized():
        return
    rank, ranks = strategy.global_rank, strategy.world_size
    address, port = environment.main_address, environment.main_port
    join_over_agent_store(address, port, rank, ranks, strategy.root_device, backend, timeout)


def adopt_started(strategy: DDPStrategy, started: StartedRanks) -> None:
    """Gives the strategy the number of ranks that were started, instead of the Trainer's number. Not collective.

    Raises:
        MisconfigurationException: More ranks were started on this node than it has devices.
    """
    devices = strategy.parallel_devices or []
    if started.on_this_node > len(devices):
        raise MisconfigurationException(
            f"torchrun has started {counted(started.on_this_node, 'rank')} on this node, but the Trainer has"
            f" {counted(len(devices), 'device')} for them (`devices`), and each rank needs its own. Start at most"
            f" {len(devices)} by `--nproc-per-node`, or give the Trainer `devices={started.on_this_node}`."
        )
    asked = strategy.num_nodes * strategy.num_processes
    if asked != started.ranks:
        rank_zero_warn(
            f"The Trainer asks for {counted(asked, 'rank')} (num_nodes={strategy.num_nodes} times"
            f" {counted(strategy.num_processes, 'device')}), but torchrun has started {started.ranks}. That number"
            f" counts: a global batch is that of {counted(started.ranks, 'rank')}. The number of steps in an epoch"
            " changes with it, unless keep_global_batch=True keeps a checkpoint's."
        )
    strategy.num_nodes = started.nodes
    strategy.parallel_devices = devices[: started.on_this_node]
    environment = strategy.cluster_environment
    # Nodes may have different numbers of ranks. A check of the user's own environment applies.
    if type(environment).validate_settings is TorchElasticEnvironment.validate_settings:
        vars(environment)["validate_settings"] = _allow


def _allow(num_devices: int, num_nodes: int) -> None:
    """Replaces Lightning's check that each node has as many ranks as the first."""
