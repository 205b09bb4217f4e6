"""The result of tuning DDP's buckets: for the log, as JSON, and for the plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.core.tuning import Caps, Plan, Problem, Verdict
from lightning_parstrat.core.wording import counted

FORMAT = 1


class BucketTimes(NamedTuple):
    """A bucket on the wire according to the model; seconds are from the start of backward."""

    parameters: int
    nbytes: int
    ready_seconds: float
    begin_seconds: float
    end_seconds: float


class Measured(NamedTuple):
    """Medians over steps, of the slowest rank: forward and backward together, and the exposed communication in it."""

    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """What was found about the buckets of one training. All times are in seconds.

    Attributes:
        verdict: ``"tuned"``, ``"default is best"``, ``"bandwidth-bound"`` (no buckets can help), or ``"not tuned"``.
        reason: Why, as text.
        caps: Bytes at which each bucket is full, in the order in which they are sent; None for the default's.
        world_size: Number of ranks.
        cost: Latency and time per byte of an all-reduce while the module computes; None where none was measured.
        load: How many times slower that is than while nothing computes.
        spread: Median relative distance of the measurements from ``cost``, before the load: the fit's confidence.
        backward_seconds: From the start of backward to the last gradient.
        default: What was measured with the default's buckets.
        planned: What was measured with the planned ones; None where they were not tried.
        predicted_default_seconds: What the model exposes with the default's buckets.
        predicted_planned_seconds: What it exposes with the planned ones.
        bound_seconds: The least that any buckets can expose, according to the model.
        default_buckets: The default's buckets on the wire.
        planned_buckets: The planned ones.
        gradients: When each gradient is ready and its bytes, in that order.
        steps: How many steps it took.
        overhead_seconds: How much longer those took than the same number with the default's buckets, measurements
            included.
        from_cache: Whether the plan comes from an earlier training.
    """

    verdict: Verdict
    reason: str
    caps: Caps | None = None
    world_size: int
    cost: AlphaBeta | None = None
    load: float | None = None
    spread: float | None = None
    backward_seconds: float | None = None
    default: Measured | None = None
    planned: Measured | None = None
    predicted_default_seconds: float | None = None
    predicted_planned_seconds: float | None = None
    bound_seconds: float | None = None
    default_buckets: tuple[BucketTimes, ...] = ()
    planned_buckets: tuple[BucketTimes, ...] = ()
    gradients: tuple[tuple[float, int], ...] = ()
    steps: int = 0
    overhead_seconds: float = 0.0
    from_cache: bool = False

    @property
    def bucket_cap_mb(self) -> list[float] | None:
        """The plan as ``bucket_cap_mb`` of :class:`~lightning_parstrat.TunedDDPStrategy`; None for the default's."""
        return None if self.caps is None else [cap / 2**20 for cap in self.caps]

    @property
    def headline(self) -> str:
        """The result in one line, for the log."""
        return f"{_RESULTS[self.verdict]}{' (from the cache)' if self.from_cache else ''}: {self.reason}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report for a reader, who gets it by ``print(report)``."""
        lines = [self.headline]
        if self.cost is not None and self.backward_seconds is not None:
            lines.append(
                f"an all-reduce over {counted(self.world_size, 'rank')} takes {_ms(self.cost.latency_seconds)} and"
                f" {1e9 * self.cost.seconds_per_byte:.3g} ns a byte beside backward, which takes"
                f" {_ms(self.backward_seconds)}"
            )
        if self.default is not None:
            lines.append(f"default: {_described(self.default, self.predicted_default_seconds, self.default_buckets)}")
        if self.planned is not None:
            lines.append(f"planned: {_described(self.planned, self.predicted_planned_seconds, self.planned_buckets)}")
        if self.bound_seconds is not None:
            lines.append(f"no buckets can expose less than {_ms(self.bound_seconds)}, by the model")
        if self.steps:
            lines.append(
                f"tuning took {counted(self.steps, 'step')}, and {self.overhead_seconds:+.2f} s compared with the same"
                " number with the default's buckets"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """All of it, for ``json.dump``; :meth:`from_json` reads it."""
        return {"format": FORMAT, "bucket_cap_mb": self.bucket_cap_mb, **asdict(self)}

    def as_text(self) -> str:
        """The JSON of it, as a file's content."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TuningReport":
        """Reads the result of :meth:`as_json`.

        Raises:
            ValueError: It has another format, or is damaged.
        """
        if values.get("format") != FORMAT:
            raise ValueError(f"a report of format {values.get('format')!r}; this version reads {FORMAT}")
        fields = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        try:
            # The file may have been edited since; what is not checked here would fail later, within a training.
            for name in _NUMBERS:
                if not isinstance(fields[name], (int, float, type(None))):
                    raise ValueError(f"a report that is damaged: {name} is {fields[name]!r}")
            return cls(
                **{
                    **fields,
                    "verdict": _checked_verdict(fields["verdict"]),
                    "caps": None if fields["caps"] is None else _checked_caps(fields["caps"]),
                    "cost": None if fields["cost"] is None else AlphaBeta(**fields["cost"]),
                    "default": None if fields["default"] is None else Measured(*map(float, fields["default"])),
                    "planned": None if fields["planned"] is None else Measured(*map(float, fields["planned"])),
                    "default_buckets": tuple(BucketTimes(*times) for times in fields["default_buckets"]),
                    "planned_buckets": tuple(BucketTimes(*times) for times in fields["planned_buckets"]),
                    "gradients": tuple((seconds, nbytes) for seconds, nbytes in fields["gradients"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a report that is damaged: {error!r}") from error


_RESULTS: dict[Verdict, str] = {
    "tuned": "buckets are tuned",
    "default is best": "the default's buckets stay",
    "bandwidth-bound": "the default's buckets stay",
    "not tuned": "buckets are not tuned",
}

_NUMBERS = (
    "load",
    "spread",
    "backward_seconds",
    "predicted_default_seconds",
    "predicted_planned_seconds",
    "bound_seconds",
    "steps",
    "overhead_seconds",
)


def bucket_times(problem: Problem, plan: Plan, cost: AlphaBeta) -> tuple[BucketTimes, ...]:
    """When each bucket of a plan is ready, begins and has arrived.

    Args:
        problem: What is trained.
        plan: Its buckets.
        cost: What a bucket takes.
    """
    times: list[BucketTimes] = []
    ready = free = 0.0
    for bucket in plan.buckets:
        nbytes = sum(problem.nbytes[index] for index in bucket)
        # DDP sends buckets in order: one late gradient also delays all buckets behind its own.
        ready = max(ready, *(problem.ready_seconds[index] for index in bucket))
        begin = max(ready, free)
        free = begin + cost.seconds(nbytes)
        times.append(BucketTimes(len(bucket), nbytes, ready, begin, free))
    return tuple(times)


def gradient_times(nbytes: Sequence[int], ready_seconds: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """When each gradient is ready, and its bytes, in that order."""
    return tuple(sorted(zip(ready_seconds, nbytes, strict=True)))


def _checked_verdict(verdict: Any) -> Verdict:
    for allowed in get_args(Verdict):
        if verdict == allowed:
            known: Verdict = allowed
            return known
    raise ValueError(f"a report that is damaged: {verdict!r} is no verdict")


def _checked_caps(caps: Sequence[Any]) -> Caps:
    for cap in caps:
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise ValueError(f"a report that is damaged: {cap!r} bytes are no size of a bucket")
    if not caps:
        raise ValueError("a report that is damaged: its plan has no buckets")
    return tuple(caps)


def _described(measured: Measured, predicted: float | None, buckets: Sequence[BucketTimes]) -> str:
    sizes = counted(len(buckets), "bucket") if buckets else "the usual buckets"
    model = "" if predicted is None else f", {_ms(predicted)} by the model"
    return (
        f"{sizes}, forward and backward {_ms(measured.seconds)}, of which communication exposes"
        f" {_ms(measured.exposed_seconds)}{model}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
