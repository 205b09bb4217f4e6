"""A reader of parameters in flight comes after them, on whatever stream; nothing else waits."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import Arrivals
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.distributed.engines import LoggedCollectives, backward, make_engine
from tests.pool import RankPool

Log = list[tuple[str, Any, Any]]


class RecordingStreams:
    """Named streams that only record what is queued on which."""

    are_several = True

    def __init__(self) -> None:
        self.log: Log = []
        self.name: Hashable = "main"

    def current(self) -> Hashable:
        return self.name

    @contextmanager
    def on(self, stream: Hashable) -> Iterator[None]:
        before, self.name = self.name, stream
        yield
        self.name = before

    def wait_for(self, stream: Hashable) -> None:
        self.log.append(("waits for stream", self.name, stream))


class _Noted:
    """What collectives log, with the stream that it was done on."""

    def __init__(self, streams: RecordingStreams) -> None:
        self.streams = streams

    def append(self, entry: tuple[str, int]) -> None:
        kind = "launches" if entry[0].startswith("launch") else "waits for transfer"
        self.streams.log.append((kind, self.streams.name, entry[1] + 1))


def recorded(inner: Collectives, streams: RecordingStreams) -> LoggedCollectives:
    return LoggedCollectives(inner.group, _Noted(streams))  # type: ignore[arg-type]


def two_layers(**policy: Any) -> tuple[nn.Sequential, ShardedDataParallel, RecordingStreams]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), **policy)
    return module, engine, RecordingStreams()


def gathers(reader: str, **policy: Any) -> Log:
    """What is queued where from a step on, until the first layer is read on a stream; or by the step alone."""
    module, engine, streams = two_layers(**policy)
    engine.gatherer.streams = streams
    engine.gatherer.collectives = recorded(engine.gatherer.collectives, streams)
    backward(engine, module(torch.ones(2, 4)).sum())
    engine.optimizers[0].step()
    if reader:
        with streams.on(reader):
            module[0].weight.sum()
    log = list(streams.log)
    engine.gatherer.finish()
    return log


def reductions(streams_of_gradients: tuple[str, str], cap: float) -> Log:
    """What is queued where if the gradients of the last and the first layer become ready on these streams."""
    module, engine, streams = two_layers(bucket_cap_mb=cap)
    engine.reducer.collectives = recorded(engine.reducer.collectives, streams)
    engine.reducer.max_inflight = 4
    engine.reducer._streams, engine.reducer._arrivals = streams, Arrivals(streams)
    for parameter, name in zip(reversed(list(module.parameters())), streams_of_gradients, strict=True):
        # Before our hook: ours are put last when the backward is announced.
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: setattr(streams, "name", name))
    backward(engine, module(torch.ones(2, 4)).sum())
    streams.name = "main"
    log = list(streams.log)
    engine.reducer.complete()
    assert all(event[1] == "main" for event in streams.log if event[0] != "waits for stream")
    return log


FIRST, SECOND = ("launches", "main", 1), ("launches", "main", 2)
GRAPH_BEFORE, GRAPH_AFTER = ("waits for stream", "main", "graph"), ("waits for stream", "graph", "main")
GATHERS: list[tuple[str, dict[str, Any], Log]] = [
    *(("main", {"gather_dtype": dtype}, [("waits for transfer", "main", 1)]) for dtype in (None, "bf16")),
    # Another stream comes after the launching one.
    *(
        ("side", {"gather_dtype": dtype}, [("waits for transfer", "main", 1), ("waits for stream", "side", "main")])
        for dtype in (None, "bf16")
    ),
    ("", {"overlap_param_gather": False}, [("waits for transfer", "main", 1), ("waits for transfer", "main", 2)]),
]
REDUCTIONS: list[tuple[tuple[str, str], float, Log]] = [
    (("main", "main"), 8.0, [FIRST]),
    # The stream of a gradient waits as well: its memory may be written again only when it was packed.
    (("graph", "main"), 8.0, [GRAPH_BEFORE, FIRST, GRAPH_AFTER]),
    (("graph", "graph"), 8.0, [GRAPH_BEFORE, FIRST, GRAPH_AFTER]),
    (("main", "graph"), 1e-6, [FIRST, GRAPH_BEFORE, SECOND, GRAPH_AFTER]),
]


def logs() -> tuple[list[Log], list[Log]]:
    return [gathers(reader, **policy) for reader, policy, _ in GATHERS], [reductions(*row[:2]) for row in REDUCTIONS]


def test_each_stream_waits_for_what_it_reads_and_for_nothing_else(pool: RankPool) -> None:
    for of_gathers, of_reductions in pool.run(2, logs):
        assert of_gathers == [[FIRST, SECOND, *expected] for _, _, expected in GATHERS]
        assert of_reductions == [expected for _, _, expected in REDUCTIONS]
