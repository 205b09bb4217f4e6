"""Under a real torchrun: as many ranks as there are, whatever the Trainer was told, and trainings that lose some."""

import json
import signal
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import Agent, nodes, one_node, torchrun

pytestmark = pytest.mark.slow

STRATEGIES = ("zero1_custom", "ddp_tuned")
SAMPLES = 48
TRAINING = f"""
import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

START, RANK, LOCAL_RANK = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "LOCAL_RANK"))


def note(kind, **facts):
    with open(f"{{strategy}}/{{kind}}-{{START}}-{{RANK}}", "a") as file:
        file.write(json.dumps(facts) + "\\n")


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step
        note("train", step=step, samples=batch.flatten().tolist())
        if START == "0" and step == 5 and os.environ.get("DIES") in ("agent", LOCAL_RANK):
            if os.environ["DIES"] == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch / {SAMPLES}).square().mean()

    def validation_step(self, batch, batch_idx):
        note("validate", samples=batch.flatten().tolist())

    def on_train_start(self):
        trainer = self.trainer
        note("sees", ranks=trainer.world_size, nodes=trainer.num_nodes, devices=trainer.num_devices)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    loader = DataLoader(torch.arange({SAMPLES}.0).unsqueeze(1), batch_size=2)
    for strategy in sys.argv[1:]:
        Path(strategy).mkdir(exist_ok=True)
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=2,
            num_nodes=2,
            max_epochs=1,
            logger=False,
            callbacks=[ModelCheckpoint(dirpath=f"{{strategy}}/saved", save_last=True, every_n_train_steps=2)],
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Tiny(), loader, loader, ckpt_path="last")
"""


def noted(folder: Path, kind: str, start: int) -> list[list[dict[str, Any]]]:
    """What each rank of a start has noted."""
    files = sorted(folder.glob(f"{kind}-{start}-*"), key=lambda file: int(file.name.split("-")[-1]))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def steps(folder: Path, start: int) -> list[list[int]]:
    return [[one["step"] for one in rank] for rank in noted(folder, "train", start)]


def check_loss(folder: Path, ranks: int) -> None:
    """The step at which one was lost was begun by that one; whoever was slower may have been ended before it."""
    lost = list(range(6))
    begun = steps(folder, 0)
    assert len(begun) == ranks and lost in begun and all(one in (lost, lost[:-1]) for one in begun)


def write_training(folder: Path, *strategies: str) -> list[str]:
    (folder / "train.py").write_text(TRAINING)
    return ["train.py", *strategies]


def test_the_ranks_that_there_are_share_the_data(tmp_path: Path) -> None:
    # Three, two of them on one node: no number of devices times a number of nodes is what there is.
    agents = nodes(Agent(("--nproc-per-node", "2")), Agent(("--nproc-per-node", "1")), at_least=2)
    ended = torchrun(tmp_path, write_training(tmp_path, *STRATEGIES), agents)
    assert not any(ended.codes), ended.said
    # By two Trainers, to whom it is the same.
    assert ended.said.count("torchrun has started") == 1 and "asks for 4 ranks" in ended.said
    ranks = 3
    for folder in (tmp_path / strategy for strategy in STRATEGIES):
        seen = [one for rank in noted(folder, "sees", 0) for one in rank]
        assert [one["ranks"] for one in seen] == [ranks] * ranks
        assert sorted((one["nodes"], one["devices"]) for one in seen) == [(2, 1), (2, 2), (2, 2)]
        assert steps(folder, 0) == [list(range(SAMPLES // 2 // ranks))] * ranks
        for kind in ("train", "validate"):
            drawn = [{sample for one in rank for sample in one["samples"]} for rank in noted(folder, kind, 0)]
            assert len(drawn) == ranks and set.union(*drawn) == set(range(SAMPLES))
            assert all(one.isdisjoint(other) for one, other in combinations(drawn, 2))


def test_a_training_that_loses_a_rank_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    agents = one_node(2, "--max-restarts", "2", DIES="1")
    ended = torchrun(tmp_path, write_training(tmp_path, "ddp_tuned"), agents)
    assert ended.codes == [0], ended.said
    check_loss(tmp_path / "ddp_tuned", 2)
    assert steps(tmp_path / "ddp_tuned", 1) == [list(range(4, 12))] * 2
    assert steps(tmp_path / "ddp_tuned", 2) == []


def test_a_training_that_loses_a_node_goes_on_with_the_other(tmp_path: Path) -> None:
    restarts = ("--max-restarts", "2", "--nproc-per-node")
    agents = nodes(Agent((*restarts, "2")), Agent((*restarts, "1"), {"DIES": "agent"}))
    ended = torchrun(tmp_path, write_training(tmp_path, "zero1_custom"), agents)
    assert ended.codes == [0, -signal.SIGKILL], ended.said
    folder = tmp_path / "zero1_custom"
    check_loss(folder, 3)
    # Of the 8 steps that three ranks have in an epoch 4 are done; what is left of its samples takes two ranks 6.
    assert steps(folder, 1) == [list(range(4, 10))] * 2
    assert noted(folder, "sees", 1) == [[{"ranks": 2, "nodes": 1, "devices": 2}]] * 2


TRAINERS = """
import json
import os
import sys
import warnings

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment


class Own(TorchElasticEnvironment):
    pass


def outcome(environment=None, without=(), **told):
    kept = {name: os.environ.pop(name) for name in without}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = Trainer(
                accelerator="cpu", strategy="zero1_custom", logger=False, enable_checkpointing=False,
                plugins=[] if environment is None else [environment], **told
            )
        said = [str(one.message) for one in caught if "torchrun has started" in str(one.message)]
        return [trainer.num_nodes, trainer.num_devices, trainer.distributed_sampler_kwargs["num_replicas"], len(said)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.update(kept)


if __name__ == "__main__":
    by_hand = ["LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
    outcomes = {
        "told rightly": outcome(devices=2),
        "told of more": outcome(devices=3, num_nodes=2),
        "told of too few devices": outcome(devices=1, num_nodes=2),
        "own torchelastic": outcome(environment=Own(), devices=2, num_nodes=2),
        "own environment": outcome(environment=LightningEnvironment(), devices=3, num_nodes=2),
        "variables by hand": outcome(without=by_hand, devices=3, num_nodes=2),
    }
    with open(f"outcomes-{os.environ['RANK']}", "w") as file:
        json.dump(outcomes, file)
"""


def test_what_the_trainer_was_told_counts_where_torchelastic_does_not(tmp_path: Path) -> None:
    (tmp_path / "trainers.py").write_text(TRAINERS)
    ended = torchrun(tmp_path, ["trainers.py"], one_node(2))
    assert ended.codes == [0], ended.said
    for rank in range(2):
        outcomes = json.loads((tmp_path / f"outcomes-{rank}").read_text())
        said = int(rank == 0)
        too_few = outcomes.pop("told of too few devices")
        assert too_few.startswith("MisconfigurationException") and "`devices=2`" in too_few
        assert outcomes == {
            "told rightly": [1, 2, 2, 0],
            "told of more": [1, 2, 2, said],
            "own torchelastic": [1, 2, 2, said],
            "own environment": [2, 3, 6, 0],
            "variables by hand": [2, 3, 6, 0],
        }
