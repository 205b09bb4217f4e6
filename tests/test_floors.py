"""Imports point down only, between floors and between their rooms. The package's files are parsed, not imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

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
    "distributed.pipeline": ("distributed.comm", "distributed.engine", "distributed.fsdp"),
    "strategies.launch": (),
    "strategies.data": ("strategies.launch",),
    "strategies.checkpoint": ("strategies.launch", "strategies.data"),
    "strategies.gradients": ("strategies.launch", "strategies.checkpoint", "strategies.data"),
}
"""Which other rooms of its floor each may import."""

COMMON = ("distributed.durable_files", "distributed.torch_compat", "strategies.lightning_compat", "strategies.parts")
"""Files that all rooms of their floor may import, and that import no room."""

ON_DEMAND = {"errors": "distributed"}
"""The package's own files that importing the package does not import, each with the floor that it belongs to."""


def imports_in(path: Path) -> Iterator[tuple[int, str]]:
    """Every import, wherever it stands, and every dotted use of ``torch.distributed``, with its line.

    Of ``from a import b`` it is ``a.b``, whether ``b`` is a module or not. Ruff refuses relative ones.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def is_within(module: str, *places: str) -> bool:
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def allowed_in(place: str) -> tuple[str, ...]:
    """What a floor, a room or a common file may import of the package."""
    floor = place.split(".")[0]
    below, common = FLOORS[: FLOORS.index(floor)], [one for one in COMMON if is_within(one, floor)]
    here = [place, *ROOMS[place]] if place in ROOMS else [] if place in COMMON else [floor]
    return ("_version", "__version__", "_namespaces", *below, *common, *here)


def is_allowed(file: str, imported: str) -> bool:
    top, _, rest = imported.partition(".")
    if "." not in file and file not in ON_DEMAND:
        # They are imported with torch; test_registration.py sees that they import nothing heavy.
        return True
    inside = ".".join(file.split(".")[:2])
    place = inside if inside in (*ROOMS, *COMMON) else ON_DEMAND.get(file, file.split(".")[0])
    if top == PACKAGE:
        return is_within(rest, *allowed_in(place))
    return not is_within(imported, *FORBIDDEN[place.split(".")[0]])


def breaches(package: Path) -> list[str]:
    """One line for every import that the floors do not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for line, imported in sorted(imports_in(path)):
            if not is_allowed(".".join(parts), imported):
                found.append(f"{'/'.join(parts)}.py:{line} imports {imported}")
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
    ("distributed/comm/a.py", "from lightning_parstrat.distributed.engine import engine"),
    ("distributed/durable_files.py", "from lightning_parstrat.distributed.comm import x"),
    ("errors.py", "from lightning_parstrat.strategies import ddp"),
]


def test_a_breach_is_found(tmp_path: Path) -> None:
    for number, (file, source) in enumerate(BREACHES):
        path = tmp_path / str(number) / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
        assert len(breaches(tmp_path / str(number))) == 1, source
