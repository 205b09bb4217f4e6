"""What a step costs at 8, 64 and 512 ranks, by formulas: a played rank counts its launches, waits and messages."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.events import Compute, Launch, Wait, read_events
from benchmarks.scale.fake_ranks import Played, exponents
from benchmarks.scale.recorder import Counters
from benchmarks.scale.wires import gloo_messages
from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SIZES = [8, 64, 512]
TENSORS, ELEMENTS = 60, 4096
BUCKETS = [16, 16, 16, 12]
"""Tensors of 16 KiB in each bucket of 0.25 MiB."""
ENTRIES = 2
"""Of AdamW's state that lie like the parameter."""


def count_by_program(folder: Path, *arguments: str) -> dict[str, Any]:
    output = folder / "counted.json"
    program = ["-m", "benchmarks.scale.fake_ranks", "--no-calls", "--output", str(output)]
    ran = run_python([*program, *arguments], ROOT)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = [str(size) for size in SIZES]
    planes = ["--planes", "gloo", "nccl", "--ranks", "0", "37"]
    return count_by_program(tmp_path_factory.mktemp("steps"), "--sizes", *sizes, *planes)


def of_phase(found: dict[str, Any], plane: str, phase: str, rank: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    played = [one for one in found[plane]["played"] if one["rank"] == rank]
    assert played
    for one in played:
        yield one["size"], one["counters"][phase]


def messages_of(
    found: dict[str, Any], plane: str, phase: str, rank: int = 0, broadcasts: bool = True
) -> dict[int, int]:
    messages = {}
    for size, counted in of_phase(found, plane, phase, rank):
        numbers = {name: number for name, number in counted["launches"].items() if name.endswith("broadcast")}
        # What NCCL carries is not among them.
        by_hosts = sum(numbers[name] for name in numbers if plane == "gloo" or name != "parameters broadcast")
        of_broadcasts = by_hosts * gloo_messages("broadcast", 0, rank, size, 0)
        messages[size] = counted["messages"] - (0 if broadcasts else of_broadcasts)
    return messages


def growth(counted: dict[int, int], fewer: int, more: int) -> float:
    return math.log(counted[more] / counted[fewer]) / math.log(more / fewer)


def in_rounds(size: int) -> int:
    """Messages of a rank in an exchange of all: in groups of four, and of two for what is left."""
    fours, twos = divmod(int(math.log2(size)), 2)
    return 3 * fours + twos


def chunks_sent(size: int) -> int:
    """Messages of a rank for a bucket: by pairs in a node of eight ranks, and in rounds of eight beyond."""
    return 7 * int(math.log2(size)) // 3


def test_a_settled_step_over_gloo(steps: dict[str, Any]) -> None:
    buckets = len(BUCKETS)
    for size, counted in of_phase(steps, "gloo", "step"):
        exchanged = buckets * chunks_sent(size)
        assert counted["launches"] == {
            "gradients send": exchanged,
            "gradients recv": exchanged,
            "parameters send": exchanged,
            "parameters recv": exchanged,
            "control send": in_rounds(size),
            "control recv": in_rounds(size),
        }
        assert counted["messages"] == 2 * exchanged + in_rounds(size)
        assert counted["hops"] == 4 * exchanged + 2 * in_rounds(size)
        assert counted["metadata_bytes"] == counted["store_requests"] == 0
        # Of the largest bucket, its own part left out.
        assert counted["largest_receive_bytes"] == max(BUCKETS) * ELEMENTS * 4 * (size - 1) // size


def test_a_settled_step_over_nccl(steps: dict[str, Any]) -> None:
    buckets = len(BUCKETS)
    for size, counted in of_phase(steps, "nccl", "step"):
        # One message of control, and nothing else that the host waits for.
        assert counted["launches"] == {
            "gradients reduce_scatter": buckets,
            "parameters all_gather": buckets,
            "control send": in_rounds(size),
            "control recv": in_rounds(size),
        }
        assert counted["metadata_bytes"] == counted["store_requests"] == 0


def test_setup(steps: dict[str, Any]) -> None:
    for plane in ("gloo", "nccl"):
        for size, counted in of_phase(steps, plane, "setup"):
            launches = counted["launches"]
            # Whether modules and plans are the same, what can be sharded, who observes gradients; in two, who shares a
            # node.
            assert launches["control send"] == launches["control recv"] == 9 * in_rounds(size)
            # Lightning's and this package's broadcasts and barriers, and one of all weights.
            assert launches["world broadcast"] == 4 and launches["parameters broadcast"] == 1
            # Who exchanges chunks is connected by a byte each, by NCCL a number.
            if plane == "nccl":
                assert launches["gradients reduce_scatter"] == launches["parameters reduce_scatter"] == 1
            for way in ("send", "recv") if plane == "gloo" else ():
                assert launches[f"gradients {way}"] == launches[f"parameters {way}"] == chunks_sent(size)
            assert counted["groups"] == 5 and counted["metadata_bytes"] == 0
            # Of who shares a node.
            assert counted["largest_receive_bytes"] == 16
    for plane in ("gloo", "nccl"):
        for phase in ("setup", "replan"):
            assert growth(messages_of(steps, plane, phase), 64, 512) <= 0.2
            # How many a rank sends a broadcast on to depends on its place among them: none of 64 here, 3 of 512.
            assert growth(messages_of(steps, plane, phase, rank=37, broadcasts=False), 64, 512) <= 0.2


def test_messages_of_setup_that_lightning_sends(steps: dict[str, Any]) -> None:
    for size, counted in of_phase(steps, "nccl", "setup"):
        launches, doublings = counted["launches"], int(math.log2(size))
        # Of 4 broadcasts 2 are of an object, in two each: this training's name is this package's, and the folder of
        # logs is Lightning's; so are all barriers, and two sums to compare the lengths of loaders.
        assert launches["world barrier"] == 7 and launches["world all_reduce"] == 2
        assert counted["messages"] == 9 * in_rounds(size) + (4 + 7) * doublings + 2 * 2
        # NCCL connects its rings within one operation for each group: what the hosts do not see.
        assert counted["device_messages"] == 2 * (size - 1) + doublings


@pytest.fixture(scope="module")
def whole_parameters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = ["--planes", "gloo", "nccl", "--ranks", "0", "37", "--partition", "parameter"]
    return count_by_program(tmp_path_factory.mktemp("whole"), "--sizes", *map(str, SIZES), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 37])
def test_owners_of_whole_parameters_receive_no_more_than_two_buckets_whatever_n(
    whole_parameters: dict[str, Any], rank: int
) -> None:
    bucket = max(BUCKETS) * ELEMENTS * 4
    for plane in ("gloo", "nccl"):
        for size, counted in of_phase(whole_parameters, plane, "step", rank):
            # Of sums and gathers all but its equal part, and what it owns; N copies of a matrix would be far more.
            assert bucket * (size - 1) // size <= counted["largest_receive_bytes"] <= 2 * bucket


@pytest.mark.slow
def test_a_settled_step_of_whole_parameters_over_nccl(whole_parameters: dict[str, Any]) -> None:
    buckets = len(BUCKETS)
    for size, counted in of_phase(whole_parameters, "nccl", "step"):
        assert counted["launches"] == {
            "gradients reduce_scatter": buckets,
            "gradients all_to_all": buckets,
            "parameters all_to_all": buckets,
            "parameters all_gather": buckets,
            "control send": in_rounds(size),
            "control recv": in_rounds(size),
        }
        # One wait a bucket each way: what is passed on is waited for with it.
        assert counted["waits"]["gradients"] == counted["waits"]["parameters"] == buckets


SHARD_GROUP = 8


@pytest.fixture(scope="module")
def steps_in_groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = [str(size) for size in SIZES[1:]]
    asked = ["--planes", "gloo", "nccl", "--ranks", "0", "37", "--shard-group", str(SHARD_GROUP)]
    return count_by_program(tmp_path_factory.mktemp("groups"), "--sizes", *sizes, *asked)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 37])
def test_a_settled_step_in_shard_groups(steps_in_groups: dict[str, Any], rank: int) -> None:
    buckets = len(BUCKETS)
    for size, counted in of_phase(steps_in_groups, "nccl", "step", rank):
        assert counted["launches"] == {
            "gradients reduce_scatter": buckets,
            "gradients all_reduce": buckets,
            "parameters all_gather": buckets,
            "control send": in_rounds(size),
            "control recv": in_rounds(size),
        }
        assert counted["waits"] == {"gradients": buckets, "parameters": buckets}
        assert counted["metadata_bytes"] == counted["store_requests"] == 0
    for size, counted in of_phase(steps_in_groups, "gloo", "step", rank):
        # Within the group, and twice to all that hold the same shard.
        within, between = buckets * (SHARD_GROUP - 1), buckets * 2 * (size // SHARD_GROUP - 1)
        assert counted["launches"] == {
            "gradients send": within + between,
            "gradients recv": within + between,
            "parameters send": within,
            "parameters recv": within,
            "control send": in_rounds(size),
            "control recv": in_rounds(size),
        }


@pytest.mark.slow
def test_ranks_are_connected_with_those_of_their_group_and_of_their_shard(steps_in_groups: dict[str, Any]) -> None:
    for one in steps_in_groups["gloo"]["played"]:
        others = SHARD_GROUP - 1 + one["size"] // SHARD_GROUP - 1
        for group in ("gradients", "parameters"):
            # Beside these, the module's first values go down a tree, and up to rank 0.
            assert others <= one["sockets"][group]["used"] <= others + math.log2(one["size"])


def test_the_plan_that_was_wrong_was_replaced(steps: dict[str, Any]) -> None:
    for plane in ("gloo", "nccl"):
        for size, counted in of_phase(steps, plane, "replan"):
            # When gradients were ready, whether the ranks' plans are the same, and whether their states are.
            assert counted["launches"]["control send"] == 3 * in_rounds(size)
            # What one rank says of the state, and how long that is.
            assert counted["launches"]["control broadcast"] == 2
            # State moves once for each bucket, in a message from an old owner: a shard has been some neighbours'.
            assert 0 < counted["launches"]["parameters recv"] <= 3 * len(BUCKETS)
            assert 0 < counted["launches"]["parameters send"] <= 3 * len(BUCKETS)
            # At most a shard's state and gradient, or the digests.
            shard = max(BUCKETS) * ELEMENTS * 4 // size
            assert counted["largest_receive_bytes"] <= max((ENTRIES + 1) * shard, 16 * TENSORS)


def test_what_ranks_say_of_their_state_does_not_grow_with_their_number(steps: dict[str, Any]) -> None:
    for plane in ("gloo", "nccl"):
        # Rank 0 says it, the others hear it.
        said = [counted["metadata_bytes"] for _, counted in of_phase(steps, plane, "replan", rank=37)]
        assert len(set(said)) == 1 and 0 < said[0] < 1000
        assert not any(counted["metadata_bytes"] for _, counted in of_phase(steps, plane, "replan"))


def test_growth(steps: dict[str, Any]) -> None:
    grown = {plane: steps[plane]["exponents"] for plane in ("gloo", "nccl")}
    # 14 messages of control each way at 512 ranks, 4 at 8: with the logarithm.
    assert grown["nccl"]["step"]["launches"] <= 0.2
    assert grown["nccl"]["step"]["launches: gradients reduce_scatter"] == 0
    # 21 messages a bucket at 512 ranks, 7 at 8.
    assert grown["gloo"]["step"]["launches: gradients send"] == pytest.approx(math.log(3) / math.log(64))
    assert grown["gloo"]["replan"].get("metadata_bytes", 0) == 0
    assert grown["gloo"]["replan"]["launches"] <= 0.25


def test_exponents_of_what_is_known() -> None:
    fewer, more = Counters(messages=14, hops=5, calls=3), Counters(messages=126, hops=5, store_requests=1)
    found = exponents(Played(8, 0, {"step": fewer}, {}, []), Played(64, 0, {"step": more}, {}, []))["step"]
    assert found == {"messages": math.log(9) / math.log(8), "hops": 0, "calls": -math.inf, "store_requests": math.inf}


@pytest.mark.slow
def test_what_a_simulator_replays(tmp_path: Path) -> None:
    size = 64
    events = tmp_path / "events.jsonl"
    count_by_program(tmp_path, "--sizes", str(size), "--planes", "nccl", "--events", str(events))
    read = list(read_events(events))
    launched = {event.number: event for event in read if isinstance(event, Launch)}
    waited = [event.number for event in read if isinstance(event, Wait)]
    # Each is waited for once, and has been launched before.
    assert sorted(launched) == list(range(len(launched))) and len(set(waited)) == len(waited)
    assert set(waited) <= set(launched)
    step = [event for event in read if event.phase == "step"]
    for kind, times in (("forward", TENSORS), ("backward", TENSORS)):
        computed = [event.nbytes for event in step if isinstance(event, Compute) and event.kind == kind]
        assert computed == [ELEMENTS * 4] * times
    # A bucket leaves when its gradients are there, the last one's being the first of the model.
    order = [e.kind for e in step if isinstance(e, Compute | Launch) and e.kind in ("backward", "reduce_scatter")]
    expected = [kind for tensors in BUCKETS for kind in (*["backward"] * tensors, "reduce_scatter")]
    assert order == expected
    # Each rank steps its shards, which are small and so need one call, before they are gathered.
    order = [e.kind for e in step if isinstance(e, Compute | Launch) and e.kind in ("update", "all_gather")]
    assert order == ["update"] + ["all_gather"] * len(BUCKETS)
    updated = [event.nbytes for event in step if isinstance(event, Compute) and event.kind == "update"]
    assert sum(updated) == TENSORS * ELEMENTS * 4 // size


@pytest.mark.parametrize("plane", ["gloo", "nccl"])
def test_another_rank_does_the_same_in_a_step(plane: str, steps: dict[str, Any]) -> None:
    of_first = dict(of_phase(steps, plane, "step"))
    others = dict(of_phase(steps, plane, "step", rank=37))
    assert list(others) == [64, 512]
    for size, counted in others.items():
        # Memory depends on what came before in the process.
        assert {**counted, "new_bytes": 0} == {**of_first[size], "new_bytes": 0}


def test_ddp_stands_beside_it(tmp_path: Path) -> None:
    found = count_by_program(tmp_path, "--sizes", "8", "512", "--planes", "nccl", "--strategy", "ddp")
    for _, counted in of_phase(found, "nccl", "step"):
        # Its first bucket holds one tensor here; Lightning asks rank 0 in every step whether to end.
        assert counted["launches"] == {"world all_reduce": 1 + -(-(TENSORS - 1) // 16), "world broadcast": 1}
        assert counted["waits"] == {"world": 2 + -(-(TENSORS - 1) // 16)}


@pytest.fixture(scope="module", params=["full", "sharded"])
def saves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    sizes = [str(size) for size in SIZES]
    asked = ["--sizes", *sizes, "--ranks", "0", "5", "--planes", "nccl", "--save", request.param]
    return request.param, count_by_program(tmp_path_factory.mktemp("saves"), *asked)


@pytest.mark.slow
def test_a_save(saves: tuple[str, dict[str, Any]]) -> None:
    save, found = saves
    buckets = len(BUCKETS)
    for size, counted in of_phase(found, "nccl", f"{save} save"):
        # All come, twice: before the state is gathered and before it is saved; and they agree on what there is of it,
        # and whether training can go on from it.
        # In a full save, the state is one message of each rank and bucket, and random numbers are two of each rank.
        gathered = (buckets + 2) * (size - 1) if save == "full" else 0
        agreed = in_rounds(size)
        assert counted["launches"]["control recv"] == gathered + 4 * agreed
        assert counted["launches"]["control send"] == 4 * agreed
        assert bool(counted["metadata_bytes"]) == (save == "full")
        if save == "sharded":
            # Whether all have written, see each other's files, and the folder has its name.
            assert counted["launches"]["checkpoint recv"] == counted["launches"]["checkpoint send"] == 3 * agreed
        # The state of the optimizer; in a sharded save, what is in the index besides: weights, and that again.
        told, indexed = ENTRIES * TENSORS, (1 + ENTRIES) * TENSORS
        steps = TENSORS
        assert counted["items"] == told + steps + (indexed if save == "sharded" else 0)


@pytest.mark.slow
def test_a_save_of_another_rank(saves: tuple[str, dict[str, Any]]) -> None:
    save, found = saves
    for size, counted in of_phase(found, "nccl", f"{save} save", rank=5):
        launches = counted["launches"]
        agreed = in_rounds(size)
        gathered = len(BUCKETS) + 2 if save == "full" else 0
        assert launches["control send"] == gathered + 4 * agreed
        assert launches["control recv"] == 4 * agreed
        assert launches.get("checkpoint send", 0) == (3 * agreed if save == "sharded" else 0)
        assert counted["items"] == 0


@pytest.mark.slow
def test_a_load(saves: tuple[str, dict[str, Any]]) -> None:
    save, found = saves
    for size, counted in of_phase(found, "nccl", "load"):
        # Whether all could open it, what it is, and which save's; of a folder, whether they could read the weights, in
        # blocks of 32 KiB, their parts of the state, and what ranks have said alone, which each takes for itself.
        agreements = 3 if save == "full" else 7
        more = {"control broadcast": TENSORS // 2} if save == "sharded" else {}
        messages = agreements * in_rounds(size)
        assert counted["launches"] == {"control recv": messages, "control send": messages, **more}


@pytest.mark.slow
def test_growth_of_saves(saves: tuple[str, dict[str, Any]]) -> None:
    save, found = saves
    for phase in (f"{save} save", "load"):
        grown = found["nccl"]["exponents"][phase]
        assert grown.get("items", 0) == 0
        assert grown["largest_receive_bytes"] <= 0.05
    # Of whom all messages of a full save are.
    ranks = [5] if save == "full" else [0, 5]
    for messages in [messages_of(found, "nccl", f"{save} save", rank) for rank in ranks]:
        assert growth(messages, 64, 512) <= 0.2
    assert growth(messages_of(found, "nccl", "load"), 64, 512) <= 0.2


@pytest.mark.slow
def test_recorded_steps_in_shard_groups_are_near_the_best_there_is(tmp_path: Path) -> None:
    output = tmp_path / "groups.json"
    ran = run_python(["-m", "benchmarks.scale.group_study", "--ranks", "256", "--output", str(output)], ROOT)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    for found in json.loads(output.read_text()).values():
        assert found
        of_32, of_64, of_all = found
        assert 0 < of_64["exposed"] <= 1.1 * of_64["bound"]
        assert of_32["exposed"] <= 1.15 * of_32["bound"]
        assert of_all["exposed"] > 1.5 * of_64["exposed"]
