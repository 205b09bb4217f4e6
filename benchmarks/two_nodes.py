"""Two nodes on one machine, joined by a link as slow as wanted: network namespaces, a veth pair and `tc`.

    sudo python -m benchmarks.two_nodes --rate 1gbit
    sudo python -m benchmarks.two_nodes --rate 1gbit -- --strategies ddp zero1_custom zero2_custom --accumulate 4
    sudo python -m benchmarks.two_nodes --rate 200mbit --ranks-per-node 2 -- python train.py --num-nodes 2 --devices 2

What follows `--` runs as every rank, with the variables that torchrun sets; where it begins with an option, it is
passed to step_time.py, which runs by default. Each node has one core, which its ranks share. Needs root, iproute2 and
two cores; without them it says what is missing and ends with exit code 2.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from benchmarks.ranks import RankGroup, clean_up_on_sigterm, rank_environment

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_INTERFACE = "link0"
# The namespaces are new, so that no address and no port in them can be taken.
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29500


class CannotRun(Exception):
    """Something that this machine lacks."""


class ShapedLink:
    """Two network namespaces joined by a link of that rate in each direction, for as long as the context lasts."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self.namespaces = [f"parstrat-{os.getpid()}-{node}" for node in range(2)]

    def __enter__(self) -> "ShapedLink":
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        for namespace in self.namespaces:
            _run("ip", "netns", "add", namespace, wanted="network namespaces")
        first, second = self.namespaces
        ends = ("netns", first, "type", "veth", "peer", "name", _INTERFACE, "netns", second)
        _run("ip", "link", "add", _INTERFACE, *ends, wanted="a veth pair")
        for namespace, address in zip(self.namespaces, _ADDRESSES, strict=True):
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", _INTERFACE, wanted="an address")
            for interface in ("lo", _INTERFACE):
                _run("ip", "-n", namespace, "link", "set", interface, "up", wanted="an interface that is up")
            # A queue longer than anything in flight: what is slow here is the wire, no packet is lost.
            shape = ("root", "tbf", "rate", self._rate, "burst", "128kb", "limit", "200mb")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", _INTERFACE, *shape, wanted="the qdisc `tbf`")
            _run("ip", "netns", "exec", namespace, "true", wanted="processes in a network namespace")

    def _remove(self) -> None:
        for namespace in self.namespaces:
            # The interfaces go with their namespace.
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str, wanted: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CannotRun(f"{wanted} cannot be had here: `{' '.join(command)}` said: {result.stderr.strip()}")


def check_machine(cores: Sequence[int]) -> None:
    """Raises where something is missing that this machine would need before anything is tried."""
    if os.geteuid() != 0:
        raise CannotRun("network namespaces need root: run it with sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise CannotRun(f"`{program}` is not installed (Debian: apt-get install iproute2)")
    usable = os.sched_getaffinity(0)
    if len(set(cores) & usable) < 2:
        raise CannotRun(f"two nodes need a core each: asked for {list(cores)}, usable are {sorted(usable)}")


def bits_per_second(rate: str) -> float:
    """The number that a rate in `tc`'s notation stands for."""
    match = re.fullmatch(r"([\d.]+)(bit|kbit|mbit|gbit)", rate.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{rate!r} is no rate; write it as 1gbit or 200mbit")
    return float(match[1]) * _UNITS[match[2]]


def _rate(text: str) -> str:
    bits_per_second(text)
    return text


def command_of_ranks(rest: Sequence[str], rate: str, ranks_per_node: int) -> list[str]:
    """What each rank runs: the command that was given, or step_time.py with the options that were given."""
    if rest and not rest[0].startswith("-"):
        return list(rest)
    ranks = "one rank" if ranks_per_node == 1 else f"{ranks_per_node} ranks"
    return [
        *(sys.executable, "-m", "benchmarks.step_time"),
        *("--num-nodes", "2", "--devices", str(ranks_per_node), "--bandwidth", f"{bits_per_second(rate):.0f}"),
        *("--label", f"two nodes in network namespaces, one core and {ranks} each, {rate}"),
        *rest,
    ]


def run_on(link: ShapedLink, command: Sequence[str], ranks_per_node: int, cores: Sequence[int]) -> int:
    """Runs the command as all ranks of both nodes; returns the exit code."""
    with RankGroup() as group:
        for node, namespace in enumerate(link.namespaces):
            pin = functools.partial(os.sched_setaffinity, 0, {cores[node]})
            for local_rank in range(ranks_per_node):
                environment = rank_environment(node, local_rank, 2, ranks_per_node, _ADDRESSES[0], _PORT)
                environment |= {"GLOO_SOCKET_IFNAME": _INTERFACE, "OMP_NUM_THREADS": "1"}
                group.start(["ip", "netns", "exec", namespace, *command], environment, pin)
        return group.wait()


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this program, and what follows ``--``."""
    own, rest = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=_rate, default="1gbit", help="of the link in each direction, in tc's notation")
    parser.add_argument("--ranks-per-node", type=int, default=1, choices=[1, 2, 3, 4])
    usable = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, nargs=2, default=usable[:2], help="the core of each node")
    return parser.parse_args(own), rest


def main() -> int:
    arguments, rest = parse_arguments(sys.argv[1:])
    clean_up_on_sigterm()
    try:
        check_machine(arguments.cores)
        with ShapedLink(arguments.rate) as link:
            command = command_of_ranks(rest, arguments.rate, arguments.ranks_per_node)
            return run_on(link, command, arguments.ranks_per_node, arguments.cores)
    except CannotRun as error:
        print(f"two_nodes: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
