"""The communicators of a training: gradients, parameters and control messages each have their own."""

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.comm.work import Work, as_work
from lightning_parstrat.distributed.torch_compat import nccl_backends


class ProcessGroups(NamedTuple):
    """Gradients, parameters and control messages each have a communicator, so that none queues behind another.

    Lightning uses the default one for its own broadcasts and reductions. ``control`` is always Gloo: what it carries
    is decided by the host, which then need not wait for a GPU. Gradients and parameters are never in flight together: a
    backward is announced when gathers have been waited for, and a step gathers when reductions have. There are two
    groups for the broadcast of buffers before a forward, which in one would queue behind gathers; and messages up
    and down go by either: see :class:`PointToPoint`.
    """

    gradients: dist.ProcessGroup
    parameters: dist.ProcessGroup
    control: dist.ProcessGroup


class _KnownGroup(NamedTuple):
    """A group made for one default group, by weak references.

    torch holds both until they are destroyed. A reference held for longer would, in a process forked from this one,
    run a destructor that waits for threads which a fork does not copy.
    """

    world: "weakref.ref[dist.ProcessGroup]"
    group: "weakref.ref[dist.ProcessGroup]"


class _Purpose(NamedTuple):
    """What a group is for.

    Attributes:
        name: Whose traffic it carries.
        timeout: How long a collective may take.
        members: Its ranks, in order; None for all.
    """

    name: str
    timeout: timedelta | None
    members: tuple[int, ...] | None = None


_PROCESS_GROUPS: dict[_Purpose, _KnownGroup] = {}


def process_groups(timeout: timedelta | None = None) -> ProcessGroups:
    """The three process groups over all ranks, made on first use and shared by all later uses in this process.

    Collective: the first call with a given default group and timeout must be made by all ranks.

    Args:
        timeout: How long a collective may take before it raises; None leaves the backend's default.
    """
    return ProcessGroups(
        gradients=_process_group(_Purpose("gradients", timeout)),
        parameters=_process_group(_Purpose("parameters", timeout)),
        control=control_group(timeout),
    )


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group of control messages alone; see :func:`process_groups`. Collective on first use."""
    control = _process_group(_Purpose("control", timeout), backend="gloo")
    # Its way back: whether there is one must not change while messages are on their way.
    checkpoint_group(timeout)
    return control


def checkpoint_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group of sharded checkpoints: a thread may use it while training goes on. Collective on first use."""
    return _process_group(_Purpose("checkpoint", timeout), backend="gloo")


def subgroup(group: dist.ProcessGroup, members: Sequence[int]) -> dist.ProcessGroup:
    """A group of some of the ranks of one of :func:`process_groups`, made on first use.

    Collective among its members on first use. Every rank makes as many, of members that it is among.

    Args:
        group: Whose traffic it carries a part of.
        members: Ranks, this one among them.
    """
    purpose = next(purpose for purpose, known in _PROCESS_GROUPS.items() if known.group() is group)
    return _process_group(purpose._replace(members=tuple(sorted(members))))


def _process_group(purpose: _Purpose, backend: str | None = None) -> dist.ProcessGroup:
    _let_worker_threads_finish_at_exit()
    world = dist.group.WORLD
    if world is None:
        raise AssertionError("process groups were asked for without a default group")
    known = _PROCESS_GROUPS.get(purpose)
    # A default group that was destroyed and made again has other connections: then all groups are made again.
    if known is not None and known.world() is world:
        existing = known.group()
        if existing is not None:
            return existing
    with connections_on_demand(dist.get_world_size()):
        # A group of some ranks is made by these alone.
        group: dist.ProcessGroup = dist.new_group(
            purpose.members,
            timeout=purpose.timeout,
            backend=backend,
            use_local_synchronization=purpose.members is not None,
        )
    _let_computation_go_first()
    _PROCESS_GROUPS[purpose] = _KnownGroup(weakref.ref(world), weakref.ref(group))
    return group


def known_groups() -> dict[str, dist.ProcessGroup]:
    """Torch's default group, and those for gradients, parameters and control messages that there are by now.

    Not collective; makes none. Checkpoints' is left out, by which a thread may be at work.
    """
    world = dist.group.WORLD
    if world is None:
        return {}
    found = {"default": world}
    for purpose, known in list(_PROCESS_GROUPS.items()):
        group = known.group()
        if purpose.members is None and purpose.name != "checkpoint" and known.world() is world and group is not None:
            found[purpose.name] = group
    return found


def abort_nccl() -> bool:
    """Ends what this rank's GPU does for NCCL, or waits for; returns whether there is NCCL. Not collective.

    NCCL's groups cannot be used after that. Gloo's can, and the store.
    """
    # All at once: one that ends frees memory, for which the GPU must have left the others, too.
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in nccl_backends()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS_TO_ABORT)
    return bool(threads)


_SECONDS_TO_ABORT = 10.0


def _let_computation_go_first() -> None:
    """Has Gloo's reading threads wait for a free processor, or for their turn, instead of interrupting who computes.

    A thread of Gloo's that reads from a connection wakes up while another one, of this process or of its neighbour on
    the node, is about to write, and by default takes its processor. It then asks for the lock that the interrupted
    thread holds, again and again, for as long as the scheduler lets it: some milliseconds, on and off in every step.
    Threads of Linux's batch class do not interrupt others; they have the same share of the processors. Not collective.
    """
    for task in Path("/proc/self/task").glob("*/comm"):
        # It has ended since, or somebody forbids it.
        with suppress(OSError):
            thread = int(task.parent.name)
            if task.read_text().startswith("gloo_") and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


class Tag(IntEnum):
    """What a message between two ranks belongs to: those of one tag arrive in the order in which both launch them.

    All messages of a tag are launched by one thread. How its launches interleave with another's differs by rank.
    """

    CHUNKS = 0
    """Whatever the training's thread sends, and what has no other tag."""
    SUMS_BETWEEN = 1
    """Of nodes, or of shard groups: what is summed up within them goes to others."""
    GATHERS_BETWEEN = 2
    """What comes back from them."""
    SUMS_TO_OWNERS = 3
    """Of parts that differ in length."""
    PARTS_FROM_OWNERS = 4
    """What they have stepped."""
    BARRIER = 5
    """A rank that has not come to a barrier may send other messages meanwhile."""
    SMALL_REDUCTION = 6
    CONTROL_MESSAGE = 7
    """Of the first training. Each later training has the next number."""


class Message(NamedTuple):
    """A tensor that goes to another rank, or comes from it; contiguous, on the host."""

    sends: bool
    tensor: Tensor
    peer: int


class PointToPoint:
    """Messages between two ranks over Gloo, by one connection to the higher of them and by another one to the lower.

    Gloo locks a connection while somebody writes to it, and its thread, which reads, asks again and again until it gets
    the lock. Where both ranks write to one connection at once, as in an exchange, each one's reader so keeps a core
    busy until the write has ended; and if all cores are, the writer does not run. Where nothing arrives by the
    connection that something leaves by, nobody asks. Process groups have connections of their own: two of sharded
    training's take turns, one's messages up by its own connections and down by the other's.

    Args:
        group: What the messages are for; see :func:`process_groups`. Of other groups, messages go by one connection.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        # Weak, so that torch alone keeps the groups alive; see `_KnownGroup`.
        self._upward, self._downward = weakref.ref(group), weakref.ref(_way_back(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """What the messages are for.

        Raises:
            RuntimeError: It has been destroyed.
        """
        return _living(self._upward)

    def launch(self, messages: Sequence[Message], tag: int = Tag.CHUNKS) -> list[Work]:
        """Begins to send and to receive, first what goes to higher ranks, then what goes to lower ones.

        Where two ranks have exchanged nothing yet, one may wait here for the other to come to a message between them.
        So of either way, messages must be in an order in which no ranks wait for each other in a circle: for instance
        in that of the ranks.

        Args:
            messages: They must be neither touched nor freed until they have been waited for.
            tag: A :class:`Tag`, or a number above.

        Returns:
            A work of each message.
        """
        upward = [message for message in messages if message.sends == (message.peer > self.rank)]
        downward = [message for message in messages if message.sends != (message.peer > self.rank)]
        # What `dist.isend` and `dist.irecv` come to, after ten times as many calls of Python.
        return [
            as_work((group.send if sends else group.recv)([tensor], peer, tag))
            for group, way in ((_living(self._upward), upward), (_living(self._downward), downward))
            for sends, tensor, peer in way
        ]


def _living(group: "weakref.ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise RuntimeError("The process group that this training communicated by has been destroyed.")
    return found


def _way_back(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group by which messages to lower ranks go: what it is for itself then goes by ``group``."""
    for purpose, known in _PROCESS_GROUPS.items():
        if known.group() is group and purpose.name in _WAYS_BACK:
            back = _PROCESS_GROUPS.get(purpose._replace(name=_WAYS_BACK[purpose.name]))
            other = None if back is None or back.world() is not known.world() else back.group()
            return other or group
    return group


_WAYS_BACK = {"gradients": "parameters", "parameters": "gradients", "control": "checkpoint", "checkpoint": "control"}
"""Who takes turns with whom: one of them is at work while the other is not, or both send little, as checkpoints do."""


@contextmanager
def connections_on_demand(world_size: int) -> Iterator[None]:
    """Within it, large groups of Gloo's connect two ranks when they first have something to send to each other.

    By default each connects every rank with every other one at once: of a few groups of hundreds of ranks, that is more
    than the files that a process may have open. Of few ranks it is not, and who is connected learns at once that the
    other has ended. What the environment says is left. Not collective.

    Args:
        world_size: Number of ranks.
    """
    if _CONNECT_ON_DEMAND in os.environ or world_size <= _LARGEST_FULL_MESH:
        yield
        return
    os.environ[_CONNECT_ON_DEMAND] = "1"
    try:
        yield
    finally:
        os.environ.pop(_CONNECT_ON_DEMAND, None)


def connect_for_sums(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connects this rank with those that an all-reduce of the group exchanges with. Collective; of 8 bytes a rank.

    Else those of large groups would be connected within the first backward: and a rank that waits there for one that
    has ended since waits for five timeouts, where the end of a connection is noticed at once.

    Args:
        group: The process group.
        device: Of what will be summed.
    """
    size = dist.get_world_size(group)
    if size > 1:
        # As many numbers as Gloo cuts a sum into, so that each rank sends one to its neighbour in the ring.
        dist.all_reduce(torch.zeros(2 * size, device=device), group=group)


_CONNECT_ON_DEMAND = "TORCH_GLOO_LAZY_INIT"
_LARGEST_FULL_MESH = 16


@functools.cache
def _let_worker_threads_finish_at_exit() -> None:
    """Gives Gloo's worker threads some time before the interpreter is torn down.

    A worker frees the tensors of a collective after it was waited for, and needs the GIL for that. If the interpreter
    is already finalizing, Python ends the thread inside a C++ destructor, and the process aborts: a successful run that
    ends right after a collective would report failure (seen in one of five on a busy machine, without any sharding).
    """
    atexit.register(time.sleep, 0.05)


def world_size() -> int:
    """Number of ranks in the default process group."""
    return dist.get_world_size()


def is_initialized() -> bool:
    """Whether this process is in a default process group."""
    return dist.is_available() and dist.is_initialized()


def default_backend(device: torch.device) -> str:
    """The backend of a process group whose ranks have such devices, if the user has named none."""
    return dist.get_default_backend_for_device(device)
