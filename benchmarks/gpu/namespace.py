"""Lightning under whichever of its two names is installed, and our strategies for it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_NAME = "pytorch_lightning" if find_spec("lightning") is None else "lightning.pytorch"

lightning: Any = import_module(_NAME)
strategies: Any = import_module(f"{_NAME}.strategies")
parstrat: Any = import_module(
    "lightning_parstrat.pytorch_lightning" if _NAME == "pytorch_lightning" else "lightning_parstrat"
)
