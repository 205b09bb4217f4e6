"""Runs the processes of a row, and ends them: they succeed together, within a limit of time, or there is a reason."""

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ranks import RankGroup, clean_up_on_sigterm, free_port, rank_environment

_KEPT_LINES = 30
_OF_AN_ERROR = re.compile(r"^(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|Interrupt)\b")


class Failure(Exception):
    """Processes did not succeed.

    Args:
        reason: Why, in a line.
        lines: The end of what the process printed that failed first.
    """

    def __init__(self, reason: str, lines: Sequence[str]) -> None:
        super().__init__(reason)
        self.reason, self.lines = reason, list(lines)


def run_processes(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], seconds: float) -> None:
    """Runs one process for each command, all at once; none of them is left when this returns or raises.

    Args:
        commands: Of each.
        environments: What is added to this process's, of each.
        seconds: After which they are ended.

    Raises:
        Failure: One has failed, or they did not end in time.
    """
    clean_up_on_sigterm()
    with RankGroup(shown=False) as group:
        for command, environment in zip(commands, environments, strict=True):
            group.start(command, environment)
        failed, running = group.first_failed(seconds), group.running()
        if failed is not None:
            lines = group.last_lines(failed, _KEPT_LINES)
            raise Failure(_reason(lines, group.code(failed)), lines)
        if running:
            raise Failure(f"it was ended after {seconds:.0f} s", group.last_lines(running[0], _KEPT_LINES))


def environments_of(ranks: int) -> list[dict[str, str]]:
    """What tells processes that they are one rank each, and NCCL that each of them has a host of its own.

    NCCL refuses two ranks on one GPU of one host. Nothing leaves the machine, which may have no network.
    """
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if ranks == 1:
        return [local]
    port = free_port()
    found = []
    for rank in range(ranks):
        # As many nodes of one rank: each takes the GPU that its node has.
        known = rank_environment(rank, 0, ranks, 1, "127.0.0.1", port)
        found.append({**local, **known, "TORCHELASTIC_RUN_ID": f"benchmark-{port}", "NCCL_HOSTID": f"rank{rank}"})
    return found


def _reason(lines: Sequence[str], code: int) -> str:
    errors = [line for line in lines if _OF_AN_ERROR.match(line)]
    said = (errors or lines or ["it printed nothing"])[-1].strip()
    ended = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    return f"{ended}: {said[:500]}"


def python(*arguments: str) -> list[str]:
    """A command that runs a module by this interpreter."""
    return [sys.executable, "-m", *arguments]


def read_json_if_there(path: Path) -> str | None:
    """What a process has written, if it has."""
    return path.read_text() if path.is_file() else None
