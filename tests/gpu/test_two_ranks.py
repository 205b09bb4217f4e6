"""Two ranks over NCCL, on one GPU if need be, each as a host of its own; skipped where NCCL refuses that.

The tables of trainings have what two ranks train. Here are failures.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ranks import free_port
from tests.gpu.run import ROOT
from tests.gpu.trainings import Layers, fit
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP64
from tests.strategies.parity import by_flag, ddp, largest_difference, train


def synchronise_batch_norm() -> tuple[float, float]:
    expected, actual, own = (
        train(lambda: zoo.BatchNormalised(), strategy, sync_batchnorm=synchronised, precision="64-true")
        for strategy, synchronised in ((ddp(), True), (by_flag(), True), (by_flag(), False))
    )
    return largest_difference(actual, expected), largest_difference(own, expected)


@pytest.mark.slow
def test_batch_norm_is_synchronised_as_under_ddp(two: RankPool, cuda: str) -> None:
    # On CPU neither torch's layer nor its DDP does this.
    for difference, without in two.run(2, synchronise_batch_norm):
        assert difference <= FP64 and without > 1e-3


def refusal() -> str:
    try:
        fit(Layers(), by_flag(process_group_backend="gloo"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_gloo_is_refused_before_training_where_parameters_are_on_a_gpu(device: str) -> None:
    over_gloo = RankPool(device, "gloo")
    refused = over_gloo.run(2, refusal)
    over_gloo.close()
    if device == "cpu":
        assert refused == ["", ""]
    else:
        assert all("process_group_backend" in said and "NCCL" in said for said in refused), refused


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_running_out_of_memory_on_one_rank_ends_the_training_on_all(
    two: RankPool, tmp_path: Path, where: str, stage: str
) -> None:
    port, processes = str(free_port()), []
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    for rank in range(2):
        environment = {
            **{"RANK": str(rank), "GROUP_RANK": str(rank), "NODE_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            **{"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"},
            # After an error of NCCL's, torch keeps the process for four times as long.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
        }
        command = [sys.executable, "-m", "tests.gpu.out_of_memory", two.device, where, stage]
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log)
            )
    try:
        codes = [process.wait(timeout=75) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [log.read_text() for log in logs]
    shown = "\n".join(one[-4000:] for one in said)
    assert 0 not in codes, shown
    assert "OutOfMemoryError" in said[1] and "still there" not in said[0], shown
    # By an error, not by the end of its time, with the stack of each thread.
    assert re.search(r"(MissingRanks|Runtime|Dist\w*)Error", said[0]) and "Timeout (" not in said[0], shown
