"""Has the package play one rank of many: process groups, nodes and clocks are the laboratory's, all else is real.

What is replaced lies below the package or at its public edges: torch's class of Gloo groups, who shares a node,
``make_collectives``, the two operations of ``Collectives``, and the thread that follows exchanges.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.scale.other_ranks import OtherRanks
from benchmarks.scale.played_group import PlayedGroup, PlayedStore
from benchmarks.scale.recorder import Recorder
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.distributed.checkpoint.dcp import FolderWriter
from lightning_parstrat.distributed.comm import agreement, backends, process_groups
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import Exchange, ExchangeThreads, Streams
from lightning_parstrat.distributed.engine import state


@contextmanager
def playing(recorder: Recorder, rank: int, size: int, ranks_per_node: int = 8) -> Iterator[OtherRanks]:
    """Within it, this process is in a default process group of ``size`` ranks, and everything is counted.

    Gradients and parameters are carried by what NCCL is asked for.
    """
    others = OtherRanks(recorder)

    class Group(PlayedGroup):
        def __init__(self, store: object, rank: int, size: int, timeout: timedelta | None = None) -> None:
            super().__init__(recorder, rank, size)

    replaced = [
        mock.patch.object(distributed_c10d, "ProcessGroupGloo", Group),
        *_everywhere(agreement.topology_of_ranks, _in_order(agreement.topology_of_ranks, ranks_per_node)),
        mock.patch.object(time, "perf_counter", lambda: recorder.seconds),
        mock.patch.object(ExchangeThreads, "see_through", _at_once),
        *_everywhere(agreement.gather_object, others.gather_object),
        mock.patch.object(FolderWriter, "write_data", others.write_data(FolderWriter.write_data)),
        mock.patch.object(state, "_own_parts", others.own_parts(state._own_parts)),
        mock.patch.object(dist, "gather_object", others.gather),
        mock.patch.object(dist, "scatter_object_list", others.scatter),
        *_naming_groups(recorder),
        *_everywhere(backends.make_collectives, _native(recorder, backends.make_collectives)),
        mock.patch.object(backends, "Streams", lambda _: Streams()),
    ]
    for name in ("reduce_scatter", "all_gather"):
        replaced.append(mock.patch.object(Collectives, name, _as_one(recorder, getattr(Collectives, name))))
    broadcast = others.broadcast(dist.broadcast_object_list)
    replaced += [mock.patch.object(module, "broadcast_object_list", broadcast) for module in (dist, distributed_c10d)]
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(one)
        # Held here: torch holds the part of it that is in C++.
        store = PlayedStore(size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        recorder.name_groups({0: "world"})
        try:
            yield others
        finally:
            dist.destroy_process_group()


def _in_order(agree: Callable[..., Topology], ranks_per_node: int) -> Callable[..., Topology]:
    """Has others be on the nodes that they would be on; what is asked for that is counted."""

    def topology_of_ranks(node: Any, control: Collectives) -> Topology:
        agree(node, control)
        return Topology.of([rank // ranks_per_node for rank in range(control.world_size)])

    return topology_of_ranks


def _as_one(recorder: Recorder, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Has all launches of one reduce-scatter or all-gather be one operation."""

    def launch(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        with recorder.as_one():
            return operation(self, *args, **kwargs)

    return launch


@torch.no_grad()
def _at_once(self: ExchangeThreads, exchange: Exchange) -> None:
    """What threads would do when messages have arrived is done at once, and only costs this host its calls."""
    while not exchange.has_ended:
        exchange.go_on()


def _naming_groups(recorder: Recorder) -> list[Any]:
    """What has to be replaced so that the recorder is told what process groups are for."""

    def named(make: Callable[..., Any]) -> Callable[..., Any]:
        def making(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            several = isinstance(made, process_groups.ProcessGroups)
            groups = made._asdict() if several else {make.__name__.removesuffix("_group"): made}
            recorder.name_groups({group.number: name for name, group in groups.items()})
            return made

        return making

    def part(group: PlayedGroup, members: Sequence[int]) -> Any:
        # A group of some of the ranks of another is for what that is for.
        made = make_part(group, members)
        recorder.name_groups({made.number: recorder.groups[group.number]})
        return made

    make_part = process_groups.subgroup
    functions = process_groups.process_groups, process_groups.control_group, process_groups.checkpoint_group
    found = [one for make in functions for one in _everywhere(make, named(make))]
    return found + _everywhere(make_part, part)


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
