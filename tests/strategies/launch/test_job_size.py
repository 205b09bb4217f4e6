"""Slurm jobs of another size than the Trainer asks for: refused, with the line of the job file to change."""

import json

import pytest

from lightning_parstrat.strategies.launch.job_size import wrong_job_size
from tests.scripts import run_script

PER_NODE = "`#SBATCH --ntasks-per-node=2`"
INSTEAD = f"{PER_NODE} instead of `--ntasks`"
# What Slurm sets: SLURM_NNODES, SLURM_NTASKS and SLURM_NTASKS_PER_NODE. The Trainer has two nodes of two devices.
RIGHT = [(2, 4, 2), (None, 4, 2), (2, None, 2), (None, None, None)]
WRONG = {
    (2, 4, None): (f"write {INSTEAD} (", ["--nodes=2, --ntasks=4, no --ntasks-per-node"]),
    (2, 8, None): (f"write {INSTEAD} (", ["give the Trainer num_nodes=2 and devices=4"]),
    (2, 5, None): (f"write {INSTEAD} (", ["5 tasks cannot be divided evenly among 2 nodes"]),
    (1, 4, None): (f"write `#SBATCH --nodes=2` and {INSTEAD} (", ["--nodes=1, --ntasks=4"]),
    (2, 1, None): (f"write {INSTEAD} (", ["--ntasks=1, no --ntasks-per-node"]),
    (2, 2, 1): (f"write {PER_NODE} (", ["--ntasks-per-node=1", "num_nodes=2 and devices=1"]),
    (2, 8, 4): (f"write {PER_NODE} (", ["--ntasks-per-node=4", "num_nodes=2 and devices=4"]),
    (1, 2, 2): ("write `#SBATCH --nodes=2` (", ["num_nodes=1 and devices=2"]),
    (3, 3, 1): (f"write `#SBATCH --nodes=2` and {PER_NODE} (", ["num_nodes=3 and devices=1"]),
    # With both, Slurm takes --ntasks-per-node for the most that a node may have.
    (2, 3, 2): (f"write {INSTEAD} (", ["3 tasks cannot be divided evenly among 2 nodes"]),
}  # fmt: skip


def variables(nodes: int | None, tasks: int | None, per_node: int | None) -> dict[str, str]:
    values = {"SLURM_NNODES": nodes, "SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": per_node}
    return {name: str(value) for name, value in values.items() if value is not None}


@pytest.mark.parametrize("job", RIGHT)
def test_a_job_of_the_right_size(job: tuple[int | None, int | None, int | None]) -> None:
    assert wrong_job_size(variables(*job), num_nodes=2, devices=2) is None


def test_one_task_needs_no_number_per_node() -> None:
    assert wrong_job_size(variables(1, 1, None), num_nodes=1, devices=1) is None


@pytest.mark.parametrize("job", WRONG)
def test_a_job_of_the_wrong_size_names_the_lines_to_change(job: tuple[int, int, int | None]) -> None:
    lines, words = WRONG[job]
    wrong = wrong_job_size(variables(*job), num_nodes=2, devices=2)
    assert wrong is not None
    assert all(word in wrong for word in (lines, "num_nodes=2 and devices=2: 2 tasks on each node", *words)), wrong


def test_a_variable_that_is_no_number_is_passed_over() -> None:
    assert wrong_job_size({"SLURM_NNODES": "2-4", "SLURM_NTASKS": "2"}, num_nodes=1, devices=2) is not None
    assert wrong_job_size({"SLURM_NTASKS": "all"}, num_nodes=1, devices=2) is None


IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ASKED_FOR_BY_NTASKS = {**IN_JOB, "SLURM_NODEID": "0", **variables(2, 4, None)}
JOBS = {
    "by --ntasks": ASKED_FOR_BY_NTASKS,
    "with a task per node": {**ASKED_FOR_BY_NTASKS, **variables(2, 2, 1)},
    "of the right size": {**ASKED_FOR_BY_NTASKS, **variables(2, 4, 2)},
    "of an interactive shell": {**ASKED_FOR_BY_NTASKS, "SLURM_JOB_NAME": "interactive"},
    "whose variables were set by hand": {**ASKED_FOR_BY_NTASKS, **variables(2, 2, 1), "SLURM_JOB_ID": ""},
}
# The strategies are objects or names; the first four are ours.
TRAINERS = f"""
import json, os, warnings
warnings.simplefilter("ignore")
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

class OtherSlurm(SLURMEnvironment):
    @staticmethod
    def _validate_srun_variables():
        pass

def build(strategy, plugins=()):
    try:
        Trainer(accelerator="cpu", strategy=strategy, num_nodes=2, devices=2, logger=False, plugins=list(plugins))
        return "built"
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

said = {{}}
for name, variables in {JOBS!r}.items():
    os.environ.pop("SLURM_NTASKS_PER_NODE", None)
    os.environ.update(variables)
    if not os.environ["SLURM_JOB_ID"]:
        del os.environ["SLURM_JOB_ID"]
    said[name] = {{
        "zero1_custom": build("zero1_custom"),
        "ddp_tuned": build("DDP_tuned_find_unused_parameters_true"),
        "ZeRO1Strategy": build(ZeRO1Strategy()),
        "TunedDDPStrategy": build(TunedDDPStrategy()),
        "ddp": build("ddp"),
        "DDPStrategy": build(DDPStrategy()),
        "auto": build("auto"),
        "elsewhere": build("zero1_custom", [LightningEnvironment()]),
        "derived": build("zero1_custom", [OtherSlurm()]),
    }}
print("said", json.dumps(said))
"""
OURS = ("zero1_custom", "ddp_tuned", "ZeRO1Strategy", "TunedDDPStrategy")
STOCK = ("ddp", "DDPStrategy", "auto")
REFUSED = "MisconfigurationException: The Trainer asks for num_nodes=2 and devices=2"
HINT = "You set `--ntasks=4` in your SLURM bash script, but this variable is not supported."


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each Trainer says in each job, all in one process: importing Lightning takes longest."""
    printed = run_script(TRAINERS, tmp_path_factory.mktemp("jobs"), environment=ASKED_FOR_BY_NTASKS)
    (line,) = (line for line in printed.splitlines() if line.startswith("said "))
    return json.loads(line.removeprefix("said "))


@pytest.mark.slow
def test_lightning_itself_refuses_tasks_that_are_not_given_by_node(said: dict[str, dict[str, str]]) -> None:
    answers = said["by --ntasks"]
    for name in (*OURS, *STOCK):
        assert answers[name].startswith(f"RuntimeError: {HINT}")
    # Users who look for their ranks elsewhere know better.
    assert answers["elsewhere"] == answers["derived"] == "built"


@pytest.mark.slow
def test_other_sizes_are_refused_when_the_trainer_is_built(said: dict[str, dict[str, str]]) -> None:
    answers = said["with a task per node"]
    for name in OURS:
        assert answers[name].startswith(REFUSED) and f"write {PER_NODE} (" in answers[name]
    # Under others Lightning looks when the training starts.
    assert {answers[name] for name in (*STOCK, "elsewhere", "derived")} == {"built"}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["of the right size", "of an interactive shell", "whose variables were set by hand"])
def test_healthy_jobs_are_left_alone(said: dict[str, dict[str, str]], job: str) -> None:
    assert set(said[job].values()) == {"built"}
