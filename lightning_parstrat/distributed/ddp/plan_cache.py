"""Keeps plans for buckets in a folder, for later trainings."""

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from lightning_parstrat.core.tuning import Caps
from lightning_parstrat.distributed.durable_files import written_durably

_FORMAT = 1


class Plan(NamedTuple):
    """What is kept: bytes at which buckets are full; None where torch's default was fastest."""

    caps: Caps | None


class PlanCache:
    """A folder with one file for each kind of training. Not collective: for rank 0.

    Args:
        folder: Created when the first plan is kept; None keeps none.
        kind: Everything that a plan depends on and that is known before training.
    """

    def __init__(self, folder: str | PathLike[str] | None, kind: Mapping[str, Any]) -> None:
        # Sorted: the same kind must give the same file, in whatever order its entries were written down.
        content = json.dumps(kind, sort_keys=True, default=str)
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.path = None if folder is None else Path(folder).expanduser() / f"plan-{key}.json"

    def load(self) -> Plan | None:
        """The plan of an earlier training of this kind; None where there is none.

        Raises:
            ValueError: The file is damaged or has another format.
            OSError: It cannot be read.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            return _plan(json.loads(self.path.read_text()))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def save(self, plan: Plan) -> None:
        """Keeps the plan in place of an earlier one.

        Raises:
            OSError: It cannot be written.
        """
        if self.path is not None:
            with written_durably(self.path) as temporary:
                temporary.write_text(json.dumps({"format": _FORMAT, "caps": plan.caps}) + "\n")


def _plan(values: Any) -> Plan:
    """Checked: the file may have been edited, and what is wrong would fail later, within a training."""
    if not isinstance(values, dict) or values.get("format") != _FORMAT or "caps" not in values:
        raise ValueError(f"no plan of format {_FORMAT}, which this version reads")
    caps = values["caps"]
    if caps is None:
        return Plan(None)
    if not isinstance(caps, list) or not caps or not all(type(cap) is int and cap > 0 for cap in caps):
        raise ValueError(f"{caps!r} are no sizes of buckets")
    return Plan(tuple(caps))
