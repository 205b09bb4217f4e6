"""Who reads parameters that are on the way, on whatever stream, comes after them; nothing else waits."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.streams import Arrivals, CudaStreams, HostStreams, streams_of
from lightning_parstrat.distributed.comm.work import Work
from lightning_parstrat.distributed.zero1.engine import ShardedDataParallel
from lightning_parstrat.distributed.zero1.reductions import Reductions
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

Log = list[tuple[str, Any, Any]]


class RecordingStreams:
    """Named streams that do nothing but remember what was queued on which."""

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


class _Recorded:
    def __init__(self, work: Work, number: int, streams: RecordingStreams) -> None:
        self.work, self.number, self.streams = work, number, streams

    def wait(self) -> None:
        self.streams.log.append(("waits for gather", self.streams.name, self.number))
        self.work.wait()

    def is_completed(self) -> bool:
        return False


class RecordedCollectives(Collectives):
    def __init__(self, inner: Collectives, streams: RecordingStreams) -> None:
        super().__init__(inner.group)
        self.inner, self.streams, self.launched = inner, streams, 0

    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Any) -> Work:
        raise NotImplementedError

    def _all_gather(self, buffer: Tensor, bounds: Any) -> Work:
        self.launched += 1
        self.streams.log.append(("launches gather", self.streams.name, self.launched))
        return _Recorded(self.inner.all_gather(buffer, bounds), self.launched, self.streams)


def stepped(**policy: Any) -> tuple[nn.Sequential, ShardedDataParallel, RecordingStreams]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = make_engine(module, optimizer, **policy)
    streams = RecordingStreams()
    engine.gatherer.streams = streams
    engine.gatherer.collectives = RecordedCollectives(engine.gatherer.collectives, streams)
    backward(engine, module(torch.ones(2, 4)).sum())
    optimizer.step()
    return module, engine, streams


def read_on(stream: str, gather_dtype: str | None) -> Log:
    module, engine, streams = stepped(gather_dtype=gather_dtype)
    with streams.on(stream):
        # The first layer is home first.
        module[0].weight.sum()
    read = list(streams.log)
    engine.gatherer.finish()
    return read


LAUNCHES = [("launches gather", "main", 1), ("launches gather", "main", 2)]


@pytest.mark.parametrize("gather_dtype", [None, "bf16"])
def test_a_reader_on_the_launching_stream_waits_for_its_bucket_alone(pool: RankPool, gather_dtype: Any) -> None:
    for log in pool.run(2, read_on, "main", gather_dtype):
        assert log == [*LAUNCHES, ("waits for gather", "main", 1)]


@pytest.mark.parametrize("gather_dtype", [None, "bf16"])
def test_a_reader_on_another_stream_comes_after_the_launching_one(pool: RankPool, gather_dtype: Any) -> None:
    for log in pool.run(2, read_on, "side", gather_dtype):
        assert log == [*LAUNCHES, ("waits for gather", "main", 1), ("waits for stream", "side", "main")]


def within_step() -> Log:
    _, engine, streams = stepped(overlap_param_gather=False)
    log = list(streams.log)
    engine.gatherer.finish()
    assert streams.log == log
    return log


def test_without_overlap_the_step_waits_after_all_launches(pool: RankPool) -> None:
    for log in pool.run(2, within_step):
        assert log == [*LAUNCHES, ("waits for gather", "main", 1), ("waits for gather", "main", 2)]


class RecordedReductions(RecordedCollectives):
    def _reduce_scatter(self, buffer: Tensor, shard: Tensor, bounds: Any) -> Work:
        self.launched += 1
        self.streams.log.append(("launches reduction", self.streams.name, self.launched))
        return _Recorded(self.inner.reduce_scatter(buffer, shard, bounds), self.launched, self.streams)


def reduced_from(streams_of_gradients: tuple[str, str], cap: float) -> Log:
    """What is queued where a module's two gradients, the last layer's first, become ready on these streams."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    streams = RecordingStreams()
    engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), bucket_cap_mb=cap)
    engine.reducer.reductions = Reductions(
        RecordedReductions(engine.reducer.collectives, streams), max_inflight=4, streams=streams
    )
    for parameter, name in zip(reversed(list(module.parameters())), streams_of_gradients, strict=True):
        # Before our hook: ours are put last when the backward is announced.
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: setattr(streams, "name", name))
    loss = module(torch.ones(2, 4)).sum()
    engine.prepare_backward(loss)
    loss.backward()
    streams.name = "main"
    log = list(streams.log)
    engine.reducer.complete()
    assert all(event[1] == "main" for event in streams.log if event[0].startswith(("launches", "waits for gather")))
    return log


LAUNCH = "launches reduction", "main"


@pytest.mark.parametrize(
    ("of_gradients", "cap", "expected"),
    [
        (("main", "main"), 8.0, [(*LAUNCH, 1)]),
        # The stream of a gradient waits in its turn: its memory may be written again only when it was packed.
        (
            ("graph", "main"),
            8.0,
            [("waits for stream", "main", "graph"), (*LAUNCH, 1), ("waits for stream", "graph", "main")],
        ),
        (
            ("graph", "graph"),
            8.0,
            [("waits for stream", "main", "graph"), (*LAUNCH, 1), ("waits for stream", "graph", "main")],
        ),
        (
            ("main", "graph"),
            1e-6,
            [
                (*LAUNCH, 1),
                ("waits for stream", "main", "graph"),
                (*LAUNCH, 2),
                ("waits for stream", "graph", "main"),
            ],
        ),
    ],
)
def test_gradients_leave_from_backwards_stream_after_they_were_made_on_any(
    pool: RankPool, of_gradients: tuple[str, str], cap: float, expected: Log
) -> None:
    assert pool.run(2, reduced_from, of_gradients, cap) == [expected] * 2


def test_who_launches_from_another_stream_may_have_made_gradients_there() -> None:
    streams = RecordingStreams()
    arrivals = Arrivals(streams)
    with streams.on("side"), arrivals.at_home("bucket"):
        streams.log.append(("launches reduction", streams.name, 1))
    assert streams.log == [("waits for stream", "main", "side"), (*LAUNCH, 1), ("waits for stream", "side", "main")]


def test_what_is_forgotten_is_not_waited_for() -> None:
    streams = RecordingStreams()
    arrivals = Arrivals(streams)
    with streams.on("graph"):
        arrivals.note("bucket")
    arrivals.forget("bucket")
    arrivals.forget("another")
    with arrivals.at_home("bucket"):
        assert streams.name == "main"
    assert streams.log == []


def test_each_device_has_its_streams() -> None:
    assert isinstance(streams_of(torch.device("cpu")), HostStreams)
    assert isinstance(streams_of(torch.device("cuda", 0)), CudaStreams)
