"""Registers the strategies as soon as Lightning's strategies module has been imported, and not before.

``import torch`` loads and calls every entry point of the group ``torch.backends``, its plugin mechanism. The entry
point of this package is :func:`autoload`. It imports neither torch nor Lightning. It leaves a finder on
``sys.meta_path`` that registers the names right after Lightning's strategies module has executed. So
``Trainer(strategy="zero1_custom")`` works in a script that does not mention this package.

After Lightning's command line has been imported, the finder loads the classes, so that it knows their short names. The
finder serves both packages that Lightning is published as. It removes itself after the last of these modules.

Two variables switch it off: ``LIGHTNING_PARSTRAT_AUTOLOAD=0`` for this package, or ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``
for all plugins of torch. Then only ``import lightning_parstrat`` registers the names.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lightning_parstrat._namespaces import PACKAGES, PUBLIC, public_class

_STRATEGIES, _CLI = "strategies", "cli"
_DEFINED_LATE = {_STRATEGIES: "StrategyRegistry", _CLI: "LightningCLI"}
"""For each module that the finder waits for: a name that is missing until the module has been imported completely."""
_SWITCH = "LIGHTNING_PARSTRAT_AUTOLOAD"
# False only if the user imported this package before torch. When torch loads its plugins, it is in `sys.modules`.
_TORCH_CAME_FIRST = "torch" in sys.modules


def autoload() -> None:
    """Entry point that torch calls at the end of ``import torch``. It never raises."""
    # The import of the package has registered the names already (see `__init__`). If switched off, remove the finder
    # and all modules of the package: a later `import lightning_parstrat` runs `__init__` again, and registers.
    if os.environ.get(_SWITCH) == "0" and _TORCH_CAME_FIRST:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WaitingFinder)]
        package = __name__.partition(".")[0]
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            sys.modules.pop(name, None)


def register_on_import() -> None:
    """Registers the strategy names now if Lightning is imported already, else when it is.

    ``import lightning_parstrat`` calls it, hence also torch's plugin mechanism. A second call is harmless.
    """
    waiting = set()
    for lightning in PACKAGES:
        for last, defined_late in _DEFINED_LATE.items():
            module = sys.modules.get(f"{lightning}.{last}")
            if module is not None and hasattr(module, defined_late):
                _serve(module)
            else:
                waiting.add(f"{lightning}.{last}")
    if waiting and not any(isinstance(finder, _WaitingFinder) for finder in sys.meta_path):
        # In the first place: the first finder that knows a module ends the search.
        sys.meta_path.insert(0, _WaitingFinder(waiting))


def _serve(module: ModuleType) -> None:
    """Registers the strategies, or loads the classes. A failure is a warning, never an error in user code."""
    lightning, _, last = module.__name__.rpartition(".")
    package = PACKAGES[lightning]
    try:
        if last == _STRATEGIES:
            import_module(f"{package}.strategies.registry").register_strategies(module)
        else:
            # A command line knows short names of loaded classes only.
            for name in PUBLIC:
                public_class(package, name)
    except Exception as error:
        warnings.warn(
            f"lightning_parstrat could not register its strategies with {module.__name__!r}: {error!r}", stacklevel=2
        )


class _WaitingFinder(MetaPathFinder):
    """Has the registration follow the execution of Lightning's modules."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        # The search of the other finders asks this one, too.
        self._waiting.remove(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._waiting.add(fullname)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # From here on, the module must look as if its loader had not been touched.
                del loader.exec_module
                # A failed import may be repeated, for example in a notebook. So the finder waits for one that works.
                execute(module)
                self._waiting.discard(fullname)
                # After the last module, the finder removes itself.
                if not self._waiting and self in sys.meta_path:
                    sys.meta_path.remove(self)
                _serve(module)

            loader.exec_module = exec_module
        return spec
