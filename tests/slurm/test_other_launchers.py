"""The same program under torchrun and mpirun."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import clean_environment
from tests.slow import lack
from tests.slurm.jobs import write_program

pytestmark = pytest.mark.cluster
SECONDS = 120
MPI4PY = Path(sys.prefix) / "mpi"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FIT = ("train.py", "fit", "--config", "c.yaml")
TRAINED = "trained 5 on {} by {}"
STRATEGIES = pytest.mark.parametrize(
    ("strategy", "kind"), [("zero1_custom", "ZeRO1Strategy"), ("zero3_custom", "ZeRO3Strategy")]
)


def run(folder: Path, *commands: tuple[str, ...], **variables: str) -> str:
    """Runs commands beside each other, which must all succeed."""
    environment = clean_environment(**variables)
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        said = "\n".join(one.communicate(timeout=SECONDS)[0] for one in started)
    finally:
        for one in started:
            one.kill()
    assert all(one.returncode == 0 for one in started), said
    return said


@STRATEGIES
def test_torchrun_on_one_node(tmp_path: Path, strategy: str, kind: str) -> None:
    write_program(tmp_path, steps=5, devices=2, strategy=strategy)
    command = (*TORCHRUN, "--standalone", "--nproc_per_node", "2", *FIT)
    assert TRAINED.format(2, kind) in run(tmp_path, command)


@STRATEGIES
def test_two_agents_of_torchrun_as_two_nodes(tmp_path: Path, strategy: str, kind: str) -> None:
    write_program(tmp_path, steps=5, devices=2, num_nodes=2, strategy=strategy)
    agents = [
        (*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "2", "--node_rank", str(node), "--master_addr", "127.0.0.1",
         "--master_port", "29517", *FIT)
        for node in range(2)
    ]  # fmt: skip
    assert TRAINED.format(4, kind) in run(tmp_path, *agents)


def test_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None or not MPI4PY.exists():
        lack("needs OpenMPI and mpi4py: make test-cluster installs them")
    write_program(tmp_path, steps=5, devices=2)
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, *FIT)
    assert TRAINED.format(2, "ZeRO1Strategy") in run(tmp_path, command, PYTHONPATH=str(MPI4PY))
