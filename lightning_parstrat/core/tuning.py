"""The sizes of DDP's buckets that are tried, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_parstrat.core.checks import check, is_number, is_whole
from lightning_parstrat.core.wording import counted

CapsInMiB = float | list[float] | Literal["auto"]
Verdict = Literal["tuned", "default is best", "not tuned"]

_SIZES = tuple(size * 2**18 for size in (1, 4, 16, 64, 256))
"""256 KiB to 64 MiB. torch's default is 25 MiB, after a first bucket of 1 MiB."""

MEASURES = "LIGHTNING_PARSTRAT_TUNE"
"""A variable that ``lightning-parstrat tune`` sets: a training writes its times to that file, and saves nothing."""


@dataclass(frozen=True, kw_only=True)
class TuningPolicy:
    """How DDP's buckets are chosen.

    Args:
        bucket_cap_mb: ``"auto"`` tries sizes. A number of MiB (2**20 bytes) is the size of all buckets. A list has one
            number for each bucket, in the order in which buckets are sent.
        tune_steps: How many steps of each size are measured to compare two sizes, half of them at a time.
        tune_tolerance: The smallest gain for which buckets are changed. It is a share of the time from the start of
            forward to the end of backward.

    Raises:
        ValueError: A value is not allowed. The message contains the allowed ones.
    """

    bucket_cap_mb: CapsInMiB = "auto"
    tune_steps: int = 10
    tune_tolerance: float = 0.01

    def __post_init__(self) -> None:
        given, tolerance = self.bucket_cap_mb, self.tune_tolerance
        caps = given if isinstance(given, (list, tuple)) else [given]
        allowed = given == "auto" or (bool(caps) and all(is_number(cap) and float(cap) > 0 for cap in caps))
        must_be = "'auto', a positive number of MiB such as 25, or a list of such numbers"
        check(self, "bucket_cap_mb", allowed, must_be)
        check(self, "tune_steps", is_whole(self.tune_steps, 2), "a whole number >= 2")
        check(self, "tune_tolerance", is_number(tolerance) and 0 <= tolerance < 1, "a number >= 0 and < 1")


class Tried(NamedTuple):
    """A size that was tried, in bytes of all buckets, and its seconds. torch's default size is None.

    Seconds are those of a forward and backward, communication included. They are the median of the slowest rank.
    """

    cap: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """The result of tuning the buckets of one training.

    Attributes:
        verdict: ``"tuned"``, ``"default is best"`` or ``"not tuned"``.
        reason: The reason, as text.
        cap: Bytes at which each bucket is full. For the default, None.
        tried: The sizes that were tried, each with its latest measurement.
        steps: How many steps the tuning took. All of them trained.
        from_cache: Whether the size comes from an earlier training.
    """

    verdict: Verdict
    reason: str
    cap: int | None = None
    tried: tuple[Tried, ...] = ()
    steps: int = 0
    from_cache: bool = False

    @property
    def bucket_cap_mb(self) -> float | None:
        """The result as ``bucket_cap_mb`` of :class:`~lightning_parstrat.TunedDDPStrategy`. For the default, None."""
        return None if self.cap is None else self.cap / 2**20

    @property
    def headline(self) -> str:
        """The result in one line, for the log."""
        return f"{_RESULTS[self.verdict]}{' (from the cache)' if self.from_cache else ''}: {self.reason}"

    def __str__(self) -> str:
        tried = [f"{_size(one.cap)}: forward and backward {1000 * one.seconds:.2f} ms" for one in self.tried]
        steps = [f"tuning took {counted(self.steps, 'step')}"] if self.steps else []
        return "\n".join([self.headline, *tried, *steps])


_RESULTS: dict[Verdict, str] = {
    "tuned": "buckets are tuned",
    "default is best": "the default's buckets stay",
    "not tuned": "buckets are not tuned",
}


def sizes_to_try(nbytes: int) -> list[int]:
    """Sizes in bytes that lead to other buckets than the default, and than each other.

    Args:
        nbytes: Bytes of all gradients.
    """
    smaller = [size for size in _SIZES if size < nbytes]
    # All larger sizes make one bucket. So does the default, if its first bucket takes everything.
    larger = [size for size in _SIZES if size >= nbytes > 2**20]
    return smaller + larger[:1]


def fastest(tried: Sequence[Tried]) -> Tried:
    """The fastest size other than the default. Of equal ones, the largest, which sends the fewest messages."""
    return min((one for one in tried if one.cap is not None), key=lambda one: (one.seconds, -(one.cap or 0)))


def verdict_on(default: Tried, best: Tried, tolerance: float) -> TuningReport:
    """Whether a size is kept that was measured in alternation with the default.

    Args:
        default: The default, as measured in this alternation.
        best: The size.
        tolerance: The smallest gain for which buckets are changed, as a share of the default's time.
    """
    gain = 1.0 - best.seconds / default.seconds
    took = f"{1000 * best.seconds:.1f} ms instead of {1000 * default.seconds:.1f}"
    if best.cap is not None and gain > tolerance:
        return TuningReport(
            verdict="tuned", reason=f"{_size(best.cap)} gains {gain:.1%} of forward and backward ({took})", cap=best.cap
        )
    reason = f"the best other size, {_size(best.cap)}, gains {gain:.1%} of forward and backward ({took})"
    return TuningReport(verdict="default is best", reason=reason)


def _size(cap: int | None) -> str:
    return "torch's default" if cap is None else f"{cap / 2**20:g} MiB"
