"""The two names of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``, and the classes that serve each.

torch's import runs this module, so it imports torch and Lightning in functions only.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
PACKAGES = {LIGHTNING: "lightning_parstrat", PYTORCH_LIGHTNING: "lightning_parstrat.pytorch_lightning"}
"""Each package of Lightning, with the package of ours whose strategies its Trainer accepts."""
PUBLIC = {
    "AutoStrategy": "strategies.auto",
    "GradNormMonitor": "strategies.gradients.grad_norm_monitor",
    "PipelineStrategy": "strategies.pipeline",
    "TunedDDPStrategy": "strategies.ddp",
    "ZeRO1Strategy": "strategies.zero1",
    "ZeRO2Strategy": "strategies.zero1",
    "ZeRO3Strategy": "strategies.zero3",
}
"""The public classes, and the module of each within our two packages."""


def package_in_use() -> str:
    """The package of ours for the Lightning that the program has imported. For both or none: that for ``lightning``."""
    if LIGHTNING in sys.modules:
        return PACKAGES[LIGHTNING]
    # Otherwise, a lookup by the command line of `pytorch_lightning` would import the other Lightning.
    only_the_other = PYTORCH_LIGHTNING in sys.modules or find_spec(LIGHTNING.partition(".")[0]) is None
    return PACKAGES[PYTORCH_LIGHTNING if only_the_other else LIGHTNING]


def public_class(package: str, name: str) -> Any:
    """The public class of that name.

    Args:
        package: One of our two packages.
        name: A name of :data:`PUBLIC`.
    """
    return getattr(import_module(f"{package}.{PUBLIC[name]}"), name)
