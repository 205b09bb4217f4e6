"""A process group of which one rank exists: it sends nothing, and has what it is asked for counted.

What comes from other ranks is what would come if they did the same: a sum is N times this rank's part, a list of all
ranks' tensors is N times its own. In what is gathered in place, the others' parts stay as they are.
"""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.scale.recorder import Kind, Recorder


class PlayedWork(dist.Work):
    """Has ended, but does not say so before somebody has waited: whether it would have depends on the wire."""

    def __init__(self, result: object = None) -> None:
        super().__init__()
        self._result, self._waited = result, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited

    def get_future(self) -> Any:
        """For DDP's reducer."""
        tensors = self._result if isinstance(self._result, list) else []
        # On a GPU, whoever waits for a future waits for the streams of its devices.
        on_gpus = {tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(on_gpus))
        future.set_result(self._result)
        return future


class PlayedGroup(dist.ProcessGroup):
    """The group as ``init_process_group`` and ``new_group`` make it."""

    def __init__(self, recorder: Recorder, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._recorder, self._rank, self._size = recorder, rank, size
        self.number = recorder.add_group()
        # Where torch notes what a group of Gloo's is called.
        self.options = SimpleNamespace()

    @property
    def group_name(self) -> str:
        return f"played {self.number}"

    def getBackendName(self) -> str:
        return "played"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PlayedWork:
        """Sums become N times as large, extremes stay."""
        how = getattr(opts, "reduceOp", opts)
        for tensor in tensors:
            if how is None or how == dist.ReduceOp.SUM:
                tensor.mul_(self._size)
        return self._launch("all_reduce", sum(tensor.nbytes for tensor in tensors), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PlayedWork:
        """From whichever rank: the tensors stay."""
        own = (0 if opts is None else opts.rootRank) == self._rank
        return self._launch("broadcast", 0 if own else sum(tensor.nbytes for tensor in tensors), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PlayedWork:
        """Everybody's is this rank's."""
        for places, own in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(own)
        received = inputs[0].nbytes * (self._size - 1)
        # torch sends pickled objects as bytes; nothing else here is of this dtype.
        self._recorder.note_metadata(received if inputs[0].dtype == torch.uint8 else 0)
        return self._launch("all_gather", received, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> PlayedWork:
        """N times this rank's part."""
        torch.mul(given.view(self._size, -1)[self._rank], self._size, out=output)
        return self._launch("reduce_scatter", output.nbytes, [output])

    def all_gather_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> PlayedWork:
        """This rank's part alone."""
        output.view(self._size, -1)[self._rank].copy_(given.view(-1))
        return self._launch("all_gather", output.nbytes - given.nbytes, [output])

    # What older torch calls them.
    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single

    def all_to_all_single(self, output: Tensor, given: Tensor, received: Sequence[int] = (), *_: Any) -> PlayedWork:
        """Others send zeros."""
        output.zero_()
        own = received[self._rank] * output.element_size() if received else output.nbytes // self._size
        return self._launch("all_to_all", output.nbytes - own, [output])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> PlayedWork:
        """A message leaves. Where this rank receives one as long, now or before, the other says the same."""
        key = (peer, tag, tensors[0].dtype, tensors[0].numel())
        room = self._recorder.rooms.pop(key, None)
        if room is None:
            self._recorder.said[key] = tensors[0].clone()
        else:
            room.copy_(tensors[0])
        return self._launch("send", tensors[0].nbytes, tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> PlayedWork:
        """A message arrives: of zeros, unless this rank sends one of the same length to the other."""
        key = (peer, tag, tensors[0].dtype, tensors[0].numel())
        said = self._recorder.said.pop(key, None)
        if said is None:
            self._recorder.rooms[key] = tensors[0].zero_()
        else:
            tensors[0].copy_(said)
        return self._launch("recv", tensors[0].nbytes, tensors)

    def barrier(self, opts: Any = None) -> PlayedWork:
        return self._launch("barrier", 0, None)

    def _launch(self, kind: Kind, nbytes: int, result: object) -> PlayedWork:
        """Has it counted; ``nbytes`` are those that this rank receives, or sends in a message."""
        self._recorder.launch(self.number, kind, nbytes)
        return PlayedWork(result)

    def _set_sequence_number_for_group(self) -> None:
        """torch asks groups of Gloo's for it."""

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations until its end are launched as they come."""

    def _end_coalescing(self, device: torch.device) -> PlayedWork:
        return PlayedWork()


class PlayedStore(dist.Store):
    """A store in which the others have done what they are waited for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._known[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._known[key]

    def add(self, key: str, number: int) -> int:
        """As if this rank were the last to add."""
        return number * self._size

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As if this rank were the first."""
        return self._known.setdefault(key, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Of a key for each rank, this rank's stands for all."""
        return any(key in self._known for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """They have set all of them."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def clone(self) -> "PlayedStore":
        """Itself: it has no connection."""
        return self
