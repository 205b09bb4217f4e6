"""The ranks of a training: checks how many were started, joins them, and names missing ones."""

import atexit
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_parstrat.core.grid import Grid
from lightning_parstrat.core.policy import CommonPolicy
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import all_have_same, wait_for_all
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
    connect_on_demand,
    control_group,
    default_backend,
    is_initialized,
    process_groups,
    subgroup,
)
from lightning_parstrat.distributed.comm.process_groups import (
    world_size as size_of_group,
)
from lightning_parstrat.distributed.torch_compat import nccl_backends
from lightning_parstrat.strategies.launch.elastic import connect_started
from lightning_parstrat.strategies.launch.waits import Waits, progress_of
from lightning_parstrat.strategies.lightning_compat import trainer_of
from lightning_parstrat.strategies.parts import Part

log = logging.getLogger(__name__)

_ENDED = "ended its training"


def _one(_: int) -> int:
    return 1


class Ranks(Part):
    """The ranks that the launcher has started, how they agree, and which of them are missing or late.

    Args:
        strategy: The strategy that it is a part of.
        flag: The strategy's name. Messages begin with it.
        timeout: How long a collective may take. None leaves the backend's default.
        policy: Says after how many seconds without progress a rank logs which ranks it waits for.
        module_called: Returns the submodule that is being called, for logs of other ranks. Empty if it is not known.
    """

    _of_one_training = frozenset({"_liveness", "_known_messages", "_waits"})

    def __init__(
        self,
        strategy: DDPStrategy,
        flag: str,
        timeout: timedelta | None,
        policy: CommonPolicy,
        module_called: Callable[[], str],
    ) -> None:
        super().__init__(strategy)
        self.flag = flag
        self.tensor_parallel_size = 1
        """How many consecutive ranks share tensor-parallel layers, and so have the same data."""
        self.pipeline_size: Callable[[int], int] = _one
        """Returns how many ranks a pipeline has, for a number of all ranks. These have the same data."""
        self.group: Sequence[int] = ()
        """The ranks that train each step with this one, if groups of ranks train alone."""
        self.steps_of_group: Callable[[], int] = int
        """Returns how many steps this rank's group has made."""
        self._timeout = timeout
        self._policy = policy
        self._module_called = module_called
        self._liveness: Any = None
        """Since this process has joined the others, the :class:`Liveness` by which ranks report after a fault."""
        self._known_messages: ControlMessages | None = None
        self._waits: Waits | None = None
        self._ended = _ENDED
        self._has_aborted = False
        self._missing: list[int] = []
        self._hook_seen = ""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._strategy.global_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._strategy.world_size

    @property
    def ranks_of_step(self) -> int:
        """The number of ranks that train each step together."""
        return len(self.group) or self.world_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's data."""
        return self.grid.data_rank(self.rank)

    @property
    def data_ranks(self) -> int:
        """How many ranks have data that differ."""
        return self.grid.data

    @property
    def grid(self) -> Grid:
        """Where each rank lies."""
        ranks = self.world_size
        return Grid(ranks=ranks, pipeline=self.pipeline_size(ranks), tensor=self.tensor_parallel_size)

    @property
    def have_joined(self) -> bool:
        """Whether this process has joined the other ranks."""
        return self._liveness is not None

    @property
    def groups(self) -> ProcessGroups:
        """The process groups of this training. Collective on first use."""
        return process_groups(self._timeout)

    @property
    def data_groups(self) -> ProcessGroups:
        """The process groups of the ranks that do what this one does, on other data, in the same steps.

        Collective on first use.
        """
        ranks = self.group or self.grid.with_other_data(self.rank)
        return ProcessGroups(*(subgroup(group, ranks) for group in self.groups))

    @property
    def control(self) -> Collectives:
        """Collectives for small agreements. Collective on first use."""
        return make_collectives(control_group(self._timeout), torch.device("cpu"))

    @property
    def of_checkpoints(self) -> Any:
        """The group for agreements on sharded checkpoints. Collective on first use."""
        return checkpoint_group(self._timeout)

    @property
    def messages(self) -> ControlMessages:
        """The control messages of the ranks that train together. Collective on first use."""
        if self._known_messages is None:
            control = subgroup(control_group(self._timeout), self.group or range(self.world_size))
            self._known_messages = ControlMessages(make_collectives(control, torch.device("cpu")))
        return self._known_messages

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the training. It may be on this rank alone."""
        trainer = trainer_of(self._module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def wait_for_all(self) -> None:
        """Waits for all ranks. Collective."""
        if self.world_size > 1:
            wait_for_all(self.control)

    def join(self, by_lightning: Callable[[], None]) -> None:
        """Joins the process group, checks its size, and agrees on a name for reports after a fault. Collective.

        Args:
            by_lightning: Joins as Lightning's strategy does.

        Raises:
            MisconfigurationException: The process group has another number of ranks than the Trainer asks for.
        """
        strategy, device = self._strategy, self._strategy.root_device
        allow_open_files(files_needed(self.world_size, device.type == "cpu"))
        connect_started(strategy, strategy.process_group_backend or default_backend(device), self._timeout)
        connect_on_demand(self.world_size)
        by_lightning()
        joined = size_of_group()
        if joined != self.world_size:
            raise MisconfigurationException(
                f"The process group has {counted(joined, 'rank')}, but the Trainer asks for {self.world_size}"
                f" (num_nodes={strategy.num_nodes} times {counted(strategy.num_processes, 'device')}). Launch as many"
                " processes as `num_nodes * devices`, or correct these two arguments. If an earlier training of this"
                " program has left the group, call `torch.distributed.destroy_process_group()` first."
            )
        self._ended, self._has_aborted, self._missing = _ENDED, False, []
        atexit.unregister(abort_nccl)
        # The agreement below may fail: until it ends, a name that needs no agreement.
        self._liveness = Liveness("set-up")
        self._liveness = begin_liveness(strategy.broadcast(uuid.uuid4().hex))
        warn_after = self._policy.stall_warning_seconds
        if warn_after is not None and self.world_size > 1:
            name = self._liveness.name
            self._waits = Waits(name, self.flag, self.rank, self.world_size, warn_after, self._progress)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Logs which ranks are missing or late, if that may be the cause. Not collective: one rank alone may do it."""
        self.give_up(exception)

    def give_up(self, exception: BaseException) -> None:
        """Logs them once, before a callback waits for a device. If collectives cannot complete, it aborts NCCL.

        After another rank's exception this rank's GPU waits in NCCL, and so does code that reads from it. After an
        exception of this rank alone, NCCL is not aborted. The other ranks launch all that this rank has launched, and
        the program may catch the exception and continue.
        """
        if self._ended != _ENDED:
            return
        self._ended = f"ended its training by {type(exception).__name__}"
        among_ranks = self.have_joined and self.world_size > 1
        if among_ranks and isinstance(exception, Exception) and nccl_backends():
            # Lightning logs it later, when it has moved everything to the host.
            log.error(f"{self.flag}, rank {self.rank}: the training ends by this exception:", exc_info=exception)
        if among_ranks and nccl_backends():
            # Otherwise Lightning destroys the groups then, and NCCL waits for what other ranks have not launched.
            atexit.register(abort_nccl)
        missing: list[int] = []
        if among_ranks and is_of_a_collective(exception):
            missing = self._liveness.missing("exception")
            if missing:
                named = [one for one in self._liveness.found if one != self.rank] or missing
                message = (
                    f"{names_of(named).capitalize()} did not answer: ended, stuck elsewhere, or waiting for a rank that"
                    " has ended."
                )
                log.error(f"{self.flag}, rank {self.rank}: {message}")
                # Python 3.10 has no notes.
                if hasattr(exception, "add_note"):
                    exception.add_note(message)
        if missing or ends_collectives(exception):
            self._has_aborted = abort_nccl()

    def out_of_reach(self) -> list[int]:
        """The ranks that a save does without, after an exception that may be on one rank alone. Collective then."""
        if not self.is_interrupted or self.world_size == 1:
            return []
        # Ranks that come later have failed by themselves. Their connections have ended.
        self._missing = self._missing or self._find_missing()
        return self._missing

    @property
    def decides_alone(self) -> bool:
        """Whether no other rank has been joined, or a save after an exception has shown that none takes part."""
        return bool(self._missing) or not is_initialized()

    def _find_missing(self) -> list[int]:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        missing: list[int] = self._liveness.missing("save after an exception")
        if not missing and self.group and not all_have_same(self.steps_of_group(), self.control):
            # Groups that train alone cannot meet after different steps.
            return others
        return missing or (others if self._has_aborted else [])

    @override
    def teardown(self) -> None:
        """Reports to waiting ranks that this rank has ended."""
        if self._known_messages is not None:
            self._known_messages.close()
            self._known_messages = None
        if self._waits is not None:
            self._waits.end(self._ended)
            self._waits = None
        self._ended = _ENDED

    def _progress(self) -> tuple[str, str]:
        """The progress of the training, and the hook that runs or has raised. Any thread."""
        position, hook = progress_of(self._strategy.lightning_module)
        if hook != "on_exception":
            self._hook_seen = hook
        called = self._module_called()
        return f"{position}, module {called}" if called else position, self._hook_seen
