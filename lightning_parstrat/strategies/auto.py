"""``auto_custom``: the strategy that ``lightning-parstrat tune`` has found to be the fastest."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parstrat._namespaces import PUBLIC
from lightning_parstrat.strategies.base import ComposedStrategy


class AutoStrategy(ComposedStrategy):
    """Makes the strategy that a file of ``lightning-parstrat tune`` names. It is no strategy itself.

    A line at the start of a fit says what it took. If the module, the ranks or the machine differ, it warns.

    Args:
        path: The file.
        **kwargs: Further arguments of the strategy in the file.

    Raises:
        MisconfigurationException: There is no such file, or ``tune`` has not written it.
    """

    flag = "auto_custom"

    def __new__(cls, path: str | Path = "chosen.yaml", **kwargs: Any) -> Any:
        """The strategy in the file."""
        try:
            text = Path(path).read_text()
            measured = dict(json.loads(text.partition("\n")[0].removeprefix("#")))
            chosen = yaml.safe_load(text)["trainer"]["strategy"]
            name, given = chosen["class_path"].rpartition(".")[2], dict(chosen["init_args"])
            if name not in PUBLIC.keys() - {"AutoStrategy", "GradNormMonitor"}:
                raise ValueError(f"{name} is no strategy")
            module = PUBLIC[name].removeprefix("strategies.")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise MisconfigurationException(
                f"auto_custom needs the file that `lightning-parstrat tune -- python main.py fit -c c.yaml` writes, and"
                f" {path} is not one ({error}). Run that, or give the file's path: AutoStrategy(path=...)."
            ) from error
        strategy = getattr(import_module(f"{__package__}.{module}"), name)(**{**given, **kwargs})
        strategy.note_choice({**measured, "path": str(path)})
        return strategy
