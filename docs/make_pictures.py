"""Draws the pictures of README.md and of the pages on how the strategies work.

    python docs/make_pictures.py [folder]

Nothing is measured here. Timelines show a step of a small model under a cost model: a latency, and a time per byte.
That of a pipeline, and bars, show the result files of the benchmarks.
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

MIB = 2**20
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


class Wire(NamedTuple):
    """What a collective takes."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """The time of one of so many bytes."""
        return self.latency_seconds + self.seconds_per_byte * nbytes


GIGABIT = Wire(latency_seconds=0.3e-3, seconds_per_byte=8e-9)
"""What an all-reduce between two nodes takes: each sends as many bytes as it has."""

LAYERS = 6
LAYER_BYTES = 7 * MIB
FORWARD, BACKWARD, STEP = 0.022, 0.044, 0.016
"""Seconds of a layer: its forward, its backward, and the step of all its parameters."""

NARROW = 0.028
"""Seconds on the scale of time in which a word does not fit."""

COLORS = ("#4059ad", "#2a8fbd", "#2fa88f", "#7fb23d", "#e0a526", "#d9643a")
INK, QUIET, WAIT = "#24292f", "#6b7280", "#e5e7eb"
STYLE = {"font.family": "DejaVu Sans", "font.size": 9.5, "svg.hashsalt": "timelines", "text.color": INK}


class Bar(NamedTuple):
    """Something that takes time on a lane."""

    lane: str
    begin: float
    end: float
    color: str
    text: str


class Timeline(NamedTuple):
    """What happens on the lanes of one rank; phases are named above it, and waits are on the first."""

    title: str
    bars: list[Bar]
    phases: list[tuple[str, float, float]]
    waits: list[tuple[str, float, float]]


class Lane:
    """Does one thing after the other, each when it may begin."""

    def __init__(self, name: str, bars: list[Bar]) -> None:
        self.name, self.bars, self.free = name, bars, 0.0

    def take(self, earliest: float, seconds: float, color: str, text: str) -> float:
        """Begins as soon as ``earliest`` and the lane allow; returns the end."""
        begin = max(earliest, self.free)
        self.free = begin + seconds
        self.bars.append(Bar(self.name, begin, self.free, color, text))
        return self.free


def backward_of(compute: Lane) -> list[float]:
    """When the gradient of each layer is ready, from the first layer to the last, which is ready first."""
    ready = [0.0] * LAYERS
    for layer in reversed(range(LAYERS)):
        ready[layer] = compute.take(0.0, BACKWARD, COLORS[layer], str(layer + 1))
    return ready


def forward_of(compute: Lane, arrived: Sequence[float]) -> None:
    """A forward, each layer of which waits for its parameters."""
    for layer in range(LAYERS):
        compute.take(arrived[layer], FORWARD, COLORS[layer], str(layer + 1))


def ddp_step() -> Timeline:
    """All-reduces beside backward, then each rank steps everything."""
    bars: list[Bar] = []
    compute, wire = Lane("computes", bars), Lane("wire", bars)
    ready = backward_of(compute)
    backward_ends = compute.free
    for layer in reversed(range(LAYERS)):
        wire.take(ready[layer], GIGABIT.seconds(LAYER_BYTES), COLORS[layer], f"all-reduce {layer + 1}")
    for layer in range(LAYERS):
        compute.take(wire.free, STEP, COLORS[layer], str(layer + 1))
    stepped = compute.free
    forward_of(compute, [stepped] * LAYERS)
    phases = [
        ("backward", 0.0, backward_ends),
        ("step of all", wire.free, stepped),
        ("next forward", stepped, compute.free),
    ]
    return Timeline("ddp", bars, phases, [("waits", backward_ends, wire.free)])


def zero1_step() -> Timeline:
    """Reduce-scatters beside backward, a step of half of each bucket, all-gathers beside the next forward."""
    half = Wire(latency_seconds=GIGABIT.latency_seconds, seconds_per_byte=GIGABIT.seconds_per_byte / 2)
    bars: list[Bar] = []
    compute, wire = Lane("computes", bars), Lane("wire", bars)
    ready = backward_of(compute)
    backward_ends = compute.free
    for layer in reversed(range(LAYERS)):
        wire.take(ready[layer], half.seconds(LAYER_BYTES), COLORS[layer], f"RS {layer + 1}")
    reduced = wire.free
    arrived = []
    for layer in range(LAYERS):
        stepped = compute.take(reduced, STEP / 2, COLORS[layer], "")
        arrived.append(wire.take(stepped, half.seconds(LAYER_BYTES), COLORS[layer], f"AG {layer + 1}"))
    stepped = compute.free
    forward_of(compute, arrived)
    phases = [
        ("backward", 0.0, backward_ends),
        ("step of\nits half", reduced, stepped),
        ("next forward", arrived[0], compute.free),
    ]
    computed = [bar for bar in bars if bar.lane == compute.name]
    late = [("", one.end, other.begin) for one, other in pairwise(computed) if stepped <= one.end < other.begin]
    return Timeline("zero1_custom", bars, phases, [("waits", backward_ends, reduced), *late])


def ddp_buckets(title: str, stops: Sequence[int], nbytes: Sequence[int], ready: Sequence[float]) -> Timeline:
    """A backward whose gradients travel in those buckets."""
    bars: list[Bar] = []
    compute, wire = Lane("backward", bars), Lane("wire, MiB", bars)
    begin = 0
    for number, stop in enumerate(stops):
        color = COLORS[number % len(COLORS)]
        for item in range(begin, stop):
            compute.take(0.0, ready[item] - compute.free, color, "")
        size = sum(nbytes[begin:stop])
        wire.take(ready[stop - 1], GIGABIT.seconds(size), color, f"{size / MIB:.0f}")
        begin = stop
    exposed = (f"exposed: {1000 * (wire.free - ready[-1]):.0f} ms", ready[-1], wire.free)
    return Timeline(title, bars, [], [exposed])


def unequal_step(title: str, samples: Sequence[int]) -> Timeline:
    """A step of two ranks. The second one takes three times as long for a sample."""
    bars: list[Bar] = []
    ends = []
    for rank, (number, seconds) in enumerate(zip(samples, (0.001, 0.003), strict=True)):
        lane = Lane(f"rank {rank}", bars)
        lane.take(0.0, number * seconds, COLORS[rank], f"forward: {number}")
        lane.take(0.0, 2 * number * seconds, COLORS[rank], f"backward: {number} samples")
        ends.append(lane.free)
    waits = [("waits", ends[0], ends[1])] if ends[0] < ends[1] else []
    return Timeline(title, bars, [], waits)


def pipeline_step() -> Timeline:
    """A measured step of two stages: the micro-batches that each runs forward and backward."""
    spans = json.loads((RESULTS / "pipeline_schedule.json").read_text())["spans"]
    colors = {"forward": COLORS[0], "backward": COLORS[2]}
    bars = [
        Bar(f"rank {rank}", begin, end, colors[kind], str(number))
        for rank, of_rank in enumerate(spans)
        for kind, number, begin, end in of_rank
    ]
    return Timeline("1f1b: forwards in blue, backwards in green", bars, [], [])


def default_stops(nbytes: Sequence[int]) -> list[int]:
    """Where torch's default ends a bucket: the first as soon as it holds 1 MiB, the others 25."""
    stops, held, cap = [], 0, 1 * MIB
    for item, size in enumerate(nbytes):
        held += size
        if held >= cap:
            stops.append(item + 1)
            held, cap = 0, 25 * MIB
    return stops if stops[-1] == len(nbytes) else [*stops, len(nbytes)]


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draws one below the other, on the same scale of time."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 2.05 * len(timelines) + 0.45), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        rows = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        last = max(bar.end for timeline in timelines for bar in timeline.bars)
        for axes, timeline in zip(rows, timelines, strict=True):
            draw_timeline(axes, timeline)
            axes.set_xlim(-0.002, 1000 * last * 1.01)
        rows[-1].set_xlabel("ms", color=QUIET)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_timeline(axes: Any, timeline: Timeline) -> None:
    """Draws the lanes of a rank: what it computes, and below it what is on its wire."""
    lanes = list(dict.fromkeys(bar.lane for bar in timeline.bars))
    heights = {lane: 1.0 - 1.25 * number for number, lane in enumerate(lanes)}
    for bar in timeline.bars:
        y, begin, width = heights[bar.lane], 1000 * bar.begin, 1000 * (bar.end - bar.begin)
        axes.broken_barh([(begin, width)], (y, 1.0), facecolors=bar.color, edgecolor="white", linewidth=1.2)
        axes.text(begin + width / 2, y + 0.5, bar.text, ha="center", va="center", color="white", fontsize=8)
    for text, begin, end in timeline.waits:
        span = [(1000 * begin, 1000 * (end - begin))]
        axes.broken_barh(span, (heights[lanes[0]], 1.0), facecolors=WAIT, hatch="////", edgecolor="white")
        fits = end - begin > NARROW
        x, side = (500 * (begin + end), "center") if fits else (1000 * end + 4, "left")
        axes.text(x, heights[lanes[0]] + 0.5, text, ha=side, va="center", fontsize=8)
    for text, begin, end in timeline.phases:
        axes.text(500 * (begin + end), 2.15, text, ha="center", va="bottom", color=QUIET, fontsize=8.5)
    axes.set_title(timeline.title, loc="left", fontweight="bold", fontsize=10.5, pad=14 if timeline.phases else 4)
    axes.set_yticks([heights[lane] + 0.5 for lane in lanes], lanes)
    axes.set_ylim(-0.35, 2.1)
    axes.tick_params(axis="both", length=0, colors=QUIET)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(WAIT)
    axes.grid(axis="x", color=WAIT, linewidth=0.7)
    axes.set_axisbelow(True)


def draw_bars(title: str, unit: str, bars: dict[str, float], path: Path) -> None:
    """Draws horizontal bars with their numbers. Those of this package are in color."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 0.36 * len(bars) + 0.5), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        colors = [COLORS[0] if name.endswith("_custom") else "#9aa3b2" for name in bars]
        drawn = axes.barh(list(bars), list(bars.values()), color=colors, height=0.68)
        axes.bar_label(drawn, [f"{value:.3g} {unit}" for value in bars.values()], padding=4)
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10.5)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_results(folder: Path) -> None:
    """Draws what was measured: memory of a rank, and step times of several programs."""
    memory = json.loads((RESULTS / "memory.json").read_text())["memory"]
    peaks = {name: memory[name]["peak_growth"] / 10**6 for name in ("ddp", "zero1_custom")}
    draw_bars("Peak memory of a rank of two, with activations", "MB", peaks, folder / "memory_of_a_rank.svg")
    times = json.loads((RESULTS / "step_time_peers_1gbit.json").read_text())["step_time"]
    names = {"ddp": "ddp", "ddp+zero_redundancy": "ddp, ZeroRedundancyOptimizer", "fsdp2": "FSDP2"}
    medians = {label: times[name]["median"] for name, label in (*names.items(), ("zero1_custom", "zero1_custom"))}
    title = "A step of two ranks on CPUs, over Gloo at 1 Gbit/s"
    draw_bars(title, "s", medians, folder / "step_time_beside_others.svg")


def main(folder: Path) -> None:
    """Draws every picture into ``folder``."""
    draw([ddp_step(), zero1_step()], folder / "zero1_step.svg")
    # The gradients of a GPT of 13 equal parts, the last of them its embedding.
    nbytes = [round(3.07 * MIB)] * 13
    ready = [0.69 * (item + 1) / len(nbytes) for item in range(len(nbytes))]
    # Two gradients each, as a size of 4 MiB makes them.
    small = [*range(2, len(nbytes), 2), len(nbytes)]
    buckets = {"torch's default": default_stops(nbytes), "4 MiB": small}
    draw([ddp_buckets(title, stops, nbytes, ready) for title, stops in buckets.items()], folder / "ddp_buckets.svg")
    shares = {"Equal shares": (8, 8), "rank_shares=[3, 1]": (12, 4)}
    draw([unequal_step(title, samples) for title, samples in shares.items()], folder / "unequal_step.svg")
    draw([pipeline_step()], folder / "pipeline_step.svg")
    draw_results(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
