"""The simulator of steps on up to a thousand ranks: its parts, and the table that was read in the sources."""

import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale import replay_record
from benchmarks.scale.cap_study import evidence
from benchmarks.scale.events import Compute, Event, Kind, Launch, Wait, read_events, write_events
from benchmarks.scale.gloo_steps import ComputeTimes, Emulated, expected, predict, small_decoder
from benchmarks.scale.networks import Cost, Gloo, Nccl, Placement, ShardGroups, Wire, placed, tree_correction
from benchmarks.scale.paced_wire import Interface
from benchmarks.scale.reading import compared
from benchmarks.scale.simulator import Machine, accelerator, replay, replay_phase
from benchmarks.scale.study import best_groups, cluster_for, curves, ddp_step, exponent, markdown, row, zero1_step
from benchmarks.scale.synthetic import (
    MIB,
    Model,
    Replan,
    ddp_record,
    even_model,
    gpt2_medium,
    llama_7b,
    sharded_plan,
    zero1_record,
)
from benchmarks.scale.whole_study import FLOPS, found_at, matrices
from lightning_parstrat.core.cost_model import AlphaBeta, assumed_wire
from lightning_parstrat.core.grouping import default_bucket_cap

SLACK = 0.15
"""What the simulator may be off from the table of the reading."""

# How long an example takes says more of what else the machine does than of the code.
UNHURRIED = settings(deadline=None, print_blob=True)

TINY = Model("tiny", (300, 7, 500, 40), 4)


def nccl(ranks: int) -> Nccl:
    return Nccl(placement=placed(ranks))


# Networks


@pytest.mark.parametrize(("ranks", "microseconds"), [(8, 49), (64, 173), (512, 864), (1024, 1485)])
def test_nccl_reduce_scatters_8_mib_in_the_time_that_was_read(ranks: int, microseconds: float) -> None:
    cost = nccl(ranks).cost("reduce_scatter", 8 * MIB)
    assert 1e6 * cost.seconds == pytest.approx(microseconds, rel=0.02)
    assert cost == nccl(ranks).cost("all_gather", 8 * MIB)


@pytest.mark.parametrize(("ranks", "milliseconds"), [(8, 0.6), (64, 5), (512, 41), (1024, 82)])
def test_gloo_sums_up_flags_in_the_time_that_was_read(ranks: int, milliseconds: float) -> None:
    assert 1e3 * Gloo(ranks=ranks).cost("all_reduce", 1200).seconds == pytest.approx(milliseconds, rel=0.08)


@pytest.mark.parametrize(
    ("ranks", "kind", "nbytes", "how"),
    [
        (512, "reduce_scatter", 8 * MIB, "ring LL"),
        (512, "reduce_scatter", 64 * MIB, "ring LL128"),
        (8, "reduce_scatter", 512 * MIB, "ring Simple"),
        (1024, "all_reduce", 25 * MIB, "tree LL128"),
        (2, "all_reduce", 4, "ring LL"),
        (1024, "all_reduce", 4, "tree LL"),
    ],
)
def test_nccl_chooses_by_size_and_ranks(ranks: int, kind: Kind, nbytes: int, how: str) -> None:
    assert nccl(ranks).cost(kind, nbytes).how == how


def test_a_large_ring_across_nodes_has_its_plateau() -> None:
    # 28 steps within nodes and 2 between them, once and 0.4 times more, and 30 / 16 of the bytes.
    cost = nccl(16).cost("all_reduce", 2**30)
    assert cost.how == "ring Simple"
    assert cost.latency_seconds == pytest.approx(1.4 * (8.4 + 28 * 3.4 + 2 * 14.0) * 1e-6)
    assert cost.transfer_seconds == pytest.approx(2**30 * 30 / 16 / 360e9)


def test_nccl_takes_the_limits_of_ll_from_the_cpu_where_it_is_told_so() -> None:
    times = {
        cpu: Nccl(placement=placed(512), host_cpu=cpu).cost("reduce_scatter", 8 * MIB).seconds
        for cpu in ("as Hopper", "Intel", "AMD")
    }
    assert times["as Hopper"] < times["Intel"] < times["AMD"]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"])
@UNHURRIED
@given(nbytes=st.integers(0, 2**31), power=st.integers(0, 9))
def test_more_bytes_never_take_nccl_less_time(kind: Kind, nbytes: int, power: int) -> None:
    network = nccl(2**power)
    # A tree's correction by size is a table with steps, which NCCL follows: only within one are times comparable.
    more = nbytes + min(nbytes // 4, 2 ** nbytes.bit_length() - 1 - nbytes)
    assert 0 <= network.cost(kind, nbytes).seconds <= network.cost(kind, more).seconds < 60


def test_corrections_of_trees_reach_from_64_bytes_to_512_mib() -> None:
    assert tree_correction("Simple", 63) == tree_correction("Simple", 512 * MIB) == 1.0
    assert tree_correction("Simple", 64) == 0.9
    assert tree_correction("LL", 2**18) == tree_correction("LL", 2**19 - 1) == 0.4


@pytest.mark.parametrize(
    ("ranks", "ranks_a_node", "expected"), [(1, 8, (1, 1)), (8, 8, (8, 1)), (1024, 8, (1024, 128)), (6, 2, (6, 3))]
)
def test_ranks_fill_nodes(ranks: int, ranks_a_node: int, expected: tuple[int, int]) -> None:
    assert placed(ranks, ranks_a_node) == expected


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid ranks: 15"):
        placed(15)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (3, 3), (8, 3), (12, 5), (64, 6), (1024, 10)])
def test_recursive_doubling_takes_a_hop_a_round(ranks: int, rounds: int) -> None:
    network = Gloo(ranks=ranks, hop_seconds=1.0, small_messages="doubling")
    assert network.cost("all_reduce", 0).seconds == rounds
    # Gradients are no small message.
    assert network.cost("all_reduce", MIB).how == "ring"


def test_gloo_exchanges_each_chunk_once() -> None:
    network = Gloo(ranks=5, hop_seconds=1.0, bytes_per_second=10.0)
    assert network.cost("reduce_scatter", 100) == Cost(4.0, 8.0, "network", "pairwise exchange")
    assert network.cost("all_reduce", 100) == Cost(8.0, 16.0, "network", "ring")
    quicker = Gloo(ranks=5, hop_seconds=1.0, message_seconds=0.25)
    assert quicker.cost("all_gather", 0).seconds == 1.75


def test_shards_travel_within_groups_and_replicas_across() -> None:
    within, across = nccl(8), Nccl(placement=Placement(4, 4))
    network = ShardGroups(within=within, across=across)
    assert network.cost("reduce_scatter", MIB) == within.cost("reduce_scatter", MIB)
    assert network.cost("all_reduce", MIB) == across.cost("all_reduce", MIB)


def test_sums_in_a_wider_dtype_take_the_quicker_of_two_ways() -> None:
    within, across = nccl(8), Nccl(placement=Placement(4, 4))
    in_node = ShardGroups(within=within, across=across, sums_wider=True)
    assert in_node.cost("reduce_scatter", 64 * MIB) == within.cost("all_to_all", 64 * MIB)
    assert in_node.cost("all_reduce", MIB) == across.cost("all_reduce", 2 * MIB)
    assert in_node.cost("all_gather", MIB) == within.cost("all_gather", MIB)
    over_nodes = ShardGroups(within=nccl(64), across=across, sums_wider=True)
    assert over_nodes.cost("reduce_scatter", 64 * MIB) == nccl(64).cost("reduce_scatter", 128 * MIB)


def test_one_rank_sends_nothing() -> None:
    assert nccl(1).cost("all_reduce", MIB).seconds == Gloo(ranks=1).cost("all_reduce", MIB).seconds == 0


# The simulator


@dataclass(frozen=True)
class Plain:
    """A network where a byte takes a second."""

    latency: float = 0.0
    wire: Wire = "network"
    blocks_host: bool = False

    def cost(self, kind: Kind, nbytes: int) -> Cost:
        return Cost(self.latency, float(nbytes), self.wire, "plain")


PLAIN = Plain()
SECOND_A_BYTE = {"forward": 1.0, "backward": 1.0, "update": 1.0}
DEVICE = Machine(seconds_per_byte=SECOND_A_BYTE)
CPU = Machine(seconds_per_byte=SECOND_A_BYTE, host_computes=True)


def launch(number: int, group: str, nbytes: int) -> Launch:
    return Launch("step", group, "all_reduce", nbytes, None, number)


def wait(*numbers: int) -> list[Event]:
    return [Wait("step", number) for number in numbers]


def compute(nbytes: int) -> Compute:
    return Compute("step", "forward", nbytes)


ONE_WIRE = {"gradients": Plain(), "parameters": Plain()}
TWO_WIRES = {"gradients": Plain(), "parameters": Plain(wire="NVLink")}


@pytest.mark.parametrize(
    ("networks", "events", "seconds"),
    [
        pytest.param(ONE_WIRE, [compute(3), launch(1, "gradients", 2), *wait(1)], 5, id="nothing to hide behind"),
        pytest.param(ONE_WIRE, [launch(1, "gradients", 2), compute(3), *wait(1)], 3, id="hidden"),
        pytest.param(ONE_WIRE, [launch(1, "gradients", 5), compute(3), *wait(1)], 5, id="partly hidden"),
        pytest.param(
            ONE_WIRE, [launch(1, "gradients", 2), launch(2, "gradients", 2), *wait(1)], 2, id="the first of a stream"
        ),
        pytest.param(
            TWO_WIRES, [launch(1, "gradients", 2), launch(2, "gradients", 2), *wait(2)], 4, id="the second of a stream"
        ),
        pytest.param(
            TWO_WIRES, [launch(1, "gradients", 2), launch(2, "parameters", 2), *wait(1, 2)], 2, id="wires of their own"
        ),
        pytest.param(
            ONE_WIRE, [launch(1, "gradients", 2), launch(2, "parameters", 2), *wait(1, 2)], 4, id="a wire is shared"
        ),
        # Alone until 1, with one byte of the first left at 3, when the second has ended.
        pytest.param(
            ONE_WIRE,
            [launch(1, "gradients", 3), compute(1), launch(2, "parameters", 1), *wait(2)],
            3,
            id="shared for a while",
        ),
        pytest.param(
            ONE_WIRE,
            [launch(1, "gradients", 3), compute(1), launch(2, "parameters", 1), *wait(2, 1)],
            4,
            id="then alone again",
        ),
        # The first's latency leaves the wire to the second.
        pytest.param(
            {"gradients": Plain(latency=1.0), "parameters": Plain()},
            [launch(1, "gradients", 2), launch(2, "parameters", 1), *wait(1, 2)],
            3,
            id="latency is not shared",
        ),
        pytest.param(ONE_WIRE, [launch(1, "gradients", 9), compute(3)], 3, id="nobody waits"),
        pytest.param(ONE_WIRE, [*wait(7), compute(3)], 3, id="launched before the record began"),
        pytest.param(
            ONE_WIRE, [launch(1, "gradients", 0), *wait(1, 1), compute(3), *wait(1)], 3, id="waited for again"
        ),
    ],
)
@pytest.mark.parametrize("machine", [DEVICE, CPU], ids=["GPU", "CPU"])
def test_a_record_takes(machine: Machine, networks: dict[str, Plain], events: list[Event], seconds: float) -> None:
    step = replay(events, machine, networks)
    assert step.seconds == pytest.approx(seconds)
    computed = sum(event.nbytes for event in events if isinstance(event, Compute))
    assert step.compute_seconds == computed
    assert step.exposed_seconds == pytest.approx(seconds - computed)


@pytest.mark.parametrize(
    ("machine", "control_blocks_host", "seconds"),
    [
        # The host runs ahead: what it waits for ends while the device computes.
        pytest.param(DEVICE, True, 6, id="GPU, Gloo"),
        pytest.param(DEVICE, False, 8, id="GPU, NCCL"),
        pytest.param(CPU, True, 8, id="CPU"),
    ],
)
def test_who_waits_is_the_host_or_the_device(machine: Machine, control_blocks_host: bool, seconds: float) -> None:
    networks = {"gradients": Plain(), "control": Plain(wire="NVLink", blocks_host=control_blocks_host)}
    events = [compute(5), launch(1, "control", 2), *wait(1), launch(2, "gradients", 1), *wait(2)]
    assert replay(events, machine, networks).seconds == pytest.approx(seconds)


def test_a_host_that_needs_long_for_launches_holds_the_device_up() -> None:
    slow = Machine(seconds_per_byte=SECOND_A_BYTE, launch_seconds=2.0)
    events = [launch(1, "gradients", 0), launch(2, "gradients", 0), compute(3)]
    assert replay(events, slow, ONE_WIRE).seconds == 7


def test_chunks_come_while_others_go() -> None:
    events: list[Event] = [
        Launch("step", "gradients", kind, MIB, 1, number)
        for number, kind in enumerate(["send", "recv", "send", "recv"])
    ]
    network = Gloo(ranks=3, hop_seconds=0.0, bytes_per_second=MIB)
    assert replay([*events, *wait(0, 1, 2, 3)], CPU, {"gradients": network}).seconds == pytest.approx(2)


@UNHURRIED
@given(
    launches=st.lists(
        st.tuples(st.sampled_from(["gradients", "parameters", "world"]), st.integers(0, 1000)), min_size=1, max_size=20
    ),
    data=st.data(),
)
def test_a_shared_wire_carries_all_bytes_whoever_waits_for_what_first(
    launches: list[tuple[str, int]], data: st.DataObject
) -> None:
    events: list[Event] = [launch(number, group, nbytes) for number, (group, nbytes) in enumerate(launches)]
    order = data.draw(st.permutations(range(len(launches))))
    networks = dict.fromkeys(("gradients", "parameters", "world"), PLAIN)
    total = sum(nbytes for _, nbytes in launches)
    assert replay([*events, *wait(*order)], DEVICE, networks).seconds == pytest.approx(total, abs=1e-6)


def test_a_record_that_was_written_takes_as_long(tmp_path: Path) -> None:
    events = list(zero1_record(TINY, sharded_plan(TINY, 4, 2000), 2))
    write_events(events, tmp_path / "events.jsonl")
    networks = dict.fromkeys(("gradients", "parameters", "control"), Gloo(ranks=4))
    step = replay(read_events(tmp_path / "events.jsonl"), accelerator(4), networks)
    assert step == replay(events, accelerator(4), networks)
    assert step.launches == sum(isinstance(event, Launch) for event in events)


# Records


@pytest.mark.parametrize("replan", [None, Replan(AlphaBeta(latency_seconds=1e-6, seconds_per_byte=1e-9), 1e-9)])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("cap", [1, 1300, 10**6])
def test_a_step_of_zero1_reduces_and_gathers_all_before_it_is_needed(
    cap: int, ranks: int, replan: Replan | None
) -> None:
    layouts = sharded_plan(TINY, ranks, cap, replan)
    events = list(zero1_record(TINY, layouts, 2))
    launches = [event for event in events if isinstance(event, Launch)]
    assert len({event.number for event in launches}) == len(launches)
    carried = Counter[str]()
    for event in launches:
        carried[event.kind] += event.nbytes
    padded = sum(layout.numel for layout in layouts) * TINY.itemsize
    assert TINY.nbytes <= padded < TINY.nbytes + len(layouts) * 64 * (ranks + len(TINY.numels))
    assert carried["reduce_scatter"] == carried["all_gather"] == 2 * padded
    # Before the second forward begins its last parameter, all that the first step gathered has been waited for.
    waited = {event.number for event in events if isinstance(event, Wait)}
    gathers = [event.number for event in launches if event.group == "parameters"]
    assert waited >= set(gathers[: len(layouts)])
    assert not waited & set(gathers[len(layouts) :])
    assert waited >= {event.number for event in launches if event.group != "parameters"}


def computed(events: Sequence[Event]) -> Counter[str]:
    counted = Counter[str]()
    for event in events:
        if isinstance(event, Compute):
            counted[event.kind] += event.nbytes
    return counted


def test_zero1_computes_what_ddp_computes_but_its_share_of_the_update() -> None:
    model = even_model("8 MiB", 2 * MIB, 4)
    zero1 = computed(list(zero1_record(model, sharded_plan(model, 4, 2 * MIB), 3)))
    ddp = computed(list(ddp_record(model, 3)))
    assert ddp == dict.fromkeys(("forward", "backward", "update"), 3 * model.nbytes)
    assert zero1 == {"forward": ddp["forward"], "backward": ddp["backward"], "update": ddp["update"] // 4}


def test_buckets_of_ddp_are_torch_s() -> None:
    model = even_model("even", 60 * MIB // 4, 4)
    sizes = [event.nbytes // MIB for event in ddp_record(model, 1) if isinstance(event, Launch)]
    assert sizes == [1, 25, 25, 9]


def test_the_models_have_the_sizes_of_their_names() -> None:
    assert [(len(model.numels), sum(model.numels)) for model in (gpt2_medium(), llama_7b())] == [
        (292, 354_823_168),
        (291, 6_738_415_616),
    ]
    # Large matrices have their own buckets, in which the norms between them travel.
    assert len(sharded_plan(llama_7b(), 8, 8 * MIB)) == 32 * 7 + 2


def test_the_small_decoder_is_the_one_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    from gpt import Decoder

    for width, depth in ((64, 2), (8, 1)):
        sizes = tuple(parameter.numel() for parameter in Decoder(width, depth).parameters())
        assert small_decoder(width, depth).numels == sizes


# Studies


def test_the_table_of_the_reading_is_reproduced() -> None:
    off = {(ranks, column): found / read - 1 for ranks, column, read, found in compared()}
    assert len(off) == 35
    assert all(abs(share) <= SLACK for share in off.values()), off


@pytest.mark.parametrize("model", [gpt2_medium(), llama_7b()], ids=lambda model: model.name)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_recommended_cap_exposes_no_more_than_ddp(model: Model, ranks: int) -> None:
    found = evidence(model, ranks, caps=())
    assert all(0 < plan <= 1.1 * found.ddp for plan in found.plans)


@pytest.mark.parametrize("model", [gpt2_medium(), llama_7b()], ids=lambda model: model.name)
@pytest.mark.parametrize("ranks", [128, 256, 512, 1024])
def test_the_recommended_cap_is_near_the_best_one(model: Model, ranks: int) -> None:
    found = evidence(model, ranks, caps=[2**power * MIB for power in range(6, 11)])
    assert all(found.bound <= plan <= 1.1 * found.bound for plan in (found.filled, found.counted_thrice))


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_owners_of_matrices_wait_for_the_largest_and_hold_no_more_than_two_buckets(ranks: int) -> None:
    specs = matrices()
    found = found_at(ranks, specs)
    largest = max(spec.update_cost or 0 for spec in specs)
    assert found.owners == min(ranks, len(specs))
    # Graham's bound on packing, and the floor that no number of ranks lowers.
    floor = max(found.shared_update_seconds, largest / FLOPS)
    assert floor * (1 - 1e-9) <= found.update_seconds <= floor * 4 / 3
    # A cap of 512 MiB, or the largest matrix with what it takes along.
    assert found.largest_receive_bytes <= 2 * 512 * MIB
    assert found.even_seconds < found.passed_on_seconds


def test_many_owners_are_reached_sooner_by_what_is_passed_on_than_by_a_reduce_for_each() -> None:
    few, many = (found_at(ranks, matrices()) for ranks in (8, 512))
    assert few.reduced_seconds < few.passed_on_seconds
    assert 2 * many.passed_on_seconds < many.reduced_seconds


def test_shard_groups_hold_off_the_growth_that_no_cap_holds_off() -> None:
    model = gpt2_medium()
    cluster = cluster_for(model)
    ddp, whole = ddp_step(model, 1024, cluster), zero1_step(model, 1024, 512 * MIB, cluster)
    groups = best_groups(model, 1024, cluster, caps=[256 * MIB])
    assert groups.shard_ranks < 1024
    assert groups.step.exposed_seconds < 1.2 * ddp.exposed_seconds < whole.exposed_seconds


@pytest.mark.parametrize("model", [gpt2_medium(), llama_7b()], ids=lambda model: model.name)
@pytest.mark.parametrize(("ranks", "size"), [(256, 64), (1024, 32), (1024, 64)])
def test_the_default_cap_of_shard_groups_is_near_the_best_of_caps_and_groups(
    model: Model, ranks: int, size: int
) -> None:
    cluster = dataclasses.replace(cluster_for(model), sums_wider=model.itemsize == 2)
    bound = best_groups(model, ranks, cluster, caps=[2**power * MIB for power in range(6, 10)])
    cap = default_bucket_cap(model.nbytes, assumed_wire(size, "cuda", ranks // size))
    assert zero1_step(model, ranks, cap, cluster, size).exposed_seconds <= 1.1 * bound.step.exposed_seconds


def test_a_row_has_all_that_is_compared_and_can_be_read(tmp_path: Path) -> None:
    model = even_model("tiny", 4 * MIB, 4)
    rows = [row(model, ranks, cluster_for(model)) for ranks in (8, 64, 1024)]
    for one in rows:
        assert one.groups.step.seconds <= one.best.step.seconds <= one.small_cap.seconds
        assert all(0 <= step.exposed_seconds < step.seconds for step in curves(one).values())
        assert one.flags_by_ring.seconds >= one.flags_by_doubling.seconds >= one.recommended.seconds
    lines = list(markdown(model, rows))
    assert lines[-1].startswith("\nExponents")
    columns = {line.count(" | ") for line in lines[1:-1] if line.startswith("| ")}
    assert columns == {7}
    pytest.importorskip("matplotlib")
    from benchmarks.scale.picture import picture

    picture({"tiny": {one.ranks: curves(one) for one in rows}}, tmp_path / "scale.svg")
    drawn = (tmp_path / "scale.svg").read_text()
    assert drawn.startswith("<?xml") and drawn.count("<path") > 50


def test_exponents() -> None:
    assert exponent([2.0, 5.0, 32.0], [64, 256, 1024]) == pytest.approx(1.0)
    assert exponent([2.0, 2.0], [64, 1024]) == 0
    assert math.isclose(exponent([1.0, 16.0**1.5], [64, 1024]), 1.5)


def test_steps_between_cpus_are_predicted_from_what_was_measured() -> None:
    model = Model("one tensor", (2 * MIB,), 4)
    message = AlphaBeta(latency_seconds=1e-3, seconds_per_byte=1e-9)
    times = ComputeTimes(forward=0.010, backward=0.020, update=0.004)
    found = predict(model, 4, message, times)
    wire = 8 * MIB * 1e-9
    assert found.ddp.seconds == pytest.approx(0.034 + 6e-3 + 1.5 * wire)
    # Flags go beside the gradients, and are done before them.
    each = 3e-3 + 0.75 * wire
    assert found.zero1_doubling.seconds == pytest.approx(0.031 + 2 * each, rel=1e-3)
    assert found.zero1_ring.exposed_seconds >= found.zero1_doubling.exposed_seconds


def test_between_many_cpus_flags_by_a_ring_hold_a_small_model_up() -> None:
    message = AlphaBeta(latency_seconds=40e-6, seconds_per_byte=1 / 1.25e9)
    found = predict(small_decoder(8, 1), 16, message, ComputeTimes(1e-3, 2e-3, 5e-4))
    assert found.zero1_ring.exposed_seconds > 1.1 * found.zero1_doubling.exposed_seconds


def test_a_phase_of_a_record_is_played_after_what_comes_before_it() -> None:
    setup: list[Event] = [Launch("setup", "gradients", "all_reduce", 4, None, 1)]
    steps: list[Event] = [Compute("step", "forward", 3), *wait(1)]
    after: list[Event] = [Compute("load", "forward", 100)]
    step, events = replay_phase([*setup, *steps, *after], "step", DEVICE, ONE_WIRE)
    assert (step.seconds, step.exposed_seconds, list(events)) == (4, 1, steps)
    with pytest.raises(ValueError, match="Invalid phase: 'replan'"):
        replay_phase(steps, "replan", DEVICE, ONE_WIRE)


@pytest.mark.parametrize(("plane", "options"), [("nccl", []), ("gloo", ["--seconds-per-mib", "0.01", "0.02", "0.003"])])
def test_a_recorded_file_is_played(plane: str, options: list[str], tmp_path: Path) -> None:
    model = even_model("16 MiB", 4 * MIB, 4)
    write_events(zero1_record(model, sharded_plan(model, 8, 4 * MIB), 2), tmp_path / "events.jsonl")
    step = replay_record.main([str(tmp_path / "events.jsonl"), "--ranks", "8", "--plane", plane, *options])
    assert step.launches == 2 * (4 + 1 + 4)
    if plane == "gloo":
        assert step.compute_seconds == pytest.approx(2 * 16 * (0.03 + 0.003 / 8))
    assert 0 < step.exposed_seconds < step.seconds


def test_what_a_plane_of_cpus_takes_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        replay_record.main([str(tmp_path / "events.jsonl"), "--ranks", "8", "--plane", "gloo"])


def test_a_step_over_a_slow_wire_is_expected_to_take_what_wire_and_cores_take() -> None:
    # One bucket of 0.94 MiB on an interface of 1 MB/s, computations of 180 ms forward and 360 backward.
    emulated = Emulated(hop_ms=0.0, cap_mb=1.0)
    alone, shared = expected(emulated, 2)["zero1_custom"], expected(emulated, 8)["zero1_custom"]
    wire = 60 * 4096 * 4 / 1e6
    per_message, of_host = 110e-6, 12e-3
    assert alone == pytest.approx(0.54 + 2 * (wire / 2 + per_message) + of_host, rel=0.02)
    # Four ranks share each core.
    assert shared == pytest.approx(0.54 + 2 * (wire * 7 / 8 + 4 * 7 * per_message) + 4 * of_host, rel=0.02)
    assert expected(emulated, 2)["ddp"] == pytest.approx(0.54 + wire, rel=0.05)


def test_messages_leave_one_after_the_other_and_arrive_a_latency_later() -> None:
    arrived: list[float] = []
    all_have = threading.Event()

    def deliver() -> None:
        arrived.append(time.perf_counter())
        if len(arrived) == 3:
            all_have.set()

    interface, began = Interface(latency_seconds=0.2, seconds_per_byte=0.01), time.perf_counter()
    for _ in range(3):
        interface.send(5, deliver)
    assert all_have.wait(30)
    # A sleep may take longer, and never less.
    for number, at in enumerate(arrived, start=1):
        assert at - began >= 0.2 + 0.05 * number
