"""Each check is listed with OK, or with what mends it."""

import re
from typing import Any

import pytest

from lightning_parstrat.cli import doctor
from lightning_parstrat.cli.main import main

NAMES = ["versions", "flags", "process groups", "open files"]


@pytest.fixture(autouse=True)
def _outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_two_ranks_of_this_machine(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"OK  {name}" for name in NAMES]
    assert "torch 2." in lines[0] and "zero3_custom" in lines[1] and "2 ranks over" in lines[2]
    # An interface that is not there: neither rank can be reached by the other. And no plugin registers the flags.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setenv("LIGHTNING_PARSTRAT_AUTOLOAD", "0")
    assert main(["doctor"]) == 1
    printed = capfd.readouterr().out
    assert re.findall(r"^(?:NOT )?OK  ([a-z ]+):", printed, re.MULTILINE) == NAMES
    assert re.search(r"^NOT OK  flags: .*\n  unset LIGHTNING_PARSTRAT_AUTOLOAD", printed, re.MULTILINE), printed
    assert re.search(r"^NOT OK  process groups: .*\n  .*GLOO_SOCKET_IFNAME", printed, re.MULTILINE), printed


def test_ranks_that_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "lightning": "2.6.6"}
    one, two = ({"host": host, "versions": versions} for host in ("one", "two"))
    older = {**two, "versions": {**versions, "torch": "2.12.1"}}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(doctor, "_check_flags", lambda: doctor.Check("flags", "all"))
    # The ranks, how many files they may have open, and what is to be mended; N ranks on CPUs need 256 + 6 N.
    rows: list[tuple[list[dict[str, Any]], str, int | None, str]] = [
        ([one, two], "2", None, ""),
        ([one, older], "2", None, "torch differs: 2.13.0 on one, 2.12.1 on two"),
        ([one, two], "1024", 6400, ""),
        ([one, two], "1024", 6399, "1024 ranks may need 6400 each; allowed are 6399\n  ulimit -Hn 6400"),
    ]
    for ranks, size, allowed, said in rows:
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setattr(doctor, "meet", lambda *_, ranks=ranks: ranks)
        monkeypatch.setattr(doctor, "most_open_files", lambda allowed=allowed: allowed)
        assert main(["doctor", "--rendezvous=file:///nowhere"]) == int(bool(said))
        printed = capsys.readouterr().out
        assert said in printed and ("NOT OK" in printed) == bool(said), printed
        assert "on one, two" in printed or said.startswith("torch")


def test_who_takes_part() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    torchrun = {"RANK": "1", "WORLD_SIZE": "2"}
    assert doctor._place({}) == doctor._place(slurm) == (0, 1)
    assert doctor._place({**slurm, "SLURM_STEP_ID": "0"}) == (3, 8)
    assert doctor._place({**slurm, "SLURM_STEP_ID": "0", **torchrun}) == doctor._place(torchrun) == (1, 2)
    assert doctor._meeting_place({"MASTER_ADDR": "first", "MASTER_PORT": "29500"}) == "tcp://first:29500"
