"""The picture of a plan is drawn, whatever of it there is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_parstrat.core.tuning_report import BucketTimes, TuningReport
from lightning_parstrat.strategies.bucket_plot import can_plot, plot_buckets

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")

REPORT = TuningReport(
    verdict="tuned",
    reason="the planned buckets gain 12.5% of a step",
    world_size=2,
    default_buckets=(BucketTimes(3, 2**20, 0.01, 0.01, 0.02),),
    planned_buckets=(BucketTimes(1, 2**19, 0.004, 0.004, 0.007), BucketTimes(2, 2**19, 0.01, 0.01, 0.013)),
    gradients=((0.0, 0), (0.004, 2**19), (0.01, 2**19)),
)


def colours(path: Path) -> int:
    image = pytest.importorskip("matplotlib.image").imread(path)
    return len(torch.tensor(image).flatten(0, 1).unique(dim=0))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    assert can_plot()
    path = tmp_path / "plans" / "plan.png"
    plot_buckets(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = tmp_path / "empty.png"
    plot_buckets(replace(REPORT, default_buckets=(), planned_buckets=(), gradients=(), reason="x" * 500), empty)
    assert path.stat().st_size > empty.stat().st_size > 0
    # Buckets are blue, in two shades.
    assert colours(path) > colours(empty)
