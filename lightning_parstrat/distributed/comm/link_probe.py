"""Measures an all-reduce between two ranks; run as a program, one process is one rank.

    python -m lightning_parstrat.distributed.comm.link_probe RENDEZVOUS cpu|cuda

Rank and world size are those that Slurm has set, or torchrun's variables. Rank 0 prints the result as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SMALL = 2**12
_LARGE = 2**25
_REPETITIONS = 20
_SECONDS = 120
_RESULT = '{"latency_seconds"'
"""How a result begins; srun may put the number of the task before it (``--label``)."""


def between_two_processes() -> dict[str, Any]:
    """Measures between two processes of this machine, on devices of their own where there are two.

    Raises:
        RuntimeError: They could not be started, or did not find each other.
    """
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        # A file instead of a port: no other program can have taken it.
        rendezvous = f"file://{Path(folder).resolve()}/rendezvous"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "lightning_parstrat.distributed.comm.link_probe", rendezvous, device],
                env=_environment_of(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            printed = [rank.communicate(timeout=_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"two processes of this machine did not find each other in {_SECONDS} s") from error
        finally:
            # Where one has failed, the other waits for it until the backend's timeout.
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        # The last line of a traceback is the exception.
        raise RuntimeError("; ".join(errors.strip().splitlines()[-1] for _, errors in printed if errors.strip()))
    return read_result(printed[0][0])


def backends() -> list[str]:
    """Backends of torch.distributed that work here, with their versions."""
    found = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available() and torch.cuda.is_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found.append(f"nccl {'.'.join(map(str, version))}")
    return found


def read_result(printed: str) -> dict[str, Any]:
    """What rank 0 has printed, among whatever else there is."""
    _, found, value = printed.partition(_RESULT)
    if not found:
        raise RuntimeError("no rank has printed a result")
    result: dict[str, Any] = json.loads(found + value.splitlines()[0])
    return result


def _environment_of(rank: int) -> Mapping[str, str]:
    # With Slurm's variables, both processes would take the rank of this task. One thread each: they share this machine.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**kept, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def _measure(device: torch.device) -> dict[str, Any]:
    return {
        # Both as measured: a line through several sizes may have no latency, or no bandwidth, on a disturbed machine.
        "latency_seconds": _seconds(torch.zeros(_SMALL // 4, device=device)),
        "seconds_per_byte": _seconds(torch.zeros(_LARGE // 4, device=device)) / _LARGE,
        "backend": dist.get_backend(),
        "device": device.type,
    }


def _seconds(tensor: torch.Tensor) -> float:
    taken = []
    # One more than are counted: the first opens connections.
    for _ in range(1 + _REPETITIONS):
        # So that no rank's lateness counts as the wire's time.
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        taken.append(time.perf_counter() - began)
    # What disturbs a measurement only adds to it.
    return min(taken[1:])


def _main(rendezvous: str, kind: str) -> None:
    variables = os.environ
    # torchrun's variables win: within a Slurm job, several of its ranks share one task's.
    by_slurm = "SLURM_PROCID" in variables and "RANK" not in variables
    rank, size, local = (
        int(variables[name])
        for name in (
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if by_slurm else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
    )
    # By the argument, not by what this node has: the ranks must choose the same backend.
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=rendezvous, rank=rank, world_size=size
    )
    result = _measure(device)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # A worker thread of Gloo that still frees a tensor when the interpreter ends would abort the process.
    time.sleep(0.05)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
