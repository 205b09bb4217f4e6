"""The ranks of a training: checks how many were started, joins them, and names those that are missing."""

import logging
import uuid
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parstrat.core.argument_names import refuse
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
from lightning_parstrat.distributed.comm.open_files import allow_open_files, files_needed
from lightning_parstrat.distributed.comm.process_groups import (
    ProcessGroups,
    abort_nccl,
    checkpoint_group,
    connections_on_demand,
    control_group,
    default_backend,
    process_groups,
    world_size,
)
from lightning_parstrat.distributed.torch_compat import nccl_backends
from lightning_parstrat.strategies.launch.elastic import connect_started
from lightning_parstrat.strategies.launch.waits import Waits, progress_of
from lightning_parstrat.strategies.lightning_compat import trainer_of
from lightning_parstrat.strategies.parts import Part

log = logging.getLogger(__name__)

_ENDED = "ended its training"


class Ranks(Part):
    """The ranks that the launcher has started, what they agree by, and which of them are missing or late.

    Args:
        strategy: The strategy it is a part of.
        flag: The strategy's name, with which messages begin.
        timeout: How long a collective may take; None leaves the backend's default.
        warn_after_seconds: After how many seconds without progress a rank says for whom it waits; None: never.
        module_called: The submodule that is being called, for whoever waits for this rank; empty if it is not known.
    """

    _of_one_training = frozenset({"_known_liveness", "_known_messages", "_waits"})

    def __init__(
        self,
        strategy: DDPStrategy,
        flag: str,
        timeout: timedelta | None,
        warn_after_seconds: float | None,
        module_called: Callable[[], str],
    ) -> None:
        super().__init__(strategy)
        self.flag = flag
        self._timeout = timeout
        self._policy = WaitPolicy(warn_after_seconds=warn_after_seconds)
        self._module_called = module_called
        self._known_liveness: Liveness | None = None
        self._known_messages: ControlMessages | None = None
        self._waits: Waits | None = None
        self._ended = _ENDED
        self._has_aborted = False
        self._hook_seen = ""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._strategy.global_rank

    @property
    def number(self) -> int:
        """How many there are."""
        return self._strategy.world_size

    @property
    def have_joined(self) -> bool:
        """Whether this process has joined others."""
        return self._known_liveness is not None

    @property
    def groups(self) -> ProcessGroups:
        """The process groups of this training. Collective on first use."""
        return process_groups(self._timeout)

    @property
    def control(self) -> Collectives:
        """Carries small agreements. Collective on first use."""
        return make_collectives(control_group(self._timeout), torch.device("cpu"))

    @property
    def of_checkpoints(self) -> Any:
        """The group by which sharded checkpoints are agreed on. Collective on first use."""
        return checkpoint_group(self._timeout)

    @property
    def messages(self) -> ControlMessages:
        """The control messages of this training. Collective where there are none yet."""
        if self._known_messages is None:
            self._known_messages = ControlMessages(self.control)
        return self._known_messages

    @property
    def liveness(self) -> Liveness:
        """Where ranks report after a fault."""
        if self._known_liveness is None:
            raise AssertionError("ranks were asked for that have not been set up")
        return self._known_liveness

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception, which may be this rank's alone, is ending the training."""
        trainer = trainer_of(self._module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def wait_for_all(self) -> None:
        """Returns when all ranks have come here. Collective."""
        if self.number > 1:
            wait_for_all(self.control)

    def join(self, by_lightning: Callable[[], None]) -> None:
        """Joins the process group, checks its size, and agrees on where ranks report after a fault. Collective.

        Args:
            by_lightning: Does what Lightning's strategy does.

        Raises:
            MisconfigurationException: The process group has another number of ranks than the Trainer asks for.
        """
        strategy, device = self._strategy, self._strategy.root_device
        allow_open_files(files_needed(self.number, device.type == "cpu"))
        connect_started(strategy, strategy.process_group_backend or default_backend(device), self._timeout)
        with connections_on_demand(self.number):
            by_lightning()
        joined = world_size()
        if joined != self.number:
            raise MisconfigurationException(
                f"The process group has {counted(joined, 'rank')}, but the Trainer asks for {self.number}"
                f" (num_nodes={strategy.num_nodes} times {counted(strategy.num_processes, 'device')}). Launch as many"
                " processes as `num_nodes * devices`, or correct these two arguments."
            )
        self._ended, self._has_aborted = _ENDED, False
        # For as long as that takes, a name that needs no agreement.
        self._known_liveness = Liveness("set-up")
        self._known_liveness = begin_liveness(strategy.broadcast(uuid.uuid4().hex))
        warn_after = self._policy.warn_after_seconds
        if warn_after is not None and self.number > 1:
            name = self._known_liveness.name
            self._waits = Waits(name, self.flag, self.rank, self.number, warn_after, self._progress)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Says which ranks are missing or late, if that may be the cause. Not collective: one rank alone may do it."""
        self.give_up(exception)

    def give_up(self, exception: BaseException) -> None:
        """Does so once, before a callback waits for a device; ends what devices do if collectives cannot complete.

        After another rank's exception this rank's GPU waits in NCCL, and whoever reads from it waits, too. An exception
        of this rank's own is another matter: the others launch all that this rank has launched, and the program may
        catch the exception and go on.
        """
        if self._ended != _ENDED:
            return
        self._ended = f"ended its training by {type(exception).__name__}"
        among_ranks = self.have_joined and self.number > 1
        if among_ranks and isinstance(exception, Exception) and nccl_backends():
            # Lightning says it only when it has moved everything to the host.
            log.error(f"{self.flag}, rank {self.rank}: the training ends by this exception:", exc_info=exception)
        if self._waits is not None:
            self._waits.explain(exception)
        missing: list[int] = []
        if among_ranks and is_of_a_collective(exception):
            missing = self.liveness.missing("exception")
            if missing:
                message = f"{names_of(missing).capitalize()} did not answer: ended, or stuck elsewhere."
                log.error(f"{self.flag}, rank {self.rank}: {message}")
                # Python 3.10 has no notes.
                if hasattr(exception, "add_note"):
                    exception.add_note(message)
        if missing or ends_collectives(exception):
            self._has_aborted = abort_nccl()

    def out_of_reach(self) -> list[int]:
        """The ranks that a save does without, after an exception that may be one rank's alone. Collective then."""
        if not self.is_interrupted or self.number == 1:
            return []
        others = [rank for rank in range(self.number) if rank != self.rank]
        return self.liveness.missing("save after an exception") or (others if self._has_aborted else [])

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

    def _progress(self) -> tuple[str, str]:
        """How far the training has come, and which hook runs, or has raised. Any thread."""
        position, hook = progress_of(self._strategy.lightning_module)
        if hook != "on_exception":
            self._hook_seen = hook
        called = self._module_called()
        return f"{position}, module {called}" if called else position, self._hook_seen


class WrapperlessDDPStrategy(DDPStrategy):
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
    """Of :class:`~lightning_parstrat.strategies.base.ComposedStrategy`."""

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
