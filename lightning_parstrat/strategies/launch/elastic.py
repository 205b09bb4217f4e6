"""Under torchrun the ranks that there are count, not those that the Trainer was told of.

torchrun starts a training again with fewer ranks when it has lost a node, and with more when one has come. The program
stays as it is, ``devices`` and ``num_nodes`` included. Lightning would refuse to go on, or, where only some nodes have
fewer ranks, share out the data among ranks that are not there; and torch would have them wait for ranks that are gone.
"""

import os
from collections.abc import Callable
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


class ElasticStrategy(DDPStrategy):
    """DDP of as many ranks as torchelastic has started. Under every other launcher nothing changes."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Among how many ranks a sampler splits the data, and which of them this is."""
        kwargs = super().distributed_sampler_kwargs
        if started_ranks(self.cluster_environment) is not None:
            kwargs["num_replicas"] = self.world_size
        return kwargs

    @override
    def setup_distributed(self) -> None:
        """Joins the ranks of this start, over a store in which those of earlier ones have left nothing. Collective."""
        environment = self.cluster_environment
        starts_over = started_ranks(environment) is not None and os.environ.get(_AGENT_HAS_STORE) == str(True)
        if starts_over and not is_initialized():
            timeout = {} if self._timeout is None else {"timeout": self._timeout}
            store = connect_agent_store(
                environment.main_address, environment.main_port, self.global_rank, self.world_size, **timeout
            )
            device = None if self.root_device.type == "cpu" else self.root_device
            backend = self._get_process_group_backend()
            join_over_store(environment, backend, store, device, self._timeout)
        super().setup_distributed()

    @override
    def _configure_launcher(self) -> None:
        """The Trainer calls this when all that it was told is set, and before anybody asks how many ranks there are."""
        started = started_ranks(self.cluster_environment)
        if started is not None:
            self._believe(started)
        super()._configure_launcher()
        if started is not None and isinstance(self._launcher, SubprocessScriptLauncher):
            self._launcher = _StartedLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _believe(self, started: StartedRanks) -> None:
        devices = self.parallel_devices or []
        if started.on_this_node > len(devices):
            raise MisconfigurationException(
                f"torchrun has started {started.on_this_node} ranks on this node, but the Trainer has"
                f" {len(devices)} devices for them (`devices`), and each rank needs its own. Start at most"
                f" {len(devices)} by `--nproc-per-node`, or give the Trainer `devices={started.on_this_node}`."
            )
        told = self.num_nodes * self.num_processes
        if told != started.ranks:
            rank_zero_warn(
                f"The Trainer was told of {told} ranks (num_nodes={self.num_nodes} times {self.num_processes} devices),"
                f" but torchrun has started {started.ranks}, and that number counts: a global batch is that of"
                f" {started.ranks} ranks instead of {told}, and the steps of an epoch change with it."
            )
        self.num_nodes = started.nodes
        self.parallel_devices = devices[: started.on_this_node]


class _StartedLauncher(SubprocessScriptLauncher):
    """Calls the function in processes that torchelastic has started, as many as they may be."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls it without Lightning's own check of the number of ranks; one of the user's environment holds."""
        environment = self.cluster_environment
        if type(environment).validate_settings is not TorchElasticEnvironment.validate_settings:
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        share_threads(self.num_processes)
        return function(*args, **kwargs)
