"""Draws exposed milliseconds against ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.scale.simulator import Step

COLORS = ("#24292f", "#d9643a", "#4059ad", "#7fb23d", "#2fa88f", "#e0a526", "#2a8fbd", "#9a6fb0")
STYLE: Any = {"font.family": "DejaVu Sans", "font.size": 9.5, "svg.hashsalt": "scale", "text.color": "#24292f"}


def picture(models: Mapping[str, Mapping[int, Mapping[str, Step]]], path: Path) -> None:
    """Draws a panel for each model, both axes logarithmic.

    Args:
        models: By name and number of ranks, the steps of each curve.
        path: Where to write it, as SVG.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(models), 5.2), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, (name, rows) in zip(panels, models.items(), strict=True):
            curves = dict.fromkeys(curve for row in rows.values() for curve in row)
            for place, (color, curve) in enumerate(zip(COLORS, curves, strict=False)):
                points = [(ranks, 1e3 * row[curve].exposed_seconds) for ranks, row in rows.items() if curve in row]
                # Ever thinner: several curves are the same for most ranks.
                axes.plot(
                    *zip(*points, strict=True),
                    color=color,
                    label=curve,
                    marker="o",
                    markersize=3,
                    linewidth=5 - 0.5 * place,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(list(rows), [str(ranks) for ranks in rows], fontsize=8)
            axes.set_xlabel("GPUs")
            axes.set_title(name, loc="left", fontweight="bold", fontsize=10.5)
            axes.grid(color="#e5e7eb", linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("exposed, ms a step")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
