"""A Slurm of two nodes on this one machine, with daemons of its own; as root."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.scripts import clean_environment

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_HOSTS = Path("/etc/hosts")
_MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
_CONFIGURATION = """
ClusterName=parstrat
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until what its first run was allowed has expired: two minutes, by default.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=10
InactiveLimit=0
SlurmctldPort={port}
SlurmdParameters=config_overrides
JobRequeue=1
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing_programs() -> list[str]:
    """What would have to be installed; `make test-cluster` does."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class SlurmCluster:
    """Two nodes, for as long as the context lasts."""

    names = ("parnode1", "parnode2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self._hosts_before: str | None = None
        self._started_munge = False

    def __enter__(self) -> "SlurmCluster":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of somebody who is logged in there."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return clean_environment(SLURM_CONF=str(self.configuration), PATH=path)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        done = subprocess.run(
            command, env={**self.environment, **variables}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number: int) -> Mapping[str, str]:
        shown = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait_until(self, what: Callable[[], Any], seconds: float, describe: Callable[[], str] = str) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = what()
            if found:
                return found
            time.sleep(0.25)
        raise AssertionError(f"it did not happen within {seconds} s\n{describe()}")

    def wait_for_end(self, number: int, seconds: float, describe: Callable[[], str] = str) -> str:
        """The last state of a job that is not requeued any more."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        self.wait_until(lambda: self.job(number)["JobState"] not in running, seconds, describe)
        return self.job(number)["JobState"]

    def cancel_everything(self) -> None:
        self.run("scancel", "--user=root", check=False)
        self.wait_until(lambda: not self.run("squeue", "--noheader").strip(), 60, lambda: self.run("squeue"))

    def _start(self) -> None:
        for name in ("state", *(f"spool/{node}" for node in self.names)):
            (self.folder / name).mkdir(parents=True)
        self._hosts_before = _HOSTS.read_text()
        _HOSTS.write_text(self._hosts_before + "".join(f"127.0.0.1 {name}\n" for name in self.names))
        first = _free_ports(3)
        text = _CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            port=first,
            nodes="parnode[1-2]",
            node_ports=f"[{first + 1}-{first + 2}]",
        )
        self.configuration.write_text(text)
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode != 0:
            # A daemon that was killed leaves its socket behind.
            _MUNGE_SOCKET.unlink(missing_ok=True)
            subprocess.run(["install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge"], check=True)
            subprocess.run(["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--force"], check=True)
            self._started_munge = True
        self.run("slurmctld", "-f", str(self.configuration))
        for name in self.names:
            self.run("slurmd", "-f", str(self.configuration), "-N", name)
        listed = ("sinfo", "--noheader", "--format=%D %t")
        self.wait_until(lambda: self.run(*listed, check=False) == "2 idle\n", 60, self._log)

    def _stop(self) -> None:
        if (self.folder / "slurmctld.pid").exists():
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self.cancel_everything()
        for name in (*self.names, "slurmctld"):
            _end(self.folder / f"{name}.pid")
        if self._started_munge:
            _end(Path("/run/munge/munged.pid"))
        if self._hosts_before is not None:
            _HOSTS.write_text(self._hosts_before)

    def _log(self) -> str:
        return (self.folder / "slurmctld.log").read_text()[-3000:]


def _end(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def _free_ports(count: int) -> int:
    """The first of some ports in a row that nobody listens at."""
    for first in range(17000, 19000, count):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                one = sockets.enter_context(socket.socket())
                one.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")
