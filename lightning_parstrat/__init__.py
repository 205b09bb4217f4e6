"""Parallel training strategies for PyTorch Lightning, chosen by a Trainer flag.

Importing the package registers ``ddp_tuned``, ``zero1_custom``, ``zero2_custom``, ``zero3_custom``,
``pipeline_custom`` and ``auto_custom``. The import loads neither torch nor Lightning. The strategy classes and the
callback ``GradNormMonitor`` are loaded on their first use (PEP 562).
"""

from typing import TYPE_CHECKING, Any

from lightning_parstrat._autoload import register_on_import
from lightning_parstrat._namespaces import PUBLIC, package_in_use, public_class
from lightning_parstrat._version import __version__

if TYPE_CHECKING:
    from lightning_parstrat.strategies.auto import AutoStrategy
    from lightning_parstrat.strategies.ddp import TunedDDPStrategy
    from lightning_parstrat.strategies.gradients.grad_norm_monitor import GradNormMonitor
    from lightning_parstrat.strategies.pipeline import PipelineStrategy
    from lightning_parstrat.strategies.zero1 import ZeRO1Strategy, ZeRO2Strategy
    from lightning_parstrat.strategies.zero3 import ZeRO3Strategy

__all__ = [
    "AutoStrategy",
    "GradNormMonitor",
    "PipelineStrategy",
    "TunedDDPStrategy",
    "ZeRO1Strategy",
    "ZeRO2Strategy",
    "ZeRO3Strategy",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return public_class(package_in_use(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_on_import()
