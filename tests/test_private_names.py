"""Private names of torch and Lightning that the package uses are listed, and are there in what is installed.

Ruff refuses them in all files but two (SLF001, PLC2701 in `pyproject.toml`), whose lists are read here.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning
import pytest
import torch

import lightning_parstrat
from lightning_parstrat.distributed import torch_compat
from lightning_parstrat.pytorch_lightning import renamed
from lightning_parstrat.strategies import lightning_compat
from lightning_parstrat.strategies.lightning_compat import untried_versions
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.parity import train

ROOT = Path(lightning_parstrat.__file__).parent
FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric")
COMPAT = {"distributed/torch_compat.py": torch_compat, "strategies/lightning_compat.py": lightning_compat}
MAY_INHERIT = "strategies/"
ENTRY = r"^    (\S+)\n((?:        .*\n?)+)"


class PrivateName(NamedTuple):
    """An entry of the lists in a file's docstring: a dotted name, what it is used for, what happens without it."""

    name: str
    used_for: str
    without: str


def listed_in(docstring: str) -> list[list[PrivateName]]:
    """The two lists of a docstring: what the file uses, and what classes read or override on themselves."""
    parts = docstring.split("\nRead or overridden on themselves")
    found = [re.findall(ENTRY, part, re.MULTILINE) for part in parts]
    return [[PrivateName(name, *" ".join(text.split()).split(" | ")) for name, text in part] for part in found]


LISTS = {file: listed_in(module.__doc__ or "") for file, module in COMPAT.items()}
USED = [name for used, _ in LISTS.values() for name in used]
INHERITED = [name for _, inherited in LISTS.values() for name in inherited]


def last(names: Iterable[PrivateName]) -> set[str]:
    return {name.name.rpartition(".")[2] for name in names}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*|__\w+(?<!__)", name) is not None


# What is installed.


def assigned_in(owner: Any) -> set[str]:
    """Names of attributes that a module, or a class with its bases, gives to objects."""
    found = set()
    for source in owner.__mro__ if inspect.isclass(owner) else [owner]:
        # What is made by C++, or while the program runs, has no source.
        with suppress(OSError, TypeError):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) > 1:
                    found.add(str(getattr(node.args[1], "value", "")))
    return found


def is_there(dotted: str) -> bool:
    """Whether a name can be imported, or is assigned in the source of what it should be in."""
    owner, _, name = dotted.rpartition(".")
    with suppress(AttributeError, ImportError):
        found = pkgutil.resolve_name(owner)
        return hasattr(found, name) or name in assigned_in(found) or name in getattr(found, "__annotations__", ())
    with suppress(ImportError):
        return importlib.import_module(dotted) is not None
    return False


@pytest.mark.parametrize("rename", [str, renamed], ids=["lightning", "pytorch_lightning"])
def test_every_private_name_is_there_in_what_is_installed(rename: Callable[[str], str]) -> None:
    gone = [name for name in (*USED, *INHERITED) if not is_there(rename(name.name))]
    assert gone == [], f"installed are torch {torch.__version__} and lightning {lightning.__version__}"


def test_entries_are_complete_each_is_there_once_and_there_are_at_most_eighty() -> None:
    names = [name.name for name in (*USED, *INHERITED)]
    assert all(name.used_for and name.without for name in (*USED, *INHERITED))
    assert all(name.split(".")[0] in FOREIGN and any(map(is_private, name.split("."))) for name in names)
    assert len(set(names)) == len(names) <= 80 and len(USED) > 40 and len(INHERITED) > 10


# What the package's files use.


def names_in(tree: ast.Module, on_self: bool = False) -> set[str]:
    """Private names that a file imports, takes from an object, or has in a string; or that its classes use on self."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} if is_own(node) or not on_self else set()
        elif isinstance(node, ast.Constant) and not on_self:
            found.add(str(node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom) and not on_self:
            module = [] if isinstance(node, ast.Import) else [str(node.module)]
            dotted = [".".join([*module, alias.name]) for alias in node.names]
            found.update(part for one in dotted if one.split(".")[0] in FOREIGN for part in one.split("."))
    return set(filter(is_private, found))


def is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of ``self``, ``cls`` or ``super()``."""
    return re.fullmatch(r"self|cls|super\([^()]*\)", ast.unparse(node.value)) is not None


def defined_in(trees: Iterable[ast.Module]) -> set[str]:
    """All private names that files define: functions, classes, variables, and attributes of ``self``."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return set(filter(is_private, found))


def test_what_classes_use_on_themselves_is_ours_or_listed() -> None:
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own = defined_in(trees.values())
    for path, tree in trees.items():
        # And a named tuple's method.
        listed = {"_replace", *(last(INHERITED) if path.is_relative_to(ROOT / MAY_INHERIT) else ())}
        assert names_in(tree, on_self=True) - own - listed == set(), path


@pytest.mark.parametrize("file", COMPAT)
def test_a_list_has_what_its_file_uses_and_nothing_else_and_what_it_offers_is_used(file: str) -> None:
    tree, used = ast.parse((ROOT / file).read_text()), LISTS[file][0]
    found = names_in(tree) - defined_in([tree])
    listed = {part for name in used for part in name.name.split(".") if is_private(part)}
    assert found - listed == set(), f"{file} uses these, and its list lacks them"
    # A public name in a private module.
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert last(used) - found == set(), f"{file} uses these no more: take them out of its list"
    others = "".join(path.read_text() for path in ROOT.rglob("*.py") if path != ROOT / file)
    offered = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not is_private(node.name)]
    unused = {name for name in offered if not re.search(rf"\b{name}\b", others)}
    assert unused <= {"untried_versions"}, f"nothing uses these of {file}"


def test_attributes_that_our_classes_share_with_their_foreign_bases_are_listed() -> None:
    """A private attribute of our own that Lightning has, too, would be its own in disguise, or changed by it."""
    shared = set()
    for path in (ROOT / MAY_INHERIT).rglob("*.py"):
        module = importlib.import_module(".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)))
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                own = [base for base in cls.__mro__ if base.__module__.startswith(ROOT.name)]
                foreign = [base for base in cls.__mro__ if base.__module__.split(".")[0] in FOREIGN]
                trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in own]
                names = defined_in(trees).union(*map(vars, own))
                taken = set().union(*map(vars, foreign), *map(assigned_in, foreign))
                shared |= {name for name in names & taken if is_private(name) and name[:5] != "_abc_"}
    assert shared - last(INHERITED) == set()


# Versions.

TORCH, LIGHTNING = torch_compat.TORCH_SEEN[-1], lightning_compat.LIGHTNING_SEEN[-1]


def test_versions_that_are_newer_than_those_tried_are_named() -> None:
    """By the minor release. The constants follow `constraints.txt`: the tests have run with what is installed."""
    assert untried_versions(torch.__version__, lightning.__version__) is None
    assert torch.__version__.partition("+")[0] in torch_compat.TORCH_SEEN
    assert lightning.__version__ in lightning_compat.LIGHTNING_SEEN
    warned = untried_versions("9.1.0", "9.2.0") or ""
    assert all(name in warned for name in ("(here: 9.1.0)", "(here: 9.2.0)", TORCH, LIGHTNING, "Training continues"))
    assert "lightning up" not in str(untried_versions("9.1.0+cpu", LIGHTNING))


def fit_twice_with_a_version_nobody_tried() -> tuple[int, list[str]]:
    with patch.object(torch, "__version__", "9.1.0"), pytest.warns() as warned:
        steps = sum(train(zoo.MLP, "zero1_custom", max_steps=1).trainer.global_step for _ in range(2))
    return steps, [str(one.message) for one in warned if "was tried with" in str(one.message)]


def test_a_fit_with_a_version_nobody_tried_warns_once_and_goes_on(own_pool: RankPool) -> None:
    ((steps, (warned,)),) = own_pool.run(1, fit_twice_with_a_version_nobody_tried)
    assert steps == 2 and f"torch up to {TORCH} (here: 9.1.0)" in warned
