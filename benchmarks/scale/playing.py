"""Has the package play one rank of many: process groups, nodes and clocks are the laboratory's, all else is real.

What is replaced lies below the package or at its public edges: torch's class of Gloo groups, who shares a node,
``make_collectives``, the two operations of ``Collectives``, the thread that follows exchanges, and what owners say of
optimizer state that moves.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.scale.other_ranks import OtherRanks
from benchmarks.scale.played_group import PlayedGroup, PlayedStore, played_broadcast
from benchmarks.scale.recorder import Recorder
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Node, Topology
from lightning_parstrat.distributed.checkpoint import writing
from lightning_parstrat.distributed.checkpoint.pieces import CheckpointPieces
from lightning_parstrat.distributed.comm import agreement, backends, process_groups
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.streams import HostStreams
from lightning_parstrat.distributed.comm.work import ExchangedWork, ExchangeThread, Work
from lightning_parstrat.distributed.zero1 import redistribution, state_parts

Plane = Literal["gloo", "nccl"]


@contextmanager
def playing(
    recorder: Recorder, rank: int, size: int, plane: Plane, ranks_per_node: int = 8, factor: int = 1
) -> Iterator[OtherRanks]:
    """Within it, this process is in a default process group of ``size`` ranks, and everything is written down.

    Args:
        recorder: Writes down.
        rank: Which rank it is.
        size: How many there are.
        plane: What carries gradients and parameters: exchanges between CPUs, or what NCCL is asked for.
        ranks_per_node: How many share a node.
        factor: See :class:`PlayedGroup`.

    Yields:
        What speaks for the other ranks.
    """
    others = OtherRanks(recorder)

    class Group(PlayedGroup):
        def __init__(self, store: object, rank: int, size: int, timeout: timedelta | None = None) -> None:
            super().__init__(recorder, rank, size, factor)

    replaced = [
        mock.patch.object(distributed_c10d, "ProcessGroupGloo", Group),
        mock.patch.object(agreement, "topology_in_order", _in_order(agreement.topology_in_order, ranks_per_node)),
        mock.patch.object(time, "perf_counter", lambda: recorder.seconds),
        mock.patch.object(adam, "adam", _noted_update(recorder, adam.adam, factor)),
        mock.patch.object(ExchangeThread, "run", _at_once(recorder)),
        mock.patch.object(redistribution, "digests_of_owners", _owners_alike(redistribution.digests_of_owners)),
        *_everywhere(agreement.gather_object, others.gather_object),
        *_everywhere(state_parts.tell, others.count_told(state_parts.tell)),
        mock.patch.object(writing, "write_shard", others.write_shard(writing.write_shard)),
        mock.patch.object(CheckpointPieces, "index", others.note_index(CheckpointPieces.index)),
        *following_operations(recorder),
        *naming_groups(recorder, lambda group: group.number),
    ]
    broadcast = played_broadcast(dist.broadcast_object_list, others.note, others.hear)
    spoken = {
        "broadcast_object_list": broadcast,
    }
    for module in (dist, distributed_c10d):
        replaced += [mock.patch.object(module, name, function) for name, function in spoken.items()]
    if plane == "nccl":
        replaced += _everywhere(backends.make_collectives, _native(recorder, backends.make_collectives))
        replaced.append(mock.patch.object(backends, "streams_of", lambda _: _PlayedStreams(recorder)))
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(one)
        # Held here: torch holds the part of it that is in C++.
        store = PlayedStore(recorder, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        recorder.name_groups({0: "world"})
        try:
            yield others
        finally:
            dist.destroy_process_group()


def following_operations(recorder: Recorder) -> list[Any]:
    """What has to be replaced so that all launches of one reduce-scatter or all-gather are one operation."""
    operations = "reduce_scatter", "all_gather"
    return [mock.patch.object(Collectives, name, _as_one(recorder, getattr(Collectives, name))) for name in operations]


def naming_groups(recorder: Recorder, number_of: Callable[[Any], int]) -> list[Any]:
    """What has to be replaced so that the recorder is told what process groups are for.

    Args:
        recorder: Is told.
        number_of: The recorder's number for a group.
    """
    functions = process_groups.process_groups, process_groups.control_group, process_groups.checkpoint_group
    found = [one for make in functions for one in _everywhere(make, _naming(recorder, make, number_of))]
    launch = _launching_for(recorder, process_groups.PointToPoint.launch, number_of)
    found.append(mock.patch.object(process_groups.PointToPoint, "launch", launch))
    return found + _everywhere(process_groups.subgroup, _naming_part(recorder, process_groups.subgroup, number_of))


# `torch.optim` hides its modules behind the classes.
adam = importlib.import_module("torch.optim.adam")


def _in_order(agree: Callable[..., Topology | None], ranks_per_node: int) -> Callable[..., Topology]:
    """Has others be on the nodes that they would be on; as it is asked, they are all on this rank's."""

    def topology_in_order(node: Node, control: Collectives) -> Topology:
        agree(node, control)
        return Topology.in_order(control.world_size, min(ranks_per_node, control.world_size))

    return topology_in_order


def _owners_alike(agree: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Has others hold the kind of state that this rank holds, of parameters that it owns nothing of."""

    def digests_of_owners(own: Sequence[int | None], control: Collectives) -> list[int]:
        kind = next((digest for digest in own if digest), None)
        return agree([kind if digest is None else digest for digest in own], control)

    return digests_of_owners


def _noted_update(recorder: Recorder, update: Callable[..., None], factor: int) -> Callable[..., None]:
    def adam(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        update(parameters, *args, **kwargs)
        recorder.compute("update", sum(parameter.nbytes for parameter in parameters) * factor)

    return adam


class _Followed:
    """A collective of the package's: waiting for it is waiting for all that it has launched."""

    def __init__(self, work: Work, recorder: Recorder, numbers: list[int]) -> None:
        self._work, self._recorder, self._numbers = work, recorder, numbers
        self._waited = False

    def wait(self) -> None:
        self._work.wait()
        for number in self._numbers:
            self._recorder.wait(number)
        self._waited = True

    def is_completed(self) -> bool:
        # Whether it would be depends on the wire: as if not.
        return self._waited


def _as_one(recorder: Recorder, operation: Callable[..., Work]) -> Callable[..., Work]:
    def launch(self: Collectives, *args: Any, **kwargs: Any) -> Work:
        # What it waits for itself, it waits for beside the caller's stream.
        with recorder.as_one() as numbers, recorder.in_background():
            return _Followed(operation(self, *args, **kwargs), recorder, numbers)

    return launch


def _at_once(recorder: Recorder) -> Callable[..., None]:
    """What a thread would do when messages have arrived is done at once, and only costs this host its calls."""

    @torch.no_grad()
    def run(self: ExchangeThread, work: ExchangedWork, action: Callable[[], None]) -> None:
        with recorder.in_background():
            action()

    return run


def _naming(recorder: Recorder, make: Callable[..., Any], number_of: Callable[[Any], int]) -> Callable[..., Any]:
    """A function that makes groups, or gives those there are, and tells the recorder what they are for."""

    def named(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        several = isinstance(made, process_groups.ProcessGroups)
        groups = made._asdict() if several else {make.__name__.removesuffix("_group"): made}
        recorder.name_groups({number_of(group): name for name, group in groups.items()})
        return made

    return named


def _naming_part(recorder: Recorder, make: Callable[..., Any], number_of: Callable[[Any], int]) -> Callable[..., Any]:
    """A group of some of the ranks of another is for what that is for; on one network or another, by its operations."""

    def named(group: Any, members: Sequence[int]) -> Any:
        made = make(group, members)
        recorder.name_groups({number_of(made): recorder.groups[number_of(group)]})
        return made

    return named


def _launching_for(
    recorder: Recorder, launch: Callable[..., Any], number_of: Callable[[Any], int]
) -> Callable[..., Any]:
    """Messages down go by another group's connections, and are for what those up are for."""

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.launching_for(number_of(self.group)):
            return launch(self, *args, **kwargs)

    return launched


class _PlayedStreams(HostStreams):
    """What is launched on a stream beside, that stream waits for: neither the host does, nor the device."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return self._recorder.in_background()


def _native(recorder: Recorder, make: Callable[..., Collectives]) -> Callable[..., Collectives]:
    """``make_collectives`` that takes the groups of gradients and parameters for those of GPUs."""

    def make_collectives(
        group: PlayedGroup,
        device: torch.device,
        topology: Topology | None = None,
        shard_groups: ShardGroups | None = None,
    ) -> Collectives:
        on_gpu = recorder.groups[group.number] in ("gradients", "parameters")
        with mock.patch.object(dist, "get_backend", lambda _: "nccl" if on_gpu else "gloo"):
            return make(group, torch.device("cuda") if on_gpu else device, topology, shard_groups)

    return make_collectives


def _everywhere(function: Callable[..., Any], instead: Callable[..., Any]) -> list[Any]:
    """Replaces a function in all modules of the package that have imported it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("lightning_parstrat")]
    found = [(m, name) for m in modules for name, value in vars(m).items() if value is function]
    return [mock.patch.object(module, name, instead) for module, name in found]
