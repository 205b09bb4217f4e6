"""What README.md and docs/ say: code runs, commands exist, links lead somewhere, numbers are those measured."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_parstrat.cli.main import COMMANDS
from tests.scripts import run_python, run_script

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_parstrat"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LONGEST_README, LONGEST_PAGE = 150, 220


class Block(NamedTuple):
    """A fenced block of code. One that trains has ``<!-- trains -->`` before it."""

    place: str
    language: str
    trains: bool
    source: str


FENCE = re.compile(r"^(<!-- trains -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n[ \t]*\n)((?: {4}|\t)[ \t]*\S.*)")
"""The first line of a block of code that has no fence: an empty line comes before it."""


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], found[1] is not None, found[3])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(language: str, trains: bool = False) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.trains == trains]


by_place = attrgetter("place")


def test_every_block_is_of_a_kind_that_is_looked_into() -> None:
    assert {block.language for block in BLOCKS} == {"python", "yaml", "bash", "text"}
    # No fence is left open, and no block goes without one.
    assert sum(page.read_text().count("```") for page in PAGES) == 2 * len(BLOCKS) > 30
    assert INDENTED.findall("Text:\n\n    make test\n") == ["    make test"]
    assert not [found for page in PAGES for found in INDENTED.findall(FENCE.sub("", page.read_text()))]


def test_python_runs(tmp_path: Path) -> None:
    """As they are pasted: each block has names of its own. In one process, since imports take longer than blocks."""
    runner = ["import sys, json", f"blocks = json.loads({json.dumps(json.dumps(blocks('python')))})"]
    runner += ["for place, _, _, source in blocks:", "    print('block', place, flush=True)"]
    runner += ["    exec(compile(source, place, 'exec'), {'__name__': 'block'})"]
    assert len(blocks("python")) >= 5
    printed = run_script("\n".join(runner), tmp_path)
    assert printed.count("block ") >= len(blocks("python"))


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python", trains=True), ids=by_place)
def test_python_trains(block: Block, tmp_path: Path) -> None:
    printed = run_script(block.source, tmp_path)
    assert "`Trainer.fit` stopped" in printed
    assert ("tuning" in block.source) == (tmp_path / "tuning" / "plan.json").exists()


@pytest.mark.parametrize("block", blocks("yaml"), ids=by_place)
def test_yaml_configures_a_trainer(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    given = yaml.safe_load(block.source)
    given["trainer"] |= {"accelerator": "cpu", "logger": False}
    trainer = Trainer(**parser.instantiate_classes(parser.parse_object(given)).trainer)
    assert type(trainer.strategy).__name__ in (
        "ZeRO1Strategy",
        "ZeRO3Strategy",
        "TunedDDPStrategy",
        "PipelineStrategy",
    )


def commands() -> Iterator[tuple[str, list[str]]]:
    for block in blocks("bash"):
        for line in block.source.replace("\\\n", " ").splitlines():
            yield block.place, shlex.split(line, comments=True)
    for page in PAGES:
        for line in re.findall(r"`(lightning-parstrat [^`]+)`", page.read_text().replace("\n", " ")):
            yield page.name, shlex.split(line)


def test_commands_exist_with_the_arguments_that_are_given() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for place, words in commands():
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if not words:
            continue
        program, *arguments = words
        seen.add(program)
        if program == "make":
            assert arguments[0] in targets, place
        elif program == "lightning-parstrat":
            command, *options = arguments
            assert command in COMMANDS, place
            if options:
                parser = import_module(f"lightning_parstrat.cli.{command}").make_parser()
                parser.exit_on_error = False
                parser.parse_args(options[: options.index("--")] if "--" in options else options)
        else:
            assert program in ("pip", "torchrun"), f"{place}: nobody looks into {program}"
    assert seen == {"make", "lightning-parstrat", "pip", "torchrun"}


def links_of(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text())
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link)


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them; `make docs` looks for those of the site."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page, link in [(one, link) for one in LINKING for link in links_of(one)]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def test_pages_are_short() -> None:
    readme, *pages = [len(page.read_text().splitlines()) for page in PAGES]
    assert readme <= LONGEST_README and max(pages) <= LONGEST_PAGE


def test_tables_of_numbers_are_those_of_the_result_files() -> None:
    checked = run_python([ROOT / "docs" / "make_tables.py", "--check"], ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    named = [name for page in PAGES for name in re.findall(r"<!-- table: (.+) -->", page.read_text())]
    assert len(set(named)) == len(named) == 21


def names_defined_in(path: Path) -> set[str]:
    defined = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return defined


def test_the_architecture_names_files_and_functions_that_are_there() -> None:
    looked_for = 0
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        spans = re.findall(r"`([^`]+)`", line)
        places = [span for span in spans if span.endswith((".py", "/"))]
        found = [path for place in places for path in (PACKAGE / place, PACKAGE.parent / place) if path.exists()]
        assert len(found) == len(places), line
        # A row that names files names what is in them.
        files = [path for path in found if path.is_file()]
        if line.startswith("|") and files:
            names = {span for span in spans if re.fullmatch(r"\w+(\.\w+)?", span)} - {
                "ddp_tuned",
                "pipeline_custom",
                "zero1_custom",
                "zero3_custom",
                *places,
            }
            assert names <= set().union(*map(names_defined_in, files)), line
            looked_for += len(names)
    assert looked_for > 20


def test_pictures_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = run_python([ROOT / "docs" / "make_pictures.py", tmp_path], tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    pictures = {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == pictures
    assert len(pictures) == 6
    assert all((tmp_path / name).read_text().count("<path") > 20 for name in pictures)
