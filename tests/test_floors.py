"""Imports point down only, between floors and between their rooms. The package's files are parsed, not imported."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "lightning_parstrat"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
FLOORS = ("core", "distributed", "strategies", "cli")
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
INPUT_OUTPUT = ("io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile")
FORBIDDEN = {
    "core": ("torch.distributed", *LIGHTNING, *INPUT_OUTPUT),
    "distributed": LIGHTNING,
    "strategies": ("torch.distributed",),
    "cli": ("torch.distributed",),
}
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "distributed": {
        "comm": (),
        "engine": ("comm",),
        "ddp": ("comm",),
        "gradients": ("comm", "engine"),
        "checkpoint": ("comm", "engine"),
        "fsdp": ("comm", "engine", "gradients"),
    },
    "strategies": {
        "launch": (),
        "data": (),
        "checkpoint": ("launch", "data"),
        "gradients": ("launch", "checkpoint"),
    },
}
"""Of each floor, its rooms, and which of its other rooms each may import."""

COMMON = {"distributed": ("durable_files", "torch_compat"), "strategies": ("lightning_compat", "parts")}
"""Files of a floor that all of its rooms may import, and that import none of them."""

ON_DEMAND = {"errors.py": "distributed"}
"""The package's own files that importing the package does not import, each with the floor that it belongs to."""


class Import(NamedTuple):
    line: int
    module: str
    """Dotted; of ``from a import b`` it is ``a.b``, whether ``b`` is a module or not."""
    at_import: bool
    """Whether importing the file runs it: it stands in no function, nor is it for type checkers alone."""


def imports_of(path: Path, package: Path) -> list[Import]:
    """Every import in the file, wherever it stands, and every dotted use of ``torch.distributed``."""
    tree = ast.parse(path.read_text(), str(path))
    parents = (package.name, *path.relative_to(package).parent.parts)
    return sorted(_walk(tree, parents, at_import=True))


def _walk(node: ast.AST, parents: tuple[str, ...], at_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, at_import) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = [*parents[: len(parents) - node.level + 1]] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        yield from (Import(node.lineno, f"{module}.{alias.name}", at_import) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "import_module",
        "importlib.import_module",
        "__import__",
    ):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(node.lineno, str(node.args[0].value), at_import)
    elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
        yield Import(node.lineno, "torch.distributed", at_import)
    deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
        isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    )
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, parents, at_import and not deferred)


def breaches(package: Path) -> list[str]:
    """One line for every import that the floors do not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        floor = name.split("/")[0]
        for imported in imports_of(path, package):
            if "/" in name:
                reason = _reason_from_floor(floor, imported, package.name)
                reason = reason or _reason_from_room(name, imported, package.name)
            elif name in ON_DEMAND:
                reason = _reason_from_floor(ON_DEMAND[name], imported, package.name)
            else:
                reason = _reason_from_root(imported)
            if reason:
                found.append(f"{name}:{imported.line} imports {imported.module}: {reason}")
    return found


def _reason_from_floor(floor: str, imported: Import, package: str) -> str | None:
    if floor not in FLOORS:
        return f"{floor} is not one of the floors {FLOORS}"
    for module in FORBIDDEN[floor]:
        if f"{imported.module}.".startswith(f"{module}."):
            return f"{floor} must not know of {module}"
    if imported.module.split(".")[0] != package:
        return None
    target = imported.module.split(".")[1] if "." in imported.module else ""
    if target in ("_version", "__version__", "_namespaces"):
        return None
    if target not in FLOORS:
        return f"the package itself lies above {floor}"
    if FLOORS.index(target) > FLOORS.index(floor):
        return f"{target} lies above {floor}"
    return None


def _reason_from_room(file: str, imported: Import, package: str) -> str | None:
    """Within a floor: a room imports those that it may, and what is common to all; what is common imports no room."""
    floor, *inside = file.removesuffix(".py").split("/")
    _, *target = imported.module.split(".")
    if imported.module.split(".")[0] != package or floor not in ROOMS or target[:1] != [floor] or len(target) < 2:
        return None
    room = inside[0] if len(inside) > 1 else None
    if room is None:
        is_common = inside[0] in COMMON[floor]
        return f"{inside[0]} is there for all rooms" if is_common and target[1] not in COMMON[floor] else None
    if room not in ROOMS[floor]:
        return f"{room} is not one of the rooms {tuple(ROOMS[floor])}"
    allowed = (room, *ROOMS[floor][room], *COMMON[floor])
    return None if target[1] in allowed else f"{room} may import {allowed} of {floor}"


def _reason_from_root(imported: Import) -> str | None:
    """The package's own files are imported with torch: what they need at once has to be light."""
    top, _, rest = imported.module.partition(".")
    light = top in sys.stdlib_module_names or (top == PACKAGE and rest.split(".")[0].startswith("_"))
    return None if light or not imported.at_import else "importing the package imports only the standard library"


def test_no_import_points_up() -> None:
    assert breaches(ROOT) == []


def test_every_room_is_there_and_has_a_place_in_the_plan() -> None:
    for floor, rooms in ROOMS.items():
        assert {path.parent.name for path in ROOT.glob(f"{floor}/*/__init__.py")} == set(rooms)
        assert all((ROOT / floor / f"{file}.py").exists() for file in COMMON[floor])


BREACHES = [
    ("core/a.py", "import lightning_parstrat.distributed.engine.engine", "distributed lies above core"),
    ("core/a.py", "from lightning_parstrat import ZeRO1Strategy", "the package itself lies above core"),
    ("core/a.py", "import torch\nrank = torch.distributed.get_rank()", "core must not know of torch.distributed"),
    ("distributed/a.py", "from pytorch_lightning import Trainer", "distributed must not know of pytorch_lightning"),
    ("strategies/a.py", "import_module('lightning_parstrat.cli')", "cli lies above strategies"),
    ("distributed/comm/a.py", "from ..engine import engine", "comm may import"),
    ("distributed/cellar/a.py", "from ..comm import x", "cellar is not one of the rooms"),
    ("distributed/durable_files.py", "from .comm import x", "durable_files is there for all rooms"),
    ("errors.py", "from .strategies import ddp", "strategies lies above distributed"),
    ("attic/a.py", "import math", "attic is not one of the floors"),
    ("_autoload.py", "try:\n    import lightning\nexcept ImportError: pass", "only the standard library"),
]
POINTING_DOWN = [
    ("core/a.py", "import math, torch\nfrom . import layout\nfrom lightning_parstrat import _version"),
    ("distributed/gradients/a.py", "from ..engine.optimizer import x\nfrom ..comm import y\nfrom . import b"),
    ("strategies/checkpoint/a.py", "from ..launch.faults import x\nfrom ..lightning_compat import unwrapped"),
    ("errors.py", "from .distributed.comm import x"),
    ("_autoload.py", "import sys\ndef f():\n    from lightning_parstrat.strategies.registry import g"),
]


def test_a_breach_is_found_and_an_import_that_points_down_is_none(tmp_path: Path) -> None:
    for number, (file, source, reason) in enumerate(BREACHES):
        (found,) = breaches(write_package(tmp_path / str(number), {file: source}))
        assert re.match(rf"{re.escape(file)}:\d+ imports ", found) and reason in found
    for number, (file, source) in enumerate(POINTING_DOWN):
        assert breaches(write_package(tmp_path / f"down{number}", {file: source})) == []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / PACKAGE
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package
