"""Jobs on a real Slurm of two nodes: started, preempted, requeued, broken, and resumed. And a program under mpirun."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts import clean_environment
from tests.slow import lack
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Job, submit, write_program

pytestmark = pytest.mark.cluster
START = 90.0
"""Seconds until a job trains, with four processes that import torch on few cores."""
EXAMPLES = Path(__file__).parents[2] / "examples"
MPI4PY = Path(sys.prefix) / "mpi"


def wait_for_step(cluster: SlurmCluster, job: Job, run: int, step: int) -> None:
    cluster.wait_until(lambda: max(job.begun(run), default=-1) >= step, START, job.says)


def test_an_unmodified_program_trains_on_two_ranks_of_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_program(tmp_path, steps=5)
    job = submit(cluster, tmp_path)
    assert cluster.wait_for_end(job.number, START, job.says) == "COMPLETED", job.says()
    assert "trained 5 on 4 by ZeRO1Strategy" in job.rank(0)
    logs = sorted(job.folder.glob("rank-*.log"))
    assert [log.name for log in logs] == [f"rank-{rank}.log" for rank in range(4)]
    nodes = [re.findall(r"node (\S+) begins", log.read_text())[0] for log in logs]
    assert nodes == ["parnode1", "parnode1", "parnode2", "parnode2"]


def test_the_language_model_trains_and_a_job_that_fails_says_so(cluster: SlurmCluster, tmp_path: Path) -> None:
    program = (sys.executable, str(EXAMPLES / "lm/main.py"), "fit", "--config", str(EXAMPLES / "lm/configs/zero1.yaml"))
    small = ("--trainer.max_steps=4", "--trainer.limit_val_batches=1", "--trainer.logger=false", "--model.width=32")
    job = submit(cluster, tmp_path, program=(*program, *small))
    assert cluster.wait_for_end(job.number, START, job.says) == "COMPLETED", job.says()
    assert "`Trainer.fit` stopped: `max_steps=4` reached." in job.rank(0)
    failed = submit(cluster, tmp_path, program=(*program, "--model.width=31"))
    assert cluster.wait_for_end(failed.number, START, failed.says) == "FAILED"


def test_a_job_that_is_told_to_go_goes_on_where_it_was(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_program(tmp_path, steps=40, seconds=0.1)
    job = submit(cluster, tmp_path)
    for run in range(2):
        wait_for_step(cluster, job, run, step=3 + (job.begun(run) or [0])[0])
        cluster.run("scancel", "--signal=USR1", str(job.number))
        cluster.wait_until(lambda run=run: job.begun(run + 1), START, job.says)
        for rank in range(4):
            before, after = job.begun(run, rank), job.begun(run + 1, rank)
            # No step is lost, none is done again, and all ranks have ended with the same.
            assert after[0] == before[-1] + 1 == job.begun(run)[-1] + 1, job.says()
    assert cluster.wait_for_end(job.number, 90, job.says) == "COMPLETED"
    assert cluster.job(job.number)["Restarts"] == "2"
    steps = [step for run in range(3) for step in job.begun(run)]
    assert steps == list(range(40))
    assert "trained 40 on 4" in job.rank(0)


@pytest.mark.parametrize("how", ["signal", "requeue", "node"])
def test_a_job_that_is_taken_away_goes_on_from_its_last_checkpoint(
    cluster: SlurmCluster, tmp_path: Path, how: str
) -> None:
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"every_n_train_steps": 2, "save_last": True},
    }
    write_program(tmp_path, steps=60, seconds=0.1, enable_checkpointing=True, callbacks=[checkpoint])
    program = (sys.executable, "train.py", "fit", "--config", "c.yaml", "--ckpt_path=last")
    job = submit(cluster, tmp_path, program=program)
    wait_for_step(cluster, job, 0, step=6)
    if how == "signal":
        cluster.run("scancel", "--signal=USR1", str(job.number))
    elif how == "requeue":
        cluster.run("scontrol", "requeue", str(job.number))
    else:
        cluster.run("scontrol", "update", "NodeName=parnode2", "State=DOWN", "Reason=test")
        time.sleep(1)
        # It may have come back by itself.
        cluster.run("scontrol", "update", "NodeName=parnode2", "State=RESUME", check=False)
    cluster.wait_until(lambda: job.begun(1), START, job.says)
    assert job.begun(1)[0] >= 6, job.says()
    # What was saved at the signal is newer than the last of every two steps.
    assert how != "signal" or job.begun(1)[0] == job.begun(0)[-1] + 1, job.says()
    assert cluster.wait_for_end(job.number, 90, job.says) == "COMPLETED"
    assert job.begun(1)[-1] == 59


def test_torchrun_within_slurm_requeues_too(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_program(tmp_path, steps=40, seconds=0.1)
    torchrun = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint parnode1:29511"
    job_file = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=10
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=job.log
mkdir -p run && rm -f run/config.yaml
srun --open-mode=append --output=run/rank-0.log {sys.executable} -m torch.distributed.run {torchrun.split(" ", 1)[1]} \\
    train.py fit --config c.yaml --trainer.num_nodes=2 --trainer.devices=2 --trainer.default_root_dir=run
"""
    (tmp_path / "job.sh").write_text(job_file)
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env=cluster.environment, capture_output=True, text=True
    )
    job = Job(int(done.stdout), tmp_path / "run", tmp_path / "job.log")
    wait_for_step(cluster, job, 0, step=3)
    cluster.run("scancel", "--signal=USR1", str(job.number))
    assert cluster.wait_for_end(job.number, START + 90, job.says) == "COMPLETED", job.says()
    first, second = (sorted(set(job.begun(run))) for run in range(2))
    assert [*first, *second] == list(range(40)), job.says()


def test_doctor_asks_all_ranks_of_a_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job_file = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output={tmp_path}/doctor.log
srun {sys.executable} -m lightning_parstrat.cli.main doctor
echo ended with $?
"""
    (tmp_path / "job.sh").write_text(job_file)
    number = int(cluster.run("sbatch", "--parsable", str(tmp_path / "job.sh")))
    cluster.wait_for_end(number, START)
    said = (tmp_path / "doctor.log").read_text()
    assert "OK  process groups: 4 ranks over gloo\n" in said and said.count("OK  ") == 4, said
    assert "ended with 0" in said


def test_tune_runs_within_an_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_program(tmp_path, steps=1000, seconds=0.05)
    job_file = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output={tmp_path}/tune.log
cd {tmp_path}
{sys.executable} -m lightning_parstrat.cli.main tune --steps 25 -- \\
    srun {sys.executable} train.py fit --config c.yaml --trainer.num_nodes=2 --trainer.devices=1
echo ended with $?
"""
    (tmp_path / "job.sh").write_text(job_file)
    number = int(cluster.run("sbatch", "--parsable", str(tmp_path / "job.sh")))
    cluster.wait_for_end(number, 5 * START)
    said = (tmp_path / "tune.log").read_text()
    assert "ended with 0" in said, said
    measured = re.findall(r"^(\w+) +\d\.\d{3} s +\d\.\d{3} s", said, re.MULTILINE)
    # On a busy machine, waits may leave others out.
    assert {"zero1_custom", "ddp_tuned"} <= set(measured), said
    chosen = json.loads((tmp_path / "chosen.yaml").read_text().partition("\n")[0].removeprefix("#"))
    assert (chosen["nodes"], chosen["devices"]) == (2, 1)


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
