"""The nodes, devices and folder that a training program's own command line asks a cluster for.

A program that uses LightningCLI has them in its arguments and in YAML files. Both are read without running the program.
Of any other program, only the arguments are known.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_parstrat.cli.errors import UsageError

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SECTIONS = ("trainer", "model", "data", *_SUBCOMMANDS)
_ARGUMENTS = ("num_nodes", "devices", "default_root_dir")


class Setting(NamedTuple):
    """A value, as parsed from YAML, and its source, such as ``c.yaml: "num_nodes: 4"``."""

    value: Any
    source: str


class Program(NamedTuple):
    """A training program.

    Attributes:
        command: The words that start it.
        has_lightning_cli: Whether it takes LightningCLI's arguments, as far as its command line shows.
        subcommand: LightningCLI's subcommand, such as ``fit``.
        settings: The settings, by the Trainer's argument. Later ones override earlier ones.
    """

    command: tuple[str, ...]
    has_lightning_cli: bool
    subcommand: str | None
    settings: Mapping[str, Setting]

    def count(self, name: str) -> int | None:
        """A number of nodes or devices. None if it is not given as a number."""
        value = self.settings[name].value if name in self.settings else None
        if isinstance(value, (list, tuple)):
            return len(value)
        if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
            return None
        return int(value)


def read_program(command: Sequence[str], folder: Path) -> Program:
    """Reads a program's arguments and configuration files.

    Args:
        command: The program and its arguments.
        folder: The folder that it will run in. Paths of files are relative to it.

    Raises:
        UsageError: A configuration of a LightningCLI cannot be read, or is not YAML.
    """
    words = list(command[_start(command) :])
    commands = [word for at, word in enumerate(words) if word in _SUBCOMMANDS and not _is_value(words, at)]
    subcommand = commands[0] if commands else None
    settings: dict[str, Setting] = {}
    has_cli = subcommand is not None
    for option, value, shown in _options(words):
        name = option.removeprefix("--trainer.").removeprefix("--").replace("-", "_")
        if option in ("--config", "-c", "--trainer") and value is not None:
            config = _read_config(value, folder, must_be=subcommand is not None)
            has_cli |= option == "--trainer" or any(key in config for key in _SECTIONS)
            within = [config] if option == "--trainer" else [_at(config, "trainer"), _at(config, subcommand, "trainer")]
            for one in within:
                given = {name: one[name] for name in _ARGUMENTS if name in one}
                settings |= {name: Setting(found, f'{value}: "{name}: {found}"') for name, found in given.items()}
        elif option.startswith("--trainer.") or name in ("num_nodes", "devices"):
            # Without "trainer." they are not LightningCLI's, but the usual names in programs with own parsers.
            has_cli |= option.startswith("--trainer.")
            settings[name] = Setting(_of_string(value), f'the argument "{shown}"')
    return Program(tuple(command), has_cli, subcommand, settings)


def _start(command: Sequence[str]) -> int:
    """The position of the program's own words: its file or module. The words before start it."""
    for position, word in enumerate(command):
        if re.fullmatch(r"\S+\.py", word):
            return position
        if word == "-m" and position + 1 < len(command):
            return position + 1
    return 0


def _is_value(words: Sequence[str], position: int) -> bool:
    # After an option without `=`, a word such as `test` is that option's value, and no subcommand.
    before = words[position - 1] if position else ""
    return before.startswith("-") and "=" not in before


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yields each option, its value, and both in their original form."""
    for word, following in pairwise([*words, "--"]):
        option, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            continue
        if equals or following.startswith("--"):
            yield option, value if equals else None, word
        else:
            yield option, following, f"{word} {following}"


def _of_string(value: str | None) -> Any:
    """Parses a value as YAML, as LightningCLI does. ``0,1`` is the Trainer's notation for a list of devices."""
    try:
        parsed = yaml.safe_load(value or "")
    except yaml.YAMLError:
        return value
    return [part for part in parsed.split(",") if part.strip()] if isinstance(parsed, str) and "," in parsed else parsed


def _read_config(given: str, folder: Path, must_be: bool) -> Mapping[str, Any]:
    """Reads a configuration from a file or inline YAML. If it is neither, and that is allowed, it is empty.

    Args:
        given: The path or the YAML.
        folder: The folder that paths are relative to.
        must_be: Whether an unreadable configuration is an error.
    """
    inline = given.lstrip().startswith("{")
    try:
        value = yaml.safe_load(given if inline else (folder / Path(given).expanduser()).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The value of a variable in a path is known only on the machine of the program.
        if not must_be or (not inline and "$" in given):
            return {}
        raise UsageError(
            f"The configuration {given} of the program cannot be read: {error}. It must be YAML; paths are relative to"
            " the folder from which the job is submitted."
        ) from error
    return value if isinstance(value, Mapping) else {}


def _at(value: Any, *path: str | None) -> Mapping[str, Any]:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
