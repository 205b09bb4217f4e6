"""The result file, of rows by key, and what is shown of a row."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STEP_GOAL = MEMORY_GOAL = 1.05
"""What one rank may take of a single-device training."""


def merge(path: Path, key: str, row: Mapping[str, Any]) -> None:
    """Puts a row in the place of an earlier one, and leaves the others."""
    known = json.loads(path.read_text()) if path.is_file() else {"rows": {}}
    known["rows"][key] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(known, indent=2) + "\n")
    os.replace(whole, path)


def summarize(row: dict[str, Any]) -> None:
    """Adds to each strategy of a row its median step, and how it compares with the first one, turn by turn."""
    contenders = row.get("contenders", {})
    base = next(iter(contenders.values()), {"turns": []})
    for one in contenders.values():
        seconds = [turn["seconds"] for turn in one["turns"]]
        if seconds:
            one["step_seconds"] = _spread(seconds)
        # Where a strategy has failed, the last turns of the other have none beside them.
        ratios = [own / turn["seconds"] for own, turn in zip(seconds, base["turns"], strict=False)]
        if ratios:
            one["step_ratio"] = _spread(ratios)
        for field in ("peak_allocated", "peak_reserved", "held_allocated"):
            found = [turn[field] for turn in one["turns"] if field in turn]
            if found:
                one[field] = max(found)
        if "peak_allocated" in one and "peak_allocated" in base:
            one["peak_ratio"] = one["peak_allocated"] / base["peak_allocated"]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def lines_of(key: str, row: Mapping[str, Any]) -> Iterator[str]:
    """A row as text: a line for each strategy."""
    yield key
    for reason in ("skipped", "failed"):
        if reason in row:
            yield f"  {reason}: {row[reason]}"
    for name, one in row.get("contenders", {}).items():
        if "failed" in one:
            yield f"  {name:36s} failed in {one['failed']}"
        parts = list(_parts(one))
        if parts:
            yield f"  {name:36s} " + ", ".join(parts)
    yield from (f"  {line}" for line in _verdicts(key, row))


def _parts(one: Mapping[str, Any]) -> Iterator[str]:
    if "step_seconds" in one:
        step, ratio = one["step_seconds"], one.get("step_ratio")
        of_first = "" if ratio is None else f", x{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        yield f"{1e3 * step['median']:.2f} ms ({1e3 * step['min']:.2f} to {1e3 * step['max']:.2f}){of_first}"
    if "peak_allocated" in one:
        yield f"peak {one['peak_allocated'] / 1e9:.3f} GB" + (
            f" x{one['peak_ratio']:.3f}" if "peak_ratio" in one else ""
        )
    if "peak_reserved" in one:
        yield f"reserved {one['peak_reserved'] / 1e9:.2f} GB"
    if "launches" in one:
        yield ", ".join(f"{number:.0f} {name.replace('_', ' ')}" for name, number in one["launches"].items())
    if "host_seconds" in one:
        host = one["host_seconds"]
        yield "host " + ", ".join(f"{phase} {1e3 * seconds:.2f}" for phase, seconds in sorted(host.items())) + " ms"


def host_seconds_of(one: Mapping[str, Any]) -> float | None:
    """What the host spends in packing, settling and stepping, a step."""
    host = one.get("host_seconds")
    return None if host is None else sum(host.get(phase, 0.0) for phase in ("pack", "settle", "step"))


def _verdicts(key: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Whether goals are met, where there was enough to tell."""
    computing = row.get("computing_seconds")
    for name, one in row.get("contenders", {}).items():
        if not name.startswith("zero1_custom"):
            continue
        host = host_seconds_of(one)
        if computing is not None and host is not None:
            side = "below" if host < computing else "NOT below"
            took = f"{name}: host {1e3 * host:.2f} ms in pack, settle and step"
            yield f"{took}, {side} {1e3 * computing:.2f} ms of computing"
        if key.startswith("world1-"):
            step = one.get("step_ratio", {}).get("median")
            for what, goal, found in (("step", STEP_GOAL, step), ("peak memory", MEMORY_GOAL, one.get("peak_ratio"))):
                if found is not None:
                    verdict = "met" if found <= goal else "MISSED"
                    yield f"{name}: {what} {found:.3f} of a single device's, goal {goal}: {verdict}"
