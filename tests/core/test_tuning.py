"""Which sizes of buckets are tried, and what decides between them."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_parstrat.core.tuning import Tried, TuningReport, fastest, sizes_to_try, verdict_on

MIB = 2**20


def test_sizes_are_those_that_lead_to_other_buckets() -> None:
    for nbytes, expected in {
        100 * MIB: [MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
        10 * MIB: [MIB // 4, MIB, 4 * MIB, 16 * MIB],
        # One bucket is the default's, too.
        MIB: [MIB // 4],
        1000: [],
    }.items():
        assert sizes_to_try(nbytes) == expected


def test_the_fastest_is_the_largest_of_equal_ones_and_never_the_default() -> None:
    tried = [Tried(None, 0.5), Tried(10, 1.0), Tried(20, 0.9), Tried(30, 0.9), Tried(40, 1.1)]
    assert fastest(tried) == Tried(30, 0.9)


@given(st.floats(0.001, 10), st.floats(0.001, 10), st.floats(0, 0.99))
def test_what_gains_more_than_the_tolerance_is_kept(default: float, best: float, tolerance: float) -> None:
    report = verdict_on(Tried(None, default), Tried(4 * MIB, best), tolerance)
    assert (report.cap == 4 * MIB) == (report.verdict == "tuned") == (1 - best / default > tolerance)
    assert report.bucket_cap_mb == (None if report.cap is None else 4.0)
    assert "4 MiB" in report.headline


def test_a_report_says_what_was_tried() -> None:
    tried = (Tried(None, 0.2), Tried(MIB // 4, 0.3), Tried(MIB, 0.1))
    report = TuningReport(verdict="tuned", reason="1 MiB gains 50.0%", cap=MIB, tried=tried, steps=40)
    assert str(report).splitlines() == [
        "buckets are tuned: 1 MiB gains 50.0%",
        "torch's default: forward and backward 200.00 ms",
        "0.25 MiB: forward and backward 300.00 ms",
        "1 MiB: forward and backward 100.00 ms",
        "tuning took 40 steps",
    ]
    kept = TuningReport(verdict="default is best", reason="found before", from_cache=True)
    assert str(kept) == "the default's buckets stay (from the cache): found before"
