"""A process ends as its training has, also where the store has not answered its last heartbeat."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import clean_environment

PROGRAM = """
import os, signal, subprocess, sys, time
import torch.distributed as dist
from lightning_parstrat.distributed.comm.liveness import Liveness
from lightning_parstrat.distributed.comm.watch import begin_watch, end_watch

class Interpreter:
    def __del__(self):
        # Whatever is alive at the end is freed while the interpreter is torn down.
        print("is torn down", flush=True)
        time.sleep(6)

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
begin_watch(Liveness("training"), "zero1_custom", 1.5)
dist.barrier()
if rank == 0:
    # It serves the store: which does not answer, and is lost while rank 1 ends.
    subprocess.Popen(["sh", "-c", f"sleep 8; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(2)
end_watch("ended its training")
interpreter = Interpreter()
print("has ended its training", flush=True)
"""


@pytest.mark.slow
def test_a_store_that_is_lost_while_the_interpreter_is_torn_down_does_not_abort_the_process(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": clean_environment()}
    ranks = [subprocess.Popen([sys.executable, str(path), str(rank), port], **pipes) for rank in range(2)]
    try:
        output = ranks[1].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == 0, output
    assert "has ended its training\n" in output and output.endswith("is torn down\n"), output
