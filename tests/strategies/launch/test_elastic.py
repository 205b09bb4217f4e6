"""Under a real torchrun: as many ranks as there are, whatever the Trainer was told, and trainings that lose some."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.comparing import distance
from tests.scripts import TIMEOUT, clean_environment

pytestmark = pytest.mark.slow

# Agents look after their ranks often, and miss each other after few seconds.
_QUICKLY = ("--monitor-interval", "0.1")
_RENDEZVOUS = "last_call_timeout=10,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=8"


class Agent(NamedTuple):
    options: Sequence[str]
    variables: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How the agents have ended, and what all of them have said."""

    codes: list[int]
    said: str


def nodes(*agents: Agent, at_least: int = 1) -> list[Agent]:
    """Agents that find each other, the first of which must outlive the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    common = ("--nnodes", f"{at_least}:{len(agents)}", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    return [
        Agent((*common, "--rdzv-conf", f"{_RENDEZVOUS},is_host={int(not number)}", *agent.options), agent.variables)
        for number, agent in enumerate(agents)
    ]


def torchrun(folder: Path, program: Sequence[str], agents: Sequence[Agent]) -> Ended:
    """Runs the program in the folder until all agents have ended; a hang becomes an error that shows what was said."""
    logs, started = [folder / f"agent-{number}.log" for number in range(len(agents))], []
    for agent, log in zip(agents, logs, strict=True):
        command = [sys.executable, "-m", "torch.distributed.run", *_QUICKLY, *agent.options, *program]
        with log.open("w") as file:
            variables = clean_environment(**agent.variables)
            started.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + TIMEOUT
    while any(one.poll() is None for one in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    codes = [one.poll() for one in started]
    for one in started:
        # It ends its ranks, too, which have sessions of their own.
        one.terminate()
        one.wait(60)
    said = "\n".join(log.read_text() for log in logs)
    assert None not in codes, f"not ended in time: {codes}\n{said}"
    return Ended([one.returncode for one in started], said)


STRATEGIES = ("zero1_custom", "ddp_tuned")
SAMPLES = 48
TRAINING = f"""
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy

KEEPING = {{"ddp_tuned": TunedDDPStrategy, "zero1_custom": ZeRO1Strategy, "zero3_custom": ZeRO3Strategy}}
START, RANK, LOCAL_RANK = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "LOCAL_RANK"))


def note(kind, **facts):
    with open(f"{{strategy}}/{{kind}}-{{START}}-{{RANK}}", "a") as file:
        file.write(json.dumps(facts) + "\\n")


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step
        note("train", step=step, samples=batch.flatten().tolist())
        ends = START == "0" and step == int(os.environ.get("AT", 5)) and "DIES" in os.environ
        if ends and strategy != sys.argv[-1]:
            raise InterruptedError
        if ends and os.environ["DIES"] in ("agent", LOCAL_RANK):
            if os.environ["DIES"] == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.layer(batch / {SAMPLES}) - batch / {SAMPLES}).square().mean()

    def validation_step(self, batch, batch_idx):
        note("validate", samples=batch.flatten().tolist())

    def on_train_start(self):
        trainer = self.trainer
        note("sees", ranks=trainer.world_size, nodes=trainer.num_nodes, devices=trainer.num_devices)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    loader = DataLoader(torch.arange({SAMPLES}.0).unsqueeze(1), batch_size=2, shuffle="KEEPS" in os.environ)
    for strategy in sys.argv[1:]:
        Path(strategy).mkdir(exist_ok=True)
        # One of them with the backend's own timeout.
        chosen = TunedDDPStrategy(timeout=None) if strategy == "ddp_tuned" else strategy
        if "KEEPS" in os.environ:
            chosen = KEEPING[strategy](keep_global_batch=True)
        trainer = Trainer(
            accelerator="cpu",
            strategy=chosen,
            devices=4 if "KEEPS" in os.environ else 2,
            num_nodes=2,
            max_epochs=int(os.environ.get("EPOCHS", 1)),
            logger=False,
            callbacks=[ModelCheckpoint(dirpath=f"{{strategy}}/saved", save_last=True, every_n_train_steps=2)],
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with suppress(InterruptedError):
            trainer.fit(Tiny(), loader, loader, ckpt_path="last")
"""


def noted(folder: Path, kind: str, start: int) -> list[list[dict[str, Any]]]:
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
    agents = [Agent(("--standalone", "--nproc-per-node", "2", "--max-restarts", "2"), {"DIES": "1"})]
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


# Ranks, and the step at which one of them is killed. Checkpoints are saved after every second step.
COME_AND_GO = ((4, 3), (2, 6), (4, 9), (3, None))


def trained(folder: Path, strategies: Sequence[str], ranks: int, killed_at: int | None) -> list[dict[int, list[float]]]:
    """Trains two epochs, or as far as a rank is killed under the last strategy, and the others end by an exception.

    Returns, for each strategy in the order of names, the samples of each step that was begun.
    """
    folder.mkdir(exist_ok=True)
    variables = {"KEEPS": "1", "EPOCHS": "2"} | ({} if killed_at is None else {"DIES": "1", "AT": str(killed_at)})
    options = ("--standalone", "--max-restarts", "0", "--nproc-per-node", str(ranks))
    ended = torchrun(folder, write_training(folder, *strategies), [Agent(options, variables)])
    assert (ended.codes == [0]) is (killed_at is None), ended.said
    found = []
    for strategy in sorted(strategies):
        samples: dict[int, list[float]] = {}
        for one in (one for rank in noted(folder / strategy, "train", 0) for one in rank):
            samples.setdefault(one["step"], []).extend(one["samples"])
        for file in (folder / strategy).glob("train-*"):
            file.unlink()
        found.append({step: sorted(of_step) for step, of_step in samples.items()})
    return found


def test_ranks_come_and_go_and_steps_keep_their_samples(tmp_path: Path) -> None:
    alone, other = tmp_path / "alone", tmp_path / "other"
    strategies = ["ddp_tuned", "zero1_custom", "zero3_custom"]
    expected = trained(alone, strategies, 4, None)
    samples: list[dict[int, list[float]]] = [{} for _ in strategies]
    for number, (ranks, killed_at) in enumerate(COME_AND_GO):
        # Each strategy has a rank killed once.
        order = [*strategies[number:], *strategies[:number]]
        for seen, begun in zip(samples, trained(other, order, ranks, killed_at), strict=True):
            seen |= begun
    assert samples == expected and all(len(steps) == 12 for steps in samples)
    for strategy in strategies:
        ours, theirs = [torch.load(one / strategy / "saved/last.ckpt", weights_only=False) for one in (other, alone)]
        assert distance(ours["state_dict"], theirs["state_dict"]) <= 1e-6 and ours["global_step"] == 12


TORCHELASTIC = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
    **{"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
}
"""Of the first of two ranks on one node."""
BY_HAND = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
"""What a program does not set that sets the others itself."""


class Own(TorchElasticEnvironment):
    """A user's own."""


# The Trainer's devices, nodes and environment, and variables that are missing; then nodes, devices, replicas of the
# sampler, and whether the Trainer's numbers are said not to count.
TOLD: list[tuple[int, int, Any, tuple[str, ...], tuple[int, int, int, bool]]] = [
    (2, 1, None, (), (1, 2, 2, False)),
    (3, 2, None, (), (1, 2, 2, True)),
    (2, 2, Own, (), (1, 2, 2, True)),
    (3, 2, LightningEnvironment, (), (2, 3, 6, False)),
    # The data are cut among the ranks that join, whatever the Trainer was told.
    (3, 2, None, BY_HAND, (2, 3, 2, False)),
]


def trainer(monkeypatch: pytest.MonkeyPatch, devices: int, nodes: int, environment: Any, without: Any = ()) -> Trainer:
    for name, value in TORCHELASTIC.items():
        monkeypatch.delenv(name, raising=False) if name in without else monkeypatch.setenv(name, value)
    plugins = [] if environment is None else [environment()]
    quiet: Any = {"logger": False, "enable_checkpointing": False, "plugins": plugins}
    return Trainer(accelerator="cpu", strategy="zero1_custom", devices=devices, num_nodes=nodes, **quiet)


def test_what_the_trainer_was_told_counts_where_torchelastic_does_not(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for *told, expected in TOLD:
        recwarn.clear()
        made = trainer(monkeypatch, *told)
        said = any("torchrun has started" in str(one.message) for one in recwarn)
        replicas = made.distributed_sampler_kwargs["num_replicas"]
        assert (made.num_nodes, made.num_devices, replicas, said) == expected, told
    with pytest.raises(MisconfigurationException, match="`devices=2`"):
        trainer(monkeypatch, 1, 2, None)
