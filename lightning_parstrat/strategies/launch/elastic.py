"""Under torchrun the ranks that there are count, not those that the Trainer was told of.

torchrun starts a training again with fewer ranks when it has lost a node, and with more when one has come. The program
stays as it is, ``devices`` and ``num_nodes`` included. Lightning would refuse to go on, or, where only some nodes have
fewer ranks, share out the data among ranks that are not there; and torch would have them wait for ranks that are gone.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parstrat.distributed.comm.agent_store import connect_agent_store
from lightning_parstrat.distributed.comm.process_groups import is_initialized
from lightning_parstrat.strategies.lightning_compat import SubprocessScriptLauncher, join_over_store, share_threads

_NODES, _LOCAL_RANKS = "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"
_AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class StartedRanks(NamedTuple):
    """What torchelastic has started, this time. Nodes need not have equally many ranks."""

    ranks: int
    nodes: int
    on_this_node: int


def started_ranks(environment: ClusterEnvironment | None) -> StartedRanks | None:
    """What torchelastic has started; None where it has not, or where it is not what the Trainer goes by.

    Args:
        environment: That of the strategy, detected or the user's own.
    """
    goes_by_torchelastic = isinstance(environment, TorchElasticEnvironment) and TorchElasticEnvironment.detect()
    # Whoever sets the variables by hand, to have Lightning believe in torchelastic, leaves these out.
    if not goes_by_torchelastic or not {_NODES, _LOCAL_RANKS} <= os.environ.keys():
        return None
    return StartedRanks(
        ranks=environment.world_size(), nodes=int(os.environ[_NODES]), on_this_node=int(os.environ[_LOCAL_RANKS])
    )


def connect_started(strategy: DDPStrategy, backend: str, timeout: timedelta | None) -> None:
    """Joins the ranks of this start, over a store in which those of earlier ones have left nothing. Collective.

    Under every other launcher, and where the process group is there already, it does nothing.

    Args:
        strategy: Whose ranks they are.
        backend: Of the process group.
        timeout: Of the process group; None for the backend's default.
    """
    environment = strategy.cluster_environment
    starts_over = started_ranks(environment) is not None and os.environ.get(_AGENT_HAS_STORE) == str(True)
    if not starts_over or is_initialized():
        return
    given = {} if timeout is None else {"timeout": timeout}
    store = connect_agent_store(
        environment.main_address, environment.main_port, strategy.global_rank, strategy.world_size, **given
    )
    device = None if strategy.root_device.type == "cpu" else strategy.root_device
    join_over_store(environment, backend, store, device, timeout)


def believe_started(strategy: DDPStrategy, started: StartedRanks) -> None:
    """Gives the strategy the ranks that were started instead of those that the Trainer was told of. Not collective.

    Raises:
        MisconfigurationException: More were started on this node than there are devices for.
    """
    devices = strategy.parallel_devices or []
    if started.on_this_node > len(devices):
        raise MisconfigurationException(
            f"torchrun has started {started.on_this_node} ranks on this node, but the Trainer has"
            f" {len(devices)} devices for them (`devices`), and each rank needs its own. Start at most"
            f" {len(devices)} by `--nproc-per-node`, or give the Trainer `devices={started.on_this_node}`."
        )
    told = strategy.num_nodes * strategy.num_processes
    if told != started.ranks:
        rank_zero_warn(
            f"The Trainer was told of {told} ranks (num_nodes={strategy.num_nodes} times {strategy.num_processes}"
            f" devices), but torchrun has started {started.ranks}, and that number counts: a global batch is that of"
            f" {started.ranks} ranks instead of {told}, and the steps of an epoch change with it."
        )
    strategy.num_nodes = started.nodes
    strategy.parallel_devices = devices[: started.on_this_node]


class StartedLauncher(SubprocessScriptLauncher):
    """Calls the function in processes that torchelastic has started, as many as they may be."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls it without Lightning's own check of the number of ranks; one of the user's environment holds."""
        environment = self.cluster_environment
        if type(environment).validate_settings is not TorchElasticEnvironment.validate_settings:
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        share_threads(self.num_processes)
        return function(*args, **kwargs)
