"""Lightning is published as ``lightning.pytorch`` and as ``pytorch_lightning``: which classes of ours serve which.

Imported with torch, so nothing here imports torch or Lightning before it is asked to.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
PACKAGES = {LIGHTNING: "lightning_parstrat", PYTORCH_LIGHTNING: "lightning_parstrat.pytorch_lightning"}
"""Of each package of Lightning's, that of ours whose strategies its Trainer takes."""
PUBLIC = {
    "GradNormMonitor": "strategies.gradients.grad_norm_monitor",
    "TunedDDPStrategy": "strategies.ddp",
    "ZeRO1Strategy": "strategies.zero1",
    "ZeRO3Strategy": "strategies.zero3",
}
"""The public classes, and where each of our packages has its own."""


def package_in_use() -> str:
    """Our package for the Lightning that the program has imported; where it is both or none, for ``lightning``."""
    if LIGHTNING in sys.modules:
        return PACKAGES[LIGHTNING]
    # Without this, what a command line of `pytorch_lightning` looks up here would bring the other Lightning in.
    only_the_other = PYTORCH_LIGHTNING in sys.modules or find_spec(LIGHTNING.partition(".")[0]) is None
    return PACKAGES[PYTORCH_LIGHTNING if only_the_other else LIGHTNING]


def public_class(package: str, name: str) -> Any:
    """The public class of that name.

    Args:
        package: One of ours.
        name: One of :data:`PUBLIC`.
    """
    return getattr(import_module(f"{package}.{PUBLIC[name]}"), name)
