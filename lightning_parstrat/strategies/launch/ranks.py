"""The ranks of a training: checks how many were started, joins them, and names those that are missing."""

import logging
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parstrat._namespaces import PACKAGES
from lightning_parstrat.core.argument_names import arguments_of, refuse
from lightning_parstrat.core.policy import WaitPolicy
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import wait_for_all
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import (
    Liveness,
    begin_liveness,
    ends_collectives,
    is_of_a_collective,
    names_of,
)
from lightning_parstrat.distributed.comm.module_states import check_whole
from lightning_parstrat.distributed.comm.open_files import allow_open_files, files_needed
from lightning_parstrat.distributed.comm.process_groups import (
    abort_nccl,
    connections_on_demand,
    control_group,
    default_backend,
    world_size,
)
from lightning_parstrat.distributed.torch_compat import nccl_backends
from lightning_parstrat.strategies.launch.elastic import (
    StartedLauncher,
    believe_started,
    connect_started,
    started_ranks,
)
from lightning_parstrat.strategies.launch.waits import Waits, progress_of
from lightning_parstrat.strategies.lightning_compat import SubprocessScriptLauncher, trainer_of

log = logging.getLogger(__name__)

_ENDED = "ended its training"


class RanksStrategy(DDPStrategy):
    """DDP that takes its ranks from the launcher, and names those that are missing or late.

    Args:
        warn_after_seconds: After how many seconds in which it makes no progress a rank that waits for others says so,
            in one line: in which call or hook, and which ranks have not come and where those are. ``None`` says nothing
            before the ``timeout``.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    @property
    @abstractmethod
    def flag(self) -> str:
        """The name it is registered under, with which messages begin."""

    _takes_shards: ClassVar[bool] = False
    """Whether a module may come with parameters in shards."""

    _not_copied: ClassVar[frozenset[str]] = frozenset({"_known_liveness", "_known_messages", "_waits"})
    """Attributes that belong to one training and its ranks, and are None outside of it."""

    def __init__(self, warn_after_seconds: float | None = 15.0, **kwargs: Any) -> None:
        self._wait_policy = WaitPolicy(warn_after_seconds=warn_after_seconds)
        self._known_liveness: Liveness | None = None
        self._known_messages: ControlMessages | None = None
        self._waits: Waits | None = None
        self._ended = _ENDED
        self._has_aborted = False
        self._hook_seen = ""
        super().__init__(**kwargs)

    @override
    def __repr__(self) -> str:
        """Says whose Trainer takes it: Lightning shows this where it refuses what is no strategy of its own."""
        own = DDPStrategy.__module__.partition(".strategies.")[0]
        (other,) = PACKAGES.keys() - {own}
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith(f"{PACKAGES[own]}."))
        hint = f"; for {other}, write `from {PACKAGES[other]} import {name}`" if other in sys.modules else ""
        return f"<{type(self).__name__} for the Trainer of {own}{hint}>"

    @classmethod
    def known_arguments(cls) -> list[str]:
        """The names of all arguments it takes, those of its base classes and of what it wraps the module in as well."""
        return arguments_of((*cls.__mro__, DistributedDataParallel))

    @override
    def __getstate__(self) -> dict[str, Any]:
        """For programs that copy or pickle a trainer: process groups, and what knows them, stay where they are."""
        state: dict[str, Any] = super().__getstate__()
        return {name: None if name in self._not_copied else value for name, value in state.items()}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers nothing: the names are registered by :mod:`lightning_parstrat.strategies.registry`."""

    @override
    def _configure_launcher(self) -> None:
        """Looks at what torchelastic has started, before anything depends on the number of ranks.

        The Trainer calls this within ``Trainer()``, once the numbers of nodes and devices are known.
        """
        started = started_ranks(self.cluster_environment)
        if started is not None:
            believe_started(self, started)
        super()._configure_launcher()
        if started is not None and isinstance(self._launcher, SubprocessScriptLauncher):
            self._launcher = StartedLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Among how many ranks a sampler splits the data, and which of them this rank is."""
        kwargs = super().distributed_sampler_kwargs
        if started_ranks(self.cluster_environment) is not None:
            # Lightning multiplies the nodes by this node's devices, which is wrong where nodes have different numbers.
            kwargs["num_replicas"] = self.world_size
        return kwargs

    @override
    def setup_distributed(self) -> None:
        """Joins the process group, checks its size, and agrees on where ranks report after a fault. Collective.

        Raises:
            MisconfigurationException: The process group has another number of ranks than the Trainer asks for.
        """
        allow_open_files(files_needed(self.world_size, self.root_device.type == "cpu"))
        backend = self.process_group_backend or default_backend(self.root_device)
        connect_started(self, backend, self._timeout)
        with connections_on_demand(self.world_size):
            super().setup_distributed()
        joined = world_size()
        if joined != self.world_size:
            raise MisconfigurationException(
                f"The process group has {counted(joined, 'rank')}, but the Trainer asks for {self.world_size}"
                f" (num_nodes={self.num_nodes} times {counted(self.num_processes, 'device')}). Launch as many processes"
                " as `num_nodes * devices`, or correct these two arguments."
            )
        self._ended, self._has_aborted = _ENDED, False
        # For as long as that takes, a name that needs no agreement.
        self._known_liveness = Liveness("set-up")
        self._known_liveness = begin_liveness(self.broadcast(uuid.uuid4().hex))
        warn_after = self._wait_policy.warn_after_seconds
        if warn_after is not None and self.world_size > 1:
            name, rank = self._known_liveness.name, self.global_rank
            self._waits = Waits(name, self.flag, rank, self.world_size, warn_after, self._progress)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets up what Lightning does, of a module that is whole. Collective.

        Raises:
            ValueError: Its parameters are in shards.
        """
        if not self._takes_shards:
            check_whole(self._training_module, self.flag)
        super().setup(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Says which ranks are missing or late, if that may be the cause. Not collective: one rank alone may do it."""
        super().on_exception(exception)
        self._give_up(exception)

    def _give_up(self, exception: BaseException) -> None:
        """Does so once, before a callback waits for a device; ends what devices do if collectives cannot complete.

        After another rank's exception this rank's GPU waits in NCCL, and whoever reads from it waits, too. An exception
        of this rank's own is another matter: the others launch all that this rank has launched, and the program may
        catch the exception and go on.
        """
        if self._ended != _ENDED:
            return
        self._ended = f"ended its training by {type(exception).__name__}"
        among_ranks = self._has_ranks and self.world_size > 1
        if among_ranks and isinstance(exception, Exception) and nccl_backends():
            # Lightning says it only when it has moved everything to the host.
            log.error(f"{self.flag}, rank {self.global_rank}: the training ends by this exception:", exc_info=exception)
        if self._waits is not None:
            self._waits.explain(exception)
        missing: list[int] = []
        if among_ranks and is_of_a_collective(exception):
            missing = self._liveness.missing("exception")
            if missing:
                message = f"{names_of(missing).capitalize()} did not answer: ended, or stuck elsewhere."
                log.error(f"{self.flag}, rank {self.global_rank}: {message}")
                # Python 3.10 has no notes.
                if hasattr(exception, "add_note"):
                    exception.add_note(message)
        if missing or ends_collectives(exception):
            self._has_aborted = abort_nccl()

    def _out_of_reach(self) -> list[int]:
        """The ranks that a save does without, after an exception that may be one rank's alone. Collective then."""
        if not self._is_interrupted or self.world_size == 1:
            return []
        others = [rank for rank in range(self.world_size) if rank != self.global_rank]
        return self._liveness.missing("save after an exception") or (others if self._has_aborted else [])

    @override
    def teardown(self) -> None:
        """Tells ranks that wait for this one that it has ended."""
        if self._known_messages is not None:
            self._known_messages.close()
            self._known_messages = None
        if self._waits is not None:
            self._waits.end(self._ended)
            self._waits = None
        self._ended = _ENDED
        super().teardown()

    def _progress(self) -> tuple[str, str]:
        """How far the training has come, and which hook runs, or has raised. Any thread."""
        position, hook = progress_of(self.lightning_module)
        if hook != "on_exception":
            self._hook_seen = hook
        return position, self._hook_seen

    def _wait_for_all(self) -> None:
        if self.world_size > 1:
            wait_for_all(self._control)

    @property
    def _is_interrupted(self) -> bool:
        trainer = trainer_of(self._training_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _has_ranks(self) -> bool:
        """Whether this process has joined others."""
        return self._known_liveness is not None

    @property
    def _liveness(self) -> Liveness:
        if self._known_liveness is None:
            raise AssertionError("ranks were asked for that have not been set up")
        return self._known_liveness

    @property
    def _training_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise AssertionError("the strategy was used before a module was connected to it")
        return self.lightning_module

    @property
    def _control(self) -> Collectives:
        return make_collectives(control_group(self._timeout), torch.device("cpu"))

    @property
    def _messages(self) -> ControlMessages:
        """The control messages of this training. Collective where there are none yet."""
        if self._known_messages is None:
            self._known_messages = ControlMessages(self._control)
        return self._known_messages


class WrapperlessDDPStrategy(DDPStrategy, ABC):
    """DDP's processes, samplers and devices, without torch's DDP wrapper.

    Of the wrapper's arguments it takes those that change no result, so that a program can put it in the place of
    ``DDPStrategy``, and says that they are not needed. Those that would change results are refused.

    Args:
        find_unused_parameters: Not needed: parameters without a gradient are found in every backward.
        static_graph: Not needed: nothing is lost where the graph changes, nor gained where it does not.
        gradient_as_bucket_view: Not needed: gradients that are shown lie in the buckets anyway.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: How ranks find each other; by default detected.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: Set by the Trainer's ``precision``.
        process_group_backend: Backend of the process group, such as ``"nccl"`` or ``"gloo"``; by default the one that
            suits the device.
        timeout: How long a collective may take before the run ends with an error.
        start_method: How the processes are launched.
        **unknown: Refused.

    Raises:
        TypeError: It has no such argument; the message says what stands for it.
    """

    @property
    @abstractmethod
    def flag(self) -> str:
        """The name it is registered under, with which messages begin."""

    known_arguments: Callable[[], list[str]]
    """Of :class:`RanksStrategy`."""

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **unknown: Any,
    ) -> None:
        if unknown:
            refuse(type(self), unknown, self.known_arguments())
        needless = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        given = {name: value for name, value in needless.items() if value is not None}
        if given:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            rank_zero_info(f"{self.flag}: {shown} is not needed and has no effect: there is no DDP wrapper.")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            # For whoever asks what a strategy was given.
            **given,
        )
