"""Imports point down only, between floors and between their rooms. The package's files are parsed, not imported."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "lightning_parstrat"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
FLOORS = ("core", "distributed", "strategies", "cli")
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
FORBIDDEN = {
    "core": ("torch.distributed", *LIGHTNING, "io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile"),
    "distributed": LIGHTNING,
    "strategies": ("torch.distributed",),
    "cli": ("torch.distributed",),
}
ROOMS: dict[str, tuple[str, ...]] = {
    "distributed.comm": (),
    "distributed.engine": ("distributed.comm",),
    "distributed.ddp": ("distributed.comm",),
    "distributed.gradients": ("distributed.comm", "distributed.engine"),
    "distributed.checkpoint": ("distributed.comm", "distributed.engine"),
    "distributed.fsdp": ("distributed.comm", "distributed.engine", "distributed.gradients"),
    "strategies.launch": (),
    "strategies.data": (),
    "strategies.checkpoint": ("strategies.launch", "strategies.data"),
    "strategies.gradients": ("strategies.launch", "strategies.checkpoint"),
}
"""Which other rooms of its floor each may import."""

COMMON = ("distributed.durable_files", "distributed.torch_compat", "strategies.lightning_compat", "strategies.parts")
"""Files that all rooms of their floor may import, and that import no room."""

ON_DEMAND = {"errors": "distributed"}
"""The package's own files that importing the package does not import, each with the floor that it belongs to."""


class Import(NamedTuple):
    line: int
    module: str
    """Dotted; of ``from a import b`` it is ``a.b``, whether ``b`` is a module or not."""
    at_import: bool
    """Whether importing the file runs it: it stands in no function, nor is it for type checkers alone."""


def imports_in(node: ast.AST, parents: tuple[str, ...], at_import: bool = True) -> Iterator[Import]:
    """Every import, wherever it stands, and every dotted use of ``torch.distributed``."""
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, alias.name, at_import) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = [*parents[: len(parents) - node.level + 1]] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        yield from (Import(node.lineno, f"{module}.{alias.name}", at_import) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(node.lineno, str(node.args[0].value), at_import)
    elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
        yield Import(node.lineno, "torch.distributed", at_import)
    deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
        isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    )
    for child in ast.iter_child_nodes(node):
        yield from imports_in(child, parents, at_import and not deferred)


def is_within(module: str, *places: str) -> bool:
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def allowed_in(place: str) -> tuple[str, ...]:
    """What a floor, a room or a common file may import of the package."""
    floor = place.split(".")[0]
    below, common = FLOORS[: FLOORS.index(floor)], [one for one in COMMON if is_within(one, floor)]
    here = [place, *ROOMS[place]] if place in ROOMS else [] if place in COMMON else [floor]
    return ("_version", "__version__", "_namespaces", *below, *common, *here)


def is_allowed(file: str, imported: Import) -> bool:
    top, _, rest = imported.module.partition(".")
    if "." not in file and file not in ON_DEMAND:
        # They are imported with torch: what they need at once has to be light.
        light = top in sys.stdlib_module_names or (top == PACKAGE and rest.startswith("_"))
        return light or not imported.at_import
    inside = ".".join(file.split(".")[:2])
    place = inside if inside in (*ROOMS, *COMMON) else ON_DEMAND.get(file, file.split(".")[0])
    if top == PACKAGE:
        return is_within(rest, *allowed_in(place))
    return not is_within(imported.module, *FORBIDDEN[place.split(".")[0]])


def breaches(package: Path) -> list[str]:
    """One line for every import that the floors do not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for imported in sorted(imports_in(ast.parse(path.read_text()), (PACKAGE, *parts[:-1]))):
            if not is_allowed(".".join(parts), imported):
                found.append(f"{'/'.join(parts)}.py:{imported.line} imports {imported.module}")
    return found


def test_no_import_points_up() -> None:
    assert breaches(ROOT) == []


def test_every_room_is_there_and_has_a_place_in_the_plan() -> None:
    there = {".".join(path.relative_to(ROOT).parts[:-1]) for path in ROOT.glob("*/**/__init__.py")}
    assert there == {*FLOORS, *ROOMS}
    assert all((ROOT / f"{file.replace('.', '/')}.py").exists() for file in (*COMMON, *ON_DEMAND))


BREACHES = [
    ("core/a.py", "import lightning_parstrat.distributed.engine.engine"),
    ("core/a.py", "from lightning_parstrat import ZeRO1Strategy"),
    ("core/a.py", "import torch\nrank = torch.distributed.get_rank()"),
    ("distributed/a.py", "from pytorch_lightning import Trainer"),
    ("strategies/a.py", "import_module('lightning_parstrat.cli')"),
    ("distributed/comm/a.py", "from ..engine import engine"),
    ("distributed/durable_files.py", "from .comm import x"),
    ("errors.py", "from .strategies import ddp"),
    ("_autoload.py", "try:\n    import lightning\nexcept ImportError: pass"),
]


def test_a_breach_is_found(tmp_path: Path) -> None:
    for number, (file, source) in enumerate(BREACHES):
        path = tmp_path / str(number) / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
        assert len(breaches(tmp_path / str(number))) == 1, source
