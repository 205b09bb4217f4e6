"""Keeps plans for buckets in a folder, for later trainings."""

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_parstrat.core.tuning_report import TuningReport
from lightning_parstrat.distributed.durable_files import written_durably


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

    def load(self) -> TuningReport | None:
        """The report of an earlier training of this kind; None where there is none.

        Raises:
            ValueError: The file is damaged or has another format.
            OSError: It cannot be read.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            return TuningReport.from_json(json.loads(self.path.read_text()))
        # AttributeError: JSON that is not an object has no `get`.
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{self.path}: {error}") from error

    def save(self, report: TuningReport) -> None:
        """Keeps the report in place of an earlier one.

        Raises:
            OSError: It cannot be written.
        """
        if self.path is not None:
            with written_durably(self.path) as temporary:
                temporary.write_text(report.as_text())
