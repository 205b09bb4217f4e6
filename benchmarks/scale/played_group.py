"""A process group of which one rank exists: it sends nothing, and writes down what it is asked for.

What comes from other ranks is what would come if they did the same: a sum is N times this rank's part, a list of all
ranks' tensors is N times its own. In what is gathered in place, the others' parts stay as they are.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.scale.events import Kind
from benchmarks.scale.recorder import Recorder


class PlayedWork(dist.Work):
    """Has ended, but does not say so before somebody has waited: whether it would have depends on the wire."""

    def __init__(self, recorder: Recorder, number: int, result: object) -> None:
        super().__init__()
        self._recorder, self._number, self._result = recorder, number, result
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once."""
        self._recorder.wait(self._number)
        self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited."""
        return self._waited

    def get_future(self) -> Any:
        """For DDP's reducer."""
        self._recorder.expect(self._number)
        tensors = self._result if isinstance(self._result, list) else []
        # On a GPU, whoever waits for a future waits for the streams of its devices.
        on_gpus = {tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(on_gpus))
        future.set_result(self._result)
        return future


class PlayedGroup(dist.ProcessGroup):
    """The group as ``init_process_group`` and ``new_group`` make it.

    Args:
        recorder: Writes down.
        rank: This rank's number in the group.
        size: The number of ranks.
        factor: What the bytes of parameters, gradients and optimizer state are multiplied by in the record.
    """

    def __init__(self, recorder: Recorder, rank: int, size: int, factor: int = 1) -> None:
        super().__init__(rank, size)
        self._recorder, self._rank, self._size, self._factor = recorder, rank, size, factor
        self.number = recorder.add_group()
        self.options = _Options()

    @property
    def group_name(self) -> str:
        """torch looks groups up by it."""
        return f"played {self.number}"

    def getBackendName(self) -> str:
        """For torch's messages."""
        return "played"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PlayedWork:
        """Sums become N times as large, extremes stay."""
        how = getattr(opts, "reduceOp", opts)
        for tensor in tensors:
            if how is None or how == dist.ReduceOp.SUM:
                tensor.mul_(self._size)
        return self._launch("all_reduce", tensors[0], sum(tensor.nbytes for tensor in tensors), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PlayedWork:
        """From whichever rank: the tensors stay."""
        root = 0 if opts is None else opts.rootRank
        nbytes = sum(tensor.nbytes for tensor in tensors)
        received = 0 if root == self._rank else nbytes
        self._note_metadata(tensors[0], received)
        return self._launch("broadcast", tensors[0], nbytes, tensors, received, root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PlayedWork:
        """Everybody's is this rank's."""
        for received, own in zip(outputs, inputs, strict=True):
            for place in received:
                place.copy_(own)
        received_bytes = inputs[0].nbytes * (self._size - 1)
        self._note_metadata(inputs[0], received_bytes)
        return self._launch("all_gather", inputs[0], inputs[0].nbytes * self._size, outputs, received_bytes)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PlayedWork:
        """On the root, everybody's is this rank's."""
        root = 0 if opts is None else opts.rootRank
        received_bytes = inputs[0].nbytes * (self._size - 1) if root == self._rank else 0
        for place in outputs[0] if outputs else ():
            place.copy_(inputs[0])
        self._note_metadata(inputs[0], received_bytes)
        return self._launch("gather", inputs[0], inputs[0].nbytes, outputs, received_bytes, root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> PlayedWork:
        """On the root, its own part; other ranks get nothing."""
        root = 0 if opts is None else opts.rootRank
        if inputs:
            outputs[0].copy_(inputs[0][self._rank])
        received_bytes = 0 if root == self._rank else outputs[0].nbytes
        self._note_metadata(outputs[0], received_bytes)
        return self._launch("scatter", outputs[0], outputs[0].nbytes, outputs, received_bytes, root)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> PlayedWork:
        """N times this rank's part."""
        torch.mul(given.view(self._size, -1)[self._rank], self._size, out=output)
        return self._launch("reduce_scatter", given, given.nbytes, [output], output.nbytes)

    def all_gather_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> PlayedWork:
        """This rank's part alone."""
        output.view(self._size, -1)[self._rank].copy_(given.view(-1))
        return self._launch("all_gather", output, output.nbytes, [output], output.nbytes - given.nbytes)

    # What older torch calls them.
    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int] = (), sent: Sequence[int] = (), *_: Any
    ) -> PlayedWork:
        """Each rank sends what this one would have sent to itself; zeros, where that is of another length."""
        if received or sent:
            own = given.split(list(sent))[self._rank]
            for place in output.split(list(received)):
                place.copy_(own if place.numel() == own.numel() else torch.zeros_like(place))
            received_bytes = (sum(received) - received[self._rank]) * output.element_size()
        else:
            # At once: a host that launched a copy for each of many ranks would do what none does.
            by_rank = output.view(self._size, -1)
            by_rank.copy_(given.view(self._size, -1)[self._rank])
            received_bytes = output.nbytes - by_rank[0].nbytes
        # A small bucket's is a single number, or nothing, on some ranks.
        like = given if given.numel() > output.numel() else output
        return self._launch("all_to_all", like, max(given.nbytes, output.nbytes), [output], received_bytes)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> PlayedWork:
        """A message leaves. Where this rank receives a small one as long, now or before, the other says the same."""
        room = self._recorder.rooms.pop(self._key(tensors[0], peer, tag), None)
        if room is not None:
            room.copy_(tensors[0])
        elif self._is_small(tensors[0]):
            self._recorder.said[self._key(tensors[0], peer, tag)] = tensors[0].clone()
        return self._launch("send", tensors[0], tensors[0].nbytes, tensors, 0, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> PlayedWork:
        """A message arrives: of zeros, unless this rank sends one of the same length to the other."""
        said = self._recorder.said.pop(self._key(tensors[0], peer, tag), None)
        if said is not None:
            tensors[0].copy_(said)
        else:
            tensors[0].zero_()
            if self._is_small(tensors[0]):
                self._recorder.rooms[self._key(tensors[0], peer, tag)] = tensors[0]
        return self._launch("recv", tensors[0], tensors[0].nbytes, tensors, tensors[0].nbytes, peer)

    def barrier(self, opts: Any = None) -> PlayedWork:
        """All are there."""
        return self._launch("barrier", _NOTHING, 0, None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """All are there: each says so to rank 0, which answers."""
        others = range(1, self._size) if self._rank == 0 else [0]
        kinds: tuple[Kind, Kind] = ("recv", "send") if self._rank == 0 else ("send", "recv")
        for kind in kinds:
            for other in others:
                self._launch(kind, _NOTHING, 4, None, 4 if kind == "recv" else 0, other).wait()

    def _launch(
        self,
        kind: Kind,
        tensor: Tensor,
        nbytes: int,
        result: object,
        received: int | None = None,
        peer: int | None = None,
    ) -> PlayedWork:
        """Writes it down; ``tensor`` is one of those that take part."""
        factor = self._factor if self._is_packed(tensor) or _is_of_the_model(tensor) else 1
        arrives = nbytes if received is None else received
        number = self._recorder.launch(
            self.number, kind, nbytes * factor, arrives * factor, self._rank, self._size, peer
        )
        return PlayedWork(self._recorder, number, result)

    def _key(self, tensor: Tensor, peer: int, tag: int) -> tuple[str, int, int, int]:
        return self._recorder.purpose_of(self.number), peer, tag, tensor.nbytes

    def _is_small(self, tensor: Tensor) -> bool:
        return not _is_of_the_model(tensor) and not self._is_packed(tensor)

    def _is_packed(self, tensor: Tensor) -> bool:
        """Whether it is what moves to other owners, packed as bytes; so are messages of control."""
        return tensor.dtype == torch.uint8 and self._recorder.groups[self.number] in ("gradients", "parameters")

    def _note_metadata(self, tensor: Tensor, received: int) -> None:
        # torch sends pickled objects as bytes; nothing else here is of this dtype.
        if tensor.dtype == torch.uint8:
            self._recorder.note_metadata(received)

    def _set_sequence_number_for_group(self) -> None:
        """torch asks groups of Gloo's for it."""

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations until its end are launched as they come."""

    def _end_coalescing(self, device: torch.device) -> PlayedWork:
        """They have been."""
        return PlayedWork(self._recorder, -1, None)


_NOTHING = torch.zeros(0, dtype=torch.int32)


def _is_of_the_model(tensor: Tensor) -> bool:
    """Whether it grows with the model's tensors, not with their number: norms are single numbers, times of float64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.numel() > 1


class _Options:
    """Where torch notes what a group of Gloo's is called."""


class PlayedStore(dist.Store):
    """A store in which the others have done what they are waited for.

    Args:
        recorder: Counts the requests.
        size: The number of ranks.
    """

    def __init__(self, recorder: Recorder, size: int) -> None:
        super().__init__()
        self._recorder, self._size = recorder, size
        self._known: dict[str, bytes] = {}
        self._said = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Notes it, and wakes who waits for it."""
        self._recorder.note_store_request()
        with self._said:
            self._known[key] = value if isinstance(value, bytes) else str(value).encode()
            self._said.notify_all()

    def get(self, key: str) -> bytes:
        """What was set."""
        self._recorder.note_store_request()
        return self._known[key]

    def add(self, key: str, number: int) -> int:
        """As if this rank were the last to add."""
        self._recorder.note_store_request()
        return number * self._size

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As if this rank were the first."""
        self._recorder.note_store_request()
        return self._known.setdefault(key, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether they are there; of a key for each rank, this rank's stands for all."""
        self._recorder.note_store_request()
        return any(key in self._known for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all have been set."""
        self._recorder.note_store_request()
        with self._said:
            seconds = None if timeout is None else min(timeout.total_seconds(), threading.TIMEOUT_MAX)
            if not self._said.wait_for(lambda: all(key in self._known for key in keys), seconds):
                raise RuntimeError(f"wait timeout after {seconds} s, keys: {', '.join(keys)}")

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """One after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """One after the other."""
        return [self.get(key) for key in keys]

    def clone(self) -> "PlayedStore":
        """Itself: it has no connection."""
        return self

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        self._recorder.note_store_request()
        return self._known.pop(key, None) is not None

    deleteKey = delete_key


def played_broadcast(
    original: Callable[..., None], note: Callable[[Any, int], None], hear: Callable[[Any, int], Any]
) -> Callable[..., None]:
    """``dist.broadcast_object_list``: what this rank receives is what it would have sent itself.

    Args:
        original: torch's.
        note: Is shown what this rank sends, to so many.
        hear: Says what it receives where it would not send the same.
    """

    def broadcast_object_list(object_list: list[Any], src: int | None = None, *args: Any, **kwargs: Any) -> None:
        group = kwargs.get("group") or (args[0] if args else None) or dist.group.WORLD
        root = kwargs.get("group_src", src) or 0
        if group.rank() == root:
            for value in object_list:
                note(value, group.size())
            original(object_list, src, *args, **kwargs)
            return
        object_list[:] = [hear(value, group.size()) for value in object_list]
        sizes = torch.zeros(len(object_list), dtype=torch.long)
        content = torch.zeros(sum(len(pickle.dumps(value)) for value in object_list), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = root
        for tensor in (sizes, content):
            group.broadcast([tensor], options).wait()

    return broadcast_object_list
