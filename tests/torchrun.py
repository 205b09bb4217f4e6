"""Runs programs under torchrun's agents, several beside each other where they are to be several nodes."""

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.scripts import TIMEOUT, clean_environment

# Agents look after their ranks often, and miss each other after few seconds.
_QUICKLY = ("--monitor-interval", "0.1")
_RENDEZVOUS = "last_call_timeout=10,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=8"


class Agent(NamedTuple):
    """One call of torchrun."""

    options: Sequence[str]
    variables: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How the agents have ended, and what all of them have said."""

    codes: list[int]
    said: str


def one_node(ranks: int, *options: str, **variables: str) -> list[Agent]:
    """An agent that finds a port by itself."""
    return [Agent(("--standalone", "--nproc-per-node", str(ranks), *options), variables)]


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


def torchrun(folder: Path, program: Sequence[str], agents: Sequence[Agent], timeout: float = TIMEOUT) -> Ended:
    """Runs the program in the folder until all agents have ended; a hang becomes an error that shows what was said."""
    logs = [folder / f"agent-{number}.log" for number in range(len(agents))]
    started = [_start(folder, program, agent, log) for agent, log in zip(agents, logs, strict=True)]
    deadline = time.monotonic() + timeout
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


def _start(folder: Path, program: Sequence[str], agent: Agent, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torch.distributed.run", *_QUICKLY, *agent.options, *program]
    environment = clean_environment(**agent.variables)
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
