"""The strategies and the callback for programs that import ``pytorch_lightning`` instead of ``lightning``.

Lightning is published under two names. Both have the same source, but other classes. A Trainer takes no strategy that
is derived from the other's. So Python executes the modules in ``strategies/`` a second time under this package. Names
in their imports of Lightning and of each other are replaced. Files, lines and cached bytecode are the original ones.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

from lightning_parstrat._namespaces import PUBLIC, public_class

__all__ = list(PUBLIC)

# A package without a folder, so that no other finder can find a module in it and execute it with original names.
__path__: list[str] = []

_ORIGINAL = f"{__package__}.strategies"
_RENAMED = {
    "lightning.fabric": "lightning_fabric",
    "lightning.pytorch": "pytorch_lightning",
    _ORIGINAL: f"{__name__}.strategies",
}


def renamed(name: str) -> str:
    """The name of a module of Lightning, or of our strategies, in the other namespace. Other names are returned as is.

    Args:
        name: A dotted name. The part after a module's name is kept.
    """
    for original, other in _RENAMED.items():
        if name == original or name.startswith(f"{original}."):
            return other + name.removeprefix(original)
    return name


class _Loader(SourceFileLoader):
    """Loads a module from its file or its cached bytecode, and replaces names in the module's imports."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else _with_renamed_imports(code)


class _Finder(MetaPathFinder):
    """Finds this package's modules in the files of the original ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{__name__}.strategies."):
            return None
        original = find_spec(_ORIGINAL + fullname.removeprefix(f"{__name__}.strategies"))
        if original is None or original.origin is None:
            return None
        spec = spec_from_file_location(fullname, original.origin, loader=_Loader(fullname, original.origin))
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = []
        return spec


def _with_renamed_imports(code: CodeType) -> CodeType:
    # In bytecode, only the names of imported modules have dots.
    return code.replace(
        co_names=tuple(map(renamed, code.co_names)),
        co_consts=tuple(_with_renamed_imports(one) if isinstance(one, CodeType) else one for one in code.co_consts),
    )


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return public_class(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.append(_Finder())
