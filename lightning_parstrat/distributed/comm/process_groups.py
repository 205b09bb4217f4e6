"""The communicators of a training: gradients, parameters and control messages each have their own.

It also records the calls and collectives of this process, for reports of a rank that waits.
"""

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.torch_compat import collectives_launched, nccl_backends


class ProcessGroups(NamedTuple):
    """Gradients, parameters and control messages each have a communicator, so that none queues behind another.

    Lightning uses the default group for its own broadcasts and reductions. ``control`` is always Gloo. The host decides
    on its messages, and so need not wait for a GPU. Gradients and parameters are never in flight together. A backward
    is announced when gathers have been waited for, and a step gathers when reductions have. There are two groups for
    the sake of the broadcast of buffers before a forward. In one group it would queue behind gathers.
    """

    gradients: dist.ProcessGroup
    parameters: dist.ProcessGroup
    control: dist.ProcessGroup


class _Purpose(NamedTuple):
    """The purpose of a group.

    Attributes:
        name: The kind of traffic that it carries.
        timeout: How long a collective may take.
        backend: What carries it. None for that of the default group.
        members: Its ranks, in order. None for all.
    """

    name: str
    timeout: timedelta | None
    backend: str | None = None
    members: tuple[int, ...] | None = None


_PROCESS_GROUPS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Purpose, weakref.ref[dist.ProcessGroup]]]" = (
    weakref.WeakKeyDictionary()
)
"""The groups made for each default group: one that was destroyed and made again has other connections.

torch holds them until they are destroyed. A longer reference would be harmful in a process forked from this one. It
would run a destructor that waits for threads which a fork does not copy.
"""


def process_groups(timeout: timedelta | None = None) -> ProcessGroups:
    """The three process groups over all ranks, made on first use and shared by all later uses in this process.

    Collective: the first call with a given default group and timeout must be made by all ranks.

    Args:
        timeout: How long a collective may take before it raises. None leaves the backend's default.
    """
    return ProcessGroups(
        gradients=_process_group(_Purpose("gradients", timeout)),
        parameters=_process_group(_Purpose("parameters", timeout)),
        control=control_group(timeout),
    )


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group of control messages alone, see :func:`process_groups`. Collective on first use."""
    return _process_group(_Purpose("control", timeout, "gloo"))


def checkpoint_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group of sharded checkpoints. A thread may use it while training continues. Collective on first use."""
    return _process_group(_Purpose("checkpoint", timeout, "gloo"))


def subgroup(group: dist.ProcessGroup, members: Sequence[int], name: str = "") -> dist.ProcessGroup:
    """A group of some of the ranks of one of :func:`process_groups`, made on first use.

    Collective among its members on first use. NCCL makes such groups on all ranks together. So every rank makes equally
    many in the same order, of members that include this rank.

    Args:
        group: The group whose traffic it carries a part of.
        members: Ranks of the group, this one included.
        name: Keeps the group apart from others of the same members, that not all ranks may have.
    """
    if len(members) == dist.get_world_size(group):
        return group
    purpose = next(purpose for purpose, known in _made_groups().items() if known() is group)
    ranks = dist.get_process_group_ranks(group)
    own = tuple(ranks[member] for member in sorted(members))
    return _process_group(purpose._replace(name=purpose.name + name, members=own))


def _made_groups() -> "dict[_Purpose, weakref.ref[dist.ProcessGroup]]":
    world = dist.group.WORLD
    return {} if world is None else _PROCESS_GROUPS.setdefault(world, {})


def _process_group(purpose: _Purpose) -> dist.ProcessGroup:
    _let_worker_threads_finish_at_exit()
    made = _made_groups()
    known = made[purpose]() if purpose in made else None
    if known is not None:
        return known
    connect_on_demand(dist.get_world_size())
    # A group of some ranks is made by these alone.
    is_local = purpose.members is not None
    group: dist.ProcessGroup = dist.new_group(
        purpose.members, timeout=purpose.timeout, backend=purpose.backend, use_local_synchronization=is_local
    )
    made[purpose] = weakref.ref(group)
    return group


_CALLS: list[tuple[str, str]] = []


@contextmanager
def watching(what: str, advice: str = "") -> Iterator[None]:
    """Names a call in which all ranks must take part. A rank that waits in it for others logs that name.

    Nothing is sent.

    Args:
        what: The user's call.
        advice: What to do if some ranks have not made the call.
    """
    _CALLS.append((what, advice))
    try:
        yield
    finally:
        _CALLS.remove((what, advice))


def current_call() -> tuple[str, str]:
    """The innermost named call and its advice. Outside of a named call, both are empty. Any thread."""
    # One read: another thread may leave the call meanwhile.
    return (_CALLS[-1:] or [("", "")])[0]


def launched_by_group() -> dict[str, int]:
    """How many collectives this process has launched by each group, as far as all ranks count the same. Any thread.

    Gloo counts messages between two ranks, too, and each rank has another number of those. The default group runs
    users' collectives, and those of Lightning and DDP. Such messages are rare there. The group of checkpoints is left
    out, as a thread may be using it.
    """
    made = [(purpose.name, known()) for purpose, known in list(_made_groups().items()) if purpose.members is None]
    groups = {name: group for name, group in made if name != "checkpoint" and group is not None}
    launched = {name: small_reductions_of(group) for name, group in groups.items()}
    if dist.group.WORLD is not None:
        groups["default"], launched["default"] = dist.group.WORLD, small_reductions_of(dist.group.WORLD)
    for name, group in groups.items():
        if name == "default" or group.name() != "gloo":
            launched[name] += collectives_launched(group)
    return launched


def abort_nccl() -> bool:
    """Ends what this rank's GPU does for NCCL, or waits for. Returns whether there is NCCL. Not collective.

    Afterwards, NCCL's groups cannot be used. Gloo's can, and the store.
    """
    # All at once: a group that ends frees memory. For that, the GPU must have left the others, too.
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in nccl_backends()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS_TO_ABORT)
    return bool(threads)


_SECONDS_TO_ABORT = 10.0


def connect_on_demand(world_size: int) -> None:
    """From now on, large groups of Gloo's connect two ranks when they first have something to send to each other.

    By default, each group connects every rank with every other one at once. With a few groups of hundreds of ranks,
    that is more than the files that a process may have open. With few ranks it is not, and a connected rank learns at
    once that another has ended. A setting in the environment is kept. Not collective.

    Args:
        world_size: Number of ranks.
    """
    if world_size > _LARGEST_FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


_LARGEST_FULL_MESH = 16


@functools.cache
def _let_worker_threads_finish_at_exit() -> None:
    """Gives Gloo's worker threads some time before the interpreter is torn down.

    A worker frees the tensors of a collective after it was waited for, and needs the GIL for that. If the interpreter
    is already finalizing, Python ends the thread inside a C++ destructor, and the process aborts. A successful run that
    ends right after a collective would then report failure. That was seen in one of five runs on a busy machine,
    without any sharding.
    """
    atexit.register(time.sleep, 0.05)


def world_size() -> int:
    """Number of ranks in the default process group."""
    return dist.get_world_size()


def is_initialized() -> bool:
    """Whether this process is in a default process group."""
    return dist.is_available() and dist.is_initialized()


def default_backend(device: torch.device) -> str:
    """If the user has named no backend, the backend of a process group whose ranks have such devices."""
    return dist.get_default_backend_for_device(device)
