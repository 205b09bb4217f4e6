"""The nodes, devices and folder that a training program's own command line asks a cluster for.

A program that uses LightningCLI has them in its arguments and in YAML files. Both are read without running the program.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_parstrat.cli.errors import UsageError

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
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
        if isinstance(value, list):
            return len(value)
        return int(value) if re.fullmatch(r"\d+", str(value)) else None


def read_program(command: Sequence[str], folder: Path) -> Program:
    """Reads a program's arguments and configuration files.

    Args:
        command: The program and its arguments.
        folder: The folder that it will run in. Paths of files are relative to it.

    Raises:
        UsageError: A configuration of a LightningCLI cannot be read, or is not YAML.
    """
    # The words before its file or module start it, and may have options of their own.
    start = next((at for at, word in enumerate(command) if word.endswith(".py") or word == "-m"), 0)
    following = list(pairwise([*command[start:], "--"]))
    # After an option without `=`, a word such as `test` is that option's value, and no subcommand.
    commands = [word for before, word in following if word in _SUBCOMMANDS and (before[:1] != "-" or "=" in before)]
    subcommand = commands[0] if commands else None
    settings: dict[str, Setting] = {}
    has_cli = subcommand is not None
    for word, after in following:
        option, equals, value = word.partition("=")
        value, shown = (value, word) if equals or after.startswith("--") else (after, f"{word} {after}")
        if option in ("--config", "-c"):
            config = _read_config(value, folder, must_be=subcommand is not None)
            has_cli |= "trainer" in config
            for trainer in (_at(config, "trainer"), _at(_at(config, subcommand), "trainer")):
                given = {name: trainer[name] for name in _ARGUMENTS if name in trainer}
                settings |= {name: Setting(found, f'{value}: "{name}: {found}"') for name, found in given.items()}
        elif option.startswith("--trainer."):
            has_cli = True
            settings[option.removeprefix("--trainer.")] = Setting(_of_string(value), f'the argument "{shown}"')
    return Program(tuple(command), has_cli, subcommand, settings)


def _of_string(value: str) -> Any:
    """Parses a value as YAML, as LightningCLI does. ``0,1`` is the Trainer's notation for a list of devices."""
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return [part for part in parsed.split(",") if part.strip()] if isinstance(parsed, str) and "," in parsed else parsed


def _read_config(given: str, folder: Path, must_be: bool) -> Mapping[str, Any]:
    """Reads a configuration file. If an unreadable one is no error, it is empty."""
    try:
        return _at({"": yaml.safe_load((folder / Path(given).expanduser()).read_text())}, "")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The value of a variable in a path is known only on the machine of the program.
        if not must_be or "$" in given:
            return {}
        raise UsageError(
            f"The configuration {given} of the program cannot be read: {error}. It must be a file of YAML; paths are"
            " relative to the folder from which the job is submitted."
        ) from error


def _at(value: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    found = value.get(key) if key is not None else None
    return found if isinstance(found, Mapping) else {}
