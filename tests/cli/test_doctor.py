"""What doctor says of this machine and of several nodes, as its user sees it."""

import json
import re

import pytest

from lightning_parstrat.cli.doctor import from_short_lines
from lightning_parstrat.cli.facts import NodeFacts, facts_from_json, facts_of_this_node
from lightning_parstrat.cli.known_issues import KNOWN_ISSUES
from lightning_parstrat.cli.main import main


@pytest.fixture(autouse=True)
def _outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def test_facts_of_a_node_as_the_others_are_sent_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--this-node"]) == 0
    (told,) = from_short_lines(capsys.readouterr().out)
    assert facts_from_json(json.loads(told)) == facts_of_this_node()


def test_what_it_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    code = main(["doctor", "--no-measurement"])
    printed = capsys.readouterr().out
    here = facts_of_this_node()
    assert printed.startswith(f"{here.host}: {here.cores} core")
    assert f"torch {here.versions['torch']}" in printed and "  GLOO_SOCKET_IFNAME=lo\n" in printed
    assert ("No known issues found" in printed) == (code == 0)


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--no-measurement", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert facts_from_json(result["nodes"][0]) == facts_of_this_node()
    assert result["all_reduce"] is None and result["looked_for"] == list(KNOWN_ISSUES)
    assert bool(result["findings"]) == (code == 1)


@pytest.mark.slow
def test_an_all_reduce_between_two_processes_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    line = r"all-reduce between two processes of this machine, (gloo|nccl) on (cpu|cuda): (\d+) us and (\d+) MB/s"
    found = re.search(line, capsys.readouterr().out)
    assert found is not None
    assert 0 < int(found[3]) < 10**6 and int(found[4]) > 1


ONE = NodeFacts(
    host="one",
    versions={"torch": "2.13.0", "lightning": "2.6.6"},
    cores=4,
    devices=["H200", "H200", "L4"],
    backends=["gloo"],
    interfaces=[],
    variables={},
)


@pytest.mark.parametrize(
    ("two", "issue", "said"),
    [
        (ONE._replace(host="two"), None, ""),
        (ONE._replace(host="two", versions={**ONE.versions, "torch": "2.12.1"}), "versions", "2.12.1 on two"),
        (ONE._replace(host="two", devices=["H200"]), "devices", "3 on one; 1 on two"),
    ],
)
def test_nodes_that_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, two: NodeFacts, issue: str | None, said: str
) -> None:
    monkeypatch.setattr("lightning_parstrat.cli.doctor._in_allocation", lambda: True)
    monkeypatch.setattr("lightning_parstrat.cli.doctor._all_nodes", lambda: ([ONE, two], []))
    main(["doctor", "--no-measurement"])
    printed = capsys.readouterr().out
    assert "one: 4 cores, 2 x H200, 1 x L4; gloo\n" in printed
    assert issue is None or (f"\n{issue}: " in printed and said in printed)
    assert (issue is None) == ("The nodes have different" not in printed)


@pytest.mark.parametrize(
    ("ranks", "devices", "allowed", "said"),
    [
        ("512", ["H200"], 4096, None),
        # 256 + N + 2 N, and five times N between CPUs.
        ("512", ["H200"], 1024, "512 ranks may need 1792 open files"),
        ("1024", [], 6399, "1024 ranks may need 6400 open files, mostly connections, and two allows 6399"),
        ("1024", [], 6400, None),
        ("1024", [], None, None),
    ],
)
def test_fewer_open_files_than_ranks_need(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    devices: list[str],
    allowed: int | None,
    said: str | None,
) -> None:
    one, two = (ONE._replace(host=host, devices=devices, open_files=None) for host in ("one", "two"))
    monkeypatch.setenv("SLURM_NTASKS", ranks)
    monkeypatch.setattr("lightning_parstrat.cli.doctor._in_allocation", lambda: True)
    monkeypatch.setattr(
        "lightning_parstrat.cli.doctor._all_nodes", lambda: ([one, two._replace(open_files=allowed)], [])
    )
    main(["doctor", "--no-measurement"])
    printed = capsys.readouterr().out
    assert ("\nopen files: " in printed) == (said is not None)
    assert said is None or (said in printed and "ulimit -Hn" in printed)


@pytest.mark.slow
def test_no_connection_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # An interface that is not there: neither process can be reached by the other.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["all_reduce"] is None
    assert "no connection" in {finding["issue"] for finding in result["findings"]}
