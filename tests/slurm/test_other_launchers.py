"""The same program under mpirun. Trainings under torchrun are in tests/strategies/launch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import clean_environment
from tests.slow import lack
from tests.slurm.jobs import write_program

pytestmark = pytest.mark.cluster
MPI4PY = Path(sys.prefix) / "mpi"


def test_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None or not MPI4PY.exists():
        lack("needs OpenMPI and mpi4py: make test-cluster installs them")
    write_program(tmp_path, steps=5, devices=2)
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable)
    done = subprocess.run(
        [*command, "train.py", "fit", "--config", "c.yaml"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(MPI4PY)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "trained 5 on 2 by ZeRO1Strategy" in done.stdout, done.stdout + done.stderr
