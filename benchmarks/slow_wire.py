"""A wire as slow as wanted, without a network: collectives that take at least a latency and a time per byte.

    group = SlowWire(dist.group.WORLD, latency_seconds=2e-3, seconds_per_byte=8e-9)
    DistributedDataParallel(module, process_group=group)

One collective is on the wire at a time, in the order in which they were started; then the real one is made. The process
is free meanwhile, as it is where a network card does the work.
"""

import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist


class SlowWire(dist.ProcessGroup):
    """A process group whose all-reduces take longer than the group's that makes them.

    Args:
        group: Makes them.
        latency_seconds: What each takes at least.
        seconds_per_byte: What each byte adds.
    """

    def __init__(self, group: Any, latency_seconds: float, seconds_per_byte: float) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._real = group
        self._latency_seconds = latency_seconds
        self._seconds_per_byte = seconds_per_byte
        self._waiting: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._carry, daemon=True).start()

    def getBackendName(self) -> str:
        return "slow wire"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._waiting.put((tensors, opts, future))
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._real.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._real.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any) -> Any:
        return self._real.barrier(opts)

    def _carry(self) -> None:
        free = 0.0
        while True:
            tensors, opts, future = self._waiting.get()
            nbytes = sum(tensor.nbytes for tensor in tensors)
            free = max(free, time.perf_counter()) + self._latency_seconds + self._seconds_per_byte * nbytes
            work = self._real.allreduce(tensors, opts) if opts is not None else self._real.allreduce(tensors)
            work.wait()
            time.sleep(max(0.0, free - time.perf_counter()))
            # Late sleepers must not lose what the wire has gained meanwhile.
            free = max(free, time.perf_counter() - 1e-3)
            future.set_result(tensors)
