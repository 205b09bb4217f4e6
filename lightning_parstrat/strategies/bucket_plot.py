"""A plot of buckets: when gradients are ready and, above, what is on the wire; default beside planned."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_parstrat.core.tuning_report import BucketTimes, TuningReport
from lightning_parstrat.core.wording import counted


def can_plot() -> bool:
    """Whether matplotlib is installed (the extra ``plot``)."""
    return find_spec("matplotlib") is not None


def plot_buckets(report: TuningReport, path: Path) -> None:
    """Draws the timeline of one backward with the default's buckets and with the planned ones.

    Args:
        report: The tuning's report.
        path: Path of the image; a missing folder is created.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    # Not pyplot, which would choose a backend for the entire process, and keep the figure alive.
    FigureCanvasAgg(figure)
    columns = [("default", report.default_buckets), ("planned", report.planned_buckets)]
    rows = figure.subplots(2, len(columns), sharex=True, sharey="row", height_ratios=[1, 2], squeeze=False)
    for column, (name, buckets) in enumerate(columns):
        _draw_wire(rows[0][column], buckets)
        rows[0][column].set_title(f"{name}: {counted(len(buckets), 'bucket')}")
        _draw_gradients(rows[1][column], report, buckets)
    rows[0][0].set(ylabel="wire", yticks=[])
    rows[1][0].set(ylabel="MB of gradients")
    figure.suptitle(f"{report.verdict}: {report.reason}"[:150], fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_wire(axes: Any, buckets: tuple[BucketTimes, ...]) -> None:
    for number, bucket in enumerate(buckets):
        begin, seconds = 1000 * bucket.begin_seconds, 1000 * (bucket.end_seconds - bucket.begin_seconds)
        axes.broken_barh([(begin, seconds)], (0, 1), facecolors=("tab:blue", "lightskyblue")[number % 2])


def _draw_gradients(axes: Any, report: TuningReport, buckets: tuple[BucketTimes, ...]) -> None:
    ready, total = [0.0], [0.0]
    for seconds, nbytes in report.gradients:
        ready.append(1000 * seconds)
        total.append(total[-1] + nbytes / 1e6)
    axes.step(ready, total, where="post", color="0.4", label="ready")
    sent, arrived = [0.0], [0.0]
    for bucket in buckets:
        sent += [1000 * bucket.begin_seconds, 1000 * bucket.end_seconds]
        arrived += [arrived[-1], arrived[-1] + bucket.nbytes / 1e6]
    axes.plot(sent, arrived, color="tab:blue", label="arrived")
    axes.axvline(ready[-1], color="0.4", linestyle=":", label="last gradient")
    axes.set_xlabel("ms since backward began")
    axes.legend(loc="upper left", frameon=False)
