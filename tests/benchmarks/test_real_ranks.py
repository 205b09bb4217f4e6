"""Real ranks launch what played ones do."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.scale.paced_wire import Interface, PacedGroup
from lightning_parstrat.core.rounds import exchange_rounds
from tests.pool import RankPool
from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
STEPS, SETTLED = 3, 4


def counted_by(program: str, output: Path, *arguments: str) -> dict[str, Any]:
    asked = ["--ranks-per-node", "2", "--steps", str(STEPS), "--output", str(output)]
    ran = run_python(["-m", f"benchmarks.scale.{program}", *asked, *arguments], ROOT)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def launched(played: dict[str, Any]) -> dict[str, int]:
    launches: Counter[str] = sum((Counter(phase["launches"]) for phase in played["counters"].values()), Counter())
    # Of real ranks, what C++ launches is not seen: the module's tensors come from rank 0.
    assert launches.pop("parameters broadcast") == 1
    return dict(launches)


@pytest.mark.slow
def test_real_ranks_launch_what_played_ones_do_within_a_node_and_between_two(tmp_path: Path) -> None:
    sizes = ["--sizes", "2", "4"]
    real = counted_by("real_ranks", tmp_path / "real.json", *sizes, "--strategies", "zero1_custom", "ddp")
    ranks = ["--ranks", "0", "1", "2", "3"]
    played = counted_by("fake_ranks", tmp_path / "played.json", *sizes, *ranks, "--no-calls")["gloo"]["played"]
    assert len(played) == 2 + 4
    for one in played:
        size = one["size"]
        counted, of_ddp = (real[strategy][str(size)][one["rank"]] for strategy in ("zero1_custom", "ddp"))
        expected = launched(one)
        # Four buckets, in each step; to be connected, a byte to the node's other rank, and to one of the other node.
        assert expected["gradients send"] == (SETTLED + STEPS + 1) * 4 * (size - 1) + size // 2
        # Where a thread still holds a view of a bucket, ranks ask again before the next step whether to plan anew.
        messages = exchange_rounds(one["rank"], size).messages
        for kind in ("control send", "control recv"):
            asked_again = counted["launches"].pop(kind) - expected.pop(kind)
            assert 0 <= asked_again <= (STEPS + 2) * messages and asked_again % messages == 0
        assert counted["launches"] == expected
        # As many groups as played ranks have connect each rank with every other; DDP has one of them.
        meshes = sum(sockets["full_mesh"] for sockets in one["sockets"].values())
        assert counted["sockets"] - of_ddp["sockets"] >= meshes - (size - 1)
        assert 0 < counted["cpu_seconds"] < 10


def test_sums_go_around_a_ring_of_paced_messages(pool: RankPool) -> None:
    assert pool.run(3, paced_sum) == [True] * 3


def paced_sum() -> bool:
    group = PacedGroup(dist.group.WORLD, Interface(latency_seconds=1e-3, seconds_per_byte=1e-6))
    rank, numels = dist.get_rank(), (10, 2, 1)
    tensors = [torch.arange(numel) * 1.0 + rank for numel in numels]
    works = [group.allreduce([tensor]) for tensor in tensors]
    for work in works:
        work.wait()
    return all(torch.equal(t, torch.arange(n) * 3.0 + 3) for t, n in zip(tensors, numels, strict=True))
