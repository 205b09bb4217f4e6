"""Under torchrun, the number of started ranks counts, not the number that the Trainer asks for.

If a node is lost, torchrun restarts a training with fewer ranks. If a node joins, it restarts with more. The program
does not change, nor do its ``devices`` and ``num_nodes``. Lightning would refuse to continue. If only some nodes have
fewer ranks, it would split the data among ranks that do not exist. And torch would wait for ranks that have ended.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agent_store import connect_agent_store, join_over_store
from lightning_parstrat.distributed.comm.process_groups import is_initialized
from lightning_parstrat.strategies.lightning_compat import SubprocessScriptLauncher

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
    goes_by_torchelastic = isinstance(environment, TorchElasticEnvironment) and TorchElasticEnvironment.detect()
    # Programs that set torchelastic's variables themselves, for Lightning to detect, do not set these two.
    if not goes_by_torchelastic or not {_NODES, _LOCAL_RANKS} <= os.environ.keys():
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
    given = {} if timeout is None else {"timeout": timeout}
    rank, ranks = strategy.global_rank, strategy.world_size
    store = connect_agent_store(environment.main_address, environment.main_port, rank, ranks, **given)
    # The same as in Lightning's own call: NCCL then knows its device, and connects at once.
    device = None if strategy.root_device.type == "cpu" else strategy.root_device
    join_over_store(store, backend, rank, ranks, device, timeout)


def believe_started(strategy: DDPStrategy, started: StartedRanks) -> None:
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
    told = strategy.num_nodes * strategy.num_processes
    if told != started.ranks:
        rank_zero_warn(
            f"The Trainer asks for {counted(told, 'rank')} (num_nodes={strategy.num_nodes} times"
            f" {counted(strategy.num_processes, 'device')}), but torchrun has started {started.ranks}, and that number"
            f" counts: a global batch is that of {counted(started.ranks, 'rank')} instead of {told}, and the number of"
            " steps in an epoch changes with it."
        )
    strategy.num_nodes = started.nodes
    strategy.parallel_devices = devices[: started.on_this_node]


class StartedLauncher(SubprocessScriptLauncher):
    """Calls the function in the processes that torchelastic has started, without a check of their number."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls it without Lightning's check of the number of ranks. A check of the user's own environment applies."""
        environment = self.cluster_environment
        if type(environment).validate_settings is not TorchElasticEnvironment.validate_settings:
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # The same as in Lightning. torchrun sets the variable if it starts several ranks on a node.
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, torch.get_num_threads() // self.num_processes)
            torch.set_num_threads(threads)
            os.environ["OMP_NUM_THREADS"] = str(threads)
        return function(*args, **kwargs)
