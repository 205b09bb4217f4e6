"""Programs whose ranks wait for one that sleeps, was stopped or killed, does something else, or has been cut off."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.scripts import clean_environment, run_python
from tests.slow import lack

pytestmark = pytest.mark.slow

TRAINING = """
import datetime, os, signal, subprocess, sys, threading, time
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.waits(self.global_rank)
        return super().training_step(batch, batch_idx)

    def waits(self, rank):
        WAITS

    def stops(self, seconds):
        # Another process: this one is stopped.
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    cls = {"zero1_custom": ZeRO1Strategy, "ddp_tuned": TunedDDPStrategy}["STRATEGY"]
    strategy = cls(warn_after_seconds=AFTER, timeout=datetime.timedelta(seconds=30), process_group_backend="gloo")
    trainer = Trainer(
        accelerator="cpu", devices=DEVICES, num_nodes=NODES, strategy=strategy, max_steps=5, logger=False,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model())
    left = [thread.name for thread in threading.enumerate() if "lightning_parstrat" in thread.name]
    print(f"rank {trainer.global_rank} is done, threads left: {left}", flush=True)
"""


def program(folder: Path, strategy: str, waits: str, after: str = "1.5", nodes: int = 1) -> Path:
    path = folder / "train.py"
    chosen = {"WAITS": waits, "STRATEGY": strategy, "AFTER": after, "NODES": str(nodes), "DEVICES": str(3 - nodes)}
    text = TRAINING
    for name, value in chosen.items():
        text = text.replace(name, value)
    path.write_text(text)
    return path


def run_nodes(
    path: Path, address: str, environment: dict[str, str], prefixes: Sequence[Sequence[str]] = ((), ())
) -> tuple[list[str], list[int]]:
    """What a program prints on two nodes of a rank each, and how it ends there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for node, prefix in enumerate(prefixes):
        of_node = {
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "NODE_RANK": str(node),
            "LOCAL_RANK": "0",
            **environment,
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*prefix, sys.executable, str(path)]
        ranks.append(subprocess.Popen(command, cwd=path.parent, env=clean_environment(**of_node), **pipes))
    try:
        return [rank.communicate(timeout=150)[0] for rank in ranks], [rank.returncode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


DONE = "rank 0 is done, threads left: []", "rank 1 is done, threads left: []"
STRATEGIES = ("zero1_custom", "ddp_tuned")


@pytest.mark.parametrize(
    ("strategy", "waits", "where"),
    [
        ("zero1_custom", "rank == 1 and time.sleep(6)", r"rank 1, which is in `training_step` \(.*\) at train\.py:"),
        ("ddp_tuned", "rank == 1 and time.sleep(6)", r"rank 1, which is in `training_step` \(.*\) at train\.py:"),
        (
            "zero1_custom",
            "rank == 1 and self.stops(8)",
            r"rank 1, which has given no sign of life for \d+ s .*stopped.* was last in ",
        ),
        (
            "ddp_tuned",
            "rank == 1 and self.stops(8)",
            r"rank 1, which has given no sign of life for \d+ s .*stopped.* was last in ",
        ),
        ("zero1_custom", "rank == 0 and self.stops(8)", "the store does not answer, which rank 0's process "),
    ],
)
def test_ranks_that_come_late_are_named_and_training_goes_on(
    tmp_path: Path, strategy: str, waits: str, where: str
) -> None:
    ended = run_python([program(tmp_path, strategy, waits)], tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert re.search(rf"^{strategy}: rank \d has waited \d+ s .*{where}", output, re.MULTILINE), output
    assert all(line in output for line in DONE), output


BRANCH = 'rank == 0 and self.log("x", torch.tensor(1.0), sync_dist=True)'


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_in_different_collectives_are_both_named_and_so_does_the_error_of_the_timeout(
    tmp_path: Path, strategy: str
) -> None:
    ended = run_python([program(tmp_path, strategy, BRANCH)], tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0, output
    in_log = r"in `training_step` \(step 2, .*\) at train\.py:\d+"
    elsewhere = {"zero1_custom": "in `", "ddp_tuned": "in `backward` (step 2, "}[strategy]
    said = re.findall(rf"^{strategy}: rank \d has waited .*$", output, re.MULTILINE)
    assert said and re.search(in_log, said[0]) and elsewhere in said[0], output
    # As torch names the rank of a traceback.
    noted = re.findall(rf"^(?:\[rank\d\]: )?({strategy}: rank \d has waited .*)$", output, re.MULTILINE)
    assert len(noted) > len(said), output
    assert all(re.search(in_log, line) and elsewhere in line for line in noted), output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_after_a_rank_was_killed_names_it(tmp_path: Path, strategy: str) -> None:
    waits = "rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    # As nodes: of processes that it has started itself, Lightning ends all as soon as it finds one gone.
    outputs, codes = run_nodes(program(tmp_path, strategy, waits, nodes=2), "127.0.0.1", {})
    assert 0 not in codes, outputs
    assert re.search(rf"{strategy}: rank 0 has waited .* for rank 1, which ", outputs[0]), outputs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_raises_is_named(tmp_path: Path, strategy: str) -> None:
    # The program's end would end the other, too.
    waits = """
        if rank == 1:
            threading.Timer(20, lambda: None).start()
            raise ValueError("this rank alone")
    """.strip()
    ended = run_python([program(tmp_path, strategy, waits)], tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0, output
    assert re.search(rf"{strategy}: rank 0 .* for rank 1, which ended its training by ValueError", output), output


ADDRESSES = "10.78.0.1", "10.78.0.2"


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces and a wire between them, as of two nodes."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lack("network namespaces need root and iproute2")
    names = [f"parstrat-wait-{os.getpid()}-{node}" for node in range(2)]

    def ip(*arguments: str) -> None:
        ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            lack(f"network namespaces cannot be had: {ran.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for interface in ("lo", "link0"):
                ip("-n", name, "link", "set", interface, "up")
            ip("netns", "exec", name, "true")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


CUT = """
        if rank == 1:
            cut = "ip link set link0 down; sleep SECONDS; ip link set link0 up"
            subprocess.Popen(["sh", "-c", cut], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.5)
""".strip()


@pytest.mark.parametrize(("strategy", "seconds"), [("zero1_custom", 10), ("ddp_tuned", 10), ("zero1_custom", 60)])
def test_a_wire_that_is_cut_is_spoken_of(tmp_path: Path, namespaces: list[str], strategy: str, seconds: int) -> None:
    path = program(tmp_path, strategy, CUT.replace("SECONDS", str(seconds)), nodes=2)
    prefixes = [["ip", "netns", "exec", name] for name in namespaces]
    outputs, codes = run_nodes(path, ADDRESSES[0], {"GLOO_SOCKET_IFNAME": "link0"}, prefixes)
    # Rank 0's process serves the store, which rank 1 cannot reach.
    assert re.search(
        rf"{strategy}: rank 0 has waited .*rank 1, which has given no sign of life for \d+ s .*cut off", outputs[0]
    ), outputs
    assert re.search(rf"{strategy}: rank 1 has waited .* the store does not answer", outputs[1]), outputs
    if seconds < 30:
        # A thread of the rank that could not reach the store may still be waiting for TCP to send again.
        assert codes == [0, 0] and all(f"rank {rank} is done" in outputs[rank] for rank in range(2)), outputs
    else:
        assert 0 not in codes, outputs
