"""Private names of torch and Lightning are used in a few files, and are there in what is installed.

The package's files are parsed; only its files on private names are imported.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch

import lightning_parstrat
from lightning_parstrat.distributed import torch_compat
from lightning_parstrat.distributed.ddp import ddp_compat
from lightning_parstrat.distributed.torch_compat import is_newer
from lightning_parstrat.pytorch_lightning import renamed
from lightning_parstrat.strategies import lightning_compat
from lightning_parstrat.strategies.lightning_compat import untried_versions
from tests.scripts import run_script
from tests.torch_versions import is_before

ROOT = Path(lightning_parstrat.__file__).parent
FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric")
COMPAT = {
    "distributed/torch_compat.py": torch_compat,
    "distributed/ddp/ddp_compat.py": ddp_compat,
    "strategies/lightning_compat.py": lightning_compat,
}
MAY_INHERIT = "strategies/"
NAMES_OF_A_NAMEDTUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
# `sys._current_frames` is in Python's manual, which names no other way to where a thread is.
DOCUMENTED = {*NAMES_OF_A_NAMEDTUPLE, "_current_frames"}


class PrivateName(NamedTuple):
    """An entry of the lists in a file's docstring: a dotted name, what it is used for, what happens without it."""

    name: str
    used_for: str
    without: str


def listed_in(docstring: str) -> tuple[list[PrivateName], list[PrivateName]]:
    """The two lists of a docstring: what the file uses, and what classes read or override on themselves."""
    used, _, inherited = docstring.partition("\nRead or overridden on themselves")
    return _entries(used), _entries(inherited)


def _entries(text: str) -> list[PrivateName]:
    found = re.findall(r"^    (\S+)\n((?:        .*\n?)+)", text, flags=re.MULTILINE)
    return [PrivateName(name, *" ".join(text.split()).split(" | ")) for name, text in found]


LISTS = {file: listed_in(module.__doc__ or "") for file, module in COMPAT.items()}
USED = [name for used, _ in LISTS.values() for name in used]
INHERITED = [name for _, inherited in LISTS.values() for name in inherited]


def last(names: Iterable[PrivateName]) -> set[str]:
    return {name.name.rpartition(".")[2] for name in names}


# What is installed.


def resolve(dotted: str) -> Any:
    """What a dotted name is of: the longest module that can be imported, then attributes.

    Raises:
        AttributeError: It is not there, and the source of what it should be in does not assign it either.
    """
    parts = dotted.split(".")
    module, taken = importlib.import_module(parts[0]), 1
    while taken < len(parts):
        try:
            module = importlib.import_module(".".join(parts[: taken + 1]))
        except ImportError:
            break
        taken += 1
    found: Any = module
    for name in parts[taken:]:
        if not hasattr(found, name) and name in assigned_in(found):
            return None
        found = getattr(found, name)
    return found


def assigned_in(owner: Any) -> set[str]:
    """Names of attributes that a module, or a class with its bases, gives to objects."""
    sources = [cls for cls in owner.__mro__ if cls.__module__ != "builtins"] if inspect.isclass(owner) else [owner]
    found = set()
    for source in sources:
        try:
            text = inspect.getsource(source)
        except (OSError, TypeError):
            # Made by C++, or while the program runs.
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(text))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) > 1:
                found.add(str(getattr(node.args[1], "value", "")))
    return found


def missing(names: Iterable[PrivateName]) -> list[str]:
    """One line for every name that is gone."""
    gone = []
    for name in names:
        try:
            resolve(name.name)
        except (AttributeError, ImportError):
            gone.append(f"{name.name} is gone. It {name.used_for}. Without it: {name.without}.")
    return gone


def is_of_later_torch(name: PrivateName) -> bool:
    since = re.match(r"since torch ([\d.]+):", name.used_for)
    return since is not None and is_before(since[1])


@pytest.mark.parametrize("rename", [str, renamed], ids=["lightning", "pytorch_lightning"])
def test_every_private_name_is_there_in_what_is_installed(rename: Callable[[str], str]) -> None:
    versions = f"torch {torch.__version__} and lightning {lightning.__version__}"
    names = [name._replace(name=rename(name.name)) for name in (*USED, *INHERITED) if not is_of_later_torch(name)]
    assert missing(names) == [], f"installed are {versions}"


def test_the_lists_are_read_and_a_name_that_is_gone_is_named() -> None:
    docstring = """What is private.

Used through this file: what for | what happens without it.

    torch.optim.Optimizer._no_such_name
        runs
        hooks | hooks run twice
    torch.optim.Optimizer._optimizer_step_pre_hooks
        says | is mute
    torch._no_such_module.name
        says | is mute

Read or overridden on themselves by classes: what for | what happens without it.

    torch.serialization._never_assigned
        is overridden | nothing
"""
    used, inherited = listed_in(docstring)
    assert used[0] == PrivateName("torch.optim.Optimizer._no_such_name", "runs hooks", "hooks run twice")
    names = [*used, *inherited]
    assert [line.split()[0] for line in missing(names)] == [names[n].name for n in (0, 2, 3)]
    assert missing(names)[0].endswith("is gone. It runs hooks. Without it: hooks run twice.")


def test_every_entry_is_complete_and_there_once() -> None:
    for name in (*USED, *INHERITED):
        assert name.name.split(".")[0] in FOREIGN and any(is_private(part) for part in name.name.split("."))
        assert name.used_for and name.without
    names = [name.name for name in (*USED, *INHERITED)]
    assert sorted(set(names)) == sorted(names) and len(USED) > 40 and len(INHERITED) > 10


# What the package's files use.


class Use(NamedTuple):
    line: int
    name: str
    """The private part alone."""
    how: str
    """The import, the expression, or the string."""
    on_self: bool = False
    """Whether it is an attribute of ``self``, ``cls`` or ``super()``."""
    is_foreign: bool = False
    """Whether it belongs to torch or Lightning whatever it is called."""


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*|__\w+(?<!__)", name) is not None


def uses_of(tree: ast.Module) -> list[Use]:
    """Every private name that a file imports, takes from an object, or has in a string that is nothing but it."""
    foreign = foreign_names(tree)
    return sorted(use for node in ast.walk(tree) for use in _uses(node, foreign))


def foreign_names(tree: ast.Module) -> set[str]:
    """The names in a file that imports from torch and Lightning have made."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in FOREIGN}
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] in FOREIGN:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _uses(node: ast.AST, foreign: Collection[str]) -> Iterator[Use]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = [] if isinstance(node, ast.Import) else ["." * node.level + str(node.module or "")]
        for alias in node.names:
            dotted = ".".join([*module, alias.name])
            if dotted.split(".")[0] in FOREIGN:
                yield from (Use(node.lineno, p, dotted, is_foreign=True) for p in dotted.split(".") if is_private(p))
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        owner = ast.unparse(node.value)
        root = re.split(r"\W", owner)[0]
        yield Use(node.lineno, node.attr, ast.unparse(node), is_own(node), is_foreign=root in foreign)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
        yield Use(node.lineno, node.value, repr(node.value))


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
    return {name for name in found if is_private(name)}


def breaches(package: Path, used: Collection[str] = (), inherited: Collection[str] = ()) -> list[str]:
    """One line for every private name of somebody else's that is used where it may not be.

    Args:
        package: Its files are parsed, but for those on private names.
        used: What those files use.
        inherited: What classes in ``strategies/`` may use on themselves.
    """
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in package.rglob("*.py")}
    own = defined_in(tree for name, tree in trees.items() if name not in COMPAT)
    found = []
    for name, tree in sorted(trees.items()):
        for use in [] if name in COMPAT else uses_of(tree):
            reason = _reason(use, name, own, used, inherited)
            if reason:
                found.append(f"{name}:{use.line} {use.how}: {reason}")
    return found


def _reason(use: Use, file: str, own: Collection[str], used: Collection[str], inherited: Collection[str]) -> str | None:
    if use.is_foreign:
        return f"{use.name} is private; ask {' or '.join(COMPAT)}"
    if use.name in DOCUMENTED:
        return None
    if use.how.startswith(("'", '"')):
        return f"{use.name} is private; ask {' or '.join(COMPAT)}" if use.name in {*used, *inherited} else None
    if use.on_self:
        may_inherit = file.startswith(MAY_INHERIT) and use.name in inherited
        return (
            None
            if may_inherit or use.name in own
            else f"{use.name} is nothing of ours, and not in the list of inherited names"
        )
    if use.name in inherited:
        return f"{use.name} is inherited: only `self` may use it"
    return f"{use.name} is somebody else's" if use.name in used or use.name not in own else None


def test_private_names_are_used_in_these_files() -> None:
    assert breaches(ROOT, last(USED), last(INHERITED)) == []


@pytest.mark.parametrize("file", COMPAT)
def test_a_list_has_what_its_file_uses_and_nothing_else(file: str) -> None:
    tree, used = ast.parse((ROOT / file).read_text()), LISTS[file][0]
    found = {use.name for use in uses_of(tree)} - defined_in([tree])
    listed = {part for name in used for part in name.name.split(".") if is_private(part)}
    assert found - listed == set(), f"{file} uses these, and its list lacks them"
    # A public name in a private module.
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert last(used) - found == set(), f"{file} uses these no more: take them out of its list"


def test_every_inherited_name_is_used() -> None:
    files = [ast.parse(path.read_text()) for path in (ROOT / MAY_INHERIT).rglob("*.py")]
    used = {use.name for tree in files for use in uses_of(tree) if use.on_self} | defined_in(files)
    assert last(INHERITED) - used == set(), "nothing uses these any more: take them out of the list"


@pytest.mark.parametrize("file", COMPAT)
def test_what_a_file_on_private_names_offers_is_used(file: str) -> None:
    module = "lightning_parstrat." + file.removesuffix(".py").replace("/", ".")
    imported = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                imported |= {alias.name for alias in node.names}
    offered = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            offered.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            offered |= {ast.unparse(target) for target in targets}
    offered = {name for name in offered if not is_private(name)}
    assert offered - imported <= {"LIGHTNING_SEEN", "untried_versions"}


def test_attributes_that_our_classes_share_with_their_foreign_bases_are_listed() -> None:
    """A private attribute of our own that Lightning has, too, would be its own in disguise, or changed by it."""
    shared = set()
    for path in (ROOT / MAY_INHERIT).rglob("*.py"):
        module = importlib.import_module(".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)))
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                own = {base for base in cls.__mro__ if base.__module__.startswith(ROOT.name)}
                names = {name for base in own for name in (*vars(base), *assigned_in_own(base))}
                foreign = [base for base in cls.__mro__ if base.__module__.split(".")[0] in FOREIGN]
                taken = {name for base in foreign for name in (*vars(base), *assigned_in(base))}
                shared |= {(name, cls.__name__) for name in names & taken if is_private(name) and name[:5] != "_abc_"}
    assert {one for one in shared if one[0] not in last(INHERITED)} == set()


def assigned_in_own(cls: type) -> set[str]:
    return defined_in([ast.parse(textwrap.dedent(inspect.getsource(cls)))])


LISTED = {"used": {"_optimizer", "_execution_engine"}, "inherited": {"_timeout", "_scale"}}
BREACHES = [
    ("core/a.py", "from torch._dynamo import x", "_dynamo is private"),
    ("core/a.py", "def f():\n    from torch.optim.optimizer import _global as g", "_global is private"),
    ("core/a.py", "if TYPE_CHECKING:\n    import pytorch_lightning._x", "_x is private"),
    ("core/a.py", "import torch as t\nx = t.autograd.Variable._execution_engine", "_execution_engine is private"),
    ("core/a.py", "from torch import Tensor\nTensor._own\nclass A:\n    _own: int", "_own is private"),
    ("core/a.py", "def f(trainer):\n    return trainer._signal_connector", "_signal_connector is somebody else's"),
    ("core/a.py", "def f(loop):\n    loop._broadcast = None", "_broadcast is somebody else's"),
    ("core/a.py", "class A:\n    def f(self):\n        return self.inner._count", "_count is somebody else's"),
    ("core/a.py", "class A:\n    def f(self):\n        return super()._theirs()", "_theirs is nothing of ours"),
    ("core/a.py", "class A:\n    _optimizer: int\ndef f(a):\n    return a._optimizer", "_optimizer is somebody else's"),
    ("core/a.py", "getattr(x, '_optimizer', None)", "_optimizer is private"),
    ("distributed/a.py", "class A:\n    def f(self):\n        return self._timeout", "_timeout is nothing of ours"),
    ("strategies/a.py", "class A:\n    _scale: int\ndef f(a):\n    return a._scale", "only `self` may use it"),
]
NO_BREACHES = [
    ("core/a.py", "from lightning_parstrat._version import __version__\nfrom . import _b\nfrom .._c import _d"),
    ("core/a.py", "import torch\nfrom torch.optim import Optimizer\ntorch.__version__, Optimizer.__init__"),
    ("core/a.py", "class A:\n    def f(self):\n        self._own = 1\n        return self._own, self.b._own"),
    ("core/a.py", "class A:\n    def _f(self):\n        return super()._f()"),
    ("core/a.py", "def f(point):\n    return point._replace(x=1)._asdict(), type(point)._fields"),
    ("core/a.py", "FLAGS = ('_spawn', 'no _optimizer here')\nif __name__ == '__main__': pass"),
    ("strategies/a.py", "class A:\n    def f(self):\n        return self._timeout, super()._timeout"),
    ("strategies/lightning_compat.py", "from lightning.pytorch import _x\n_x._y"),
]


def test_a_breach_is_found_and_what_is_ours_or_public_is_none(tmp_path: Path) -> None:
    for number, (file, source, reason) in enumerate(BREACHES):
        (found,) = breaches(write_package(tmp_path / str(number), {file: source}), **LISTED)
        assert found.startswith(f"{file}:") and reason in found, source
    for number, (file, source) in enumerate(NO_BREACHES):
        assert breaches(write_package(tmp_path / f"none{number}", {file: source}), **LISTED) == [], source
    # A name is ours wherever in the package it is defined. What the files on private names define is theirs alone.
    files = {"core/a.py": "def f(a):\n    return a._own", "distributed/b.py": "class B:\n    _own: int"}
    assert breaches(write_package(tmp_path / "ours", files)) == []
    files["distributed/torch_compat.py"] = files.pop("distributed/b.py")
    assert len(breaches(write_package(tmp_path / "theirs", files))) == 1


def write_package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / ROOT.name
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


# Versions.

TORCH, LIGHTNING = torch_compat.TORCH_SEEN[-1], lightning_compat.LIGHTNING_SEEN[-1]


def test_versions_that_are_newer_than_those_tried_are_named() -> None:
    """By the minor release. The constants follow `constraints.txt`: the tests have run with what is installed."""
    assert untried_versions(torch.__version__, lightning.__version__) is None
    assert torch.__version__.partition("+")[0] in torch_compat.TORCH_SEEN
    assert lightning.__version__ in lightning_compat.LIGHTNING_SEEN
    for version in ("2.13.0", "2.13.9+cu130", "2.11.0", "1.99", "nightly"):
        assert not is_newer(version, ("2.13.0",))
    for version in ("2.14.0", "2.14.0a0+git1234567", "2.100.0", "3.0.0"):
        assert is_newer(version, ("2.13.0",)) and is_newer(version, ("2.13.1", "2.12.0"))
    for versions, named in (
        (("9.1.0+cpu", LIGHTNING), ["torch 9.1.0+cpu", TORCH]),
        (("9.1.0", "9.2.0"), ["torch 9.1.0", "lightning 9.2.0", TORCH, LIGHTNING]),
    ):
        warned = untried_versions(*versions)
        assert warned is not None and all(name in warned for name in [*named, "Training goes on"])


def test_a_fit_with_a_version_nobody_tried_warns_once_and_goes_on(tmp_path: Path) -> None:
    script = """
import warnings
import torch
torch.__version__ = "9.1.0"
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        trainer = Trainer(accelerator="cpu", devices=1, strategy="zero1_custom", max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
        trainer.fit(BoringModel())
        print("steps:", trainer.global_step)
for one in caught:
    if "was tried with" in str(one.message):
        print("said:", one.message)
"""
    printed = run_script(script, tmp_path)
    assert printed.count("steps: 1") == 2
    assert printed.count("said: ") == 1 and f"torch up to {TORCH}" in printed and "torch 9.1.0" in printed
