"""Arguments of a Trainer that is measured: it logs, saves and shows nothing."""

from typing import Any

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
