"""What a training program's own command line asks of a cluster: nodes, devices, folders.

A program that uses LightningCLI has this in its arguments and in YAML files; both are read without running it. Of any
other program, only the arguments are known.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_parstrat.cli.errors import UsageError

SUBCOMMANDS = ("fit", "validate", "test", "predict")
_CONFIG_OPTIONS = ("--config", "-c")
_KEYS = ("trainer", "model", "data", *SUBCOMMANDS)
_ARGUMENTS = ("num_nodes", "devices", "accelerator", "strategy", "default_root_dir")
_TORCHRUN = re.compile(r"(^|/)torchrun$|^torch\.distributed\.(run|launch)$")


class Setting(NamedTuple):
    """A value and where it comes from.

    Attributes:
        value: As parsed from YAML.
        source: Where it is written, such as ``c.yaml, line 4: "num_nodes: 4"``.
    """

    value: Any
    source: str


class Program(NamedTuple):
    """A training program.

    Attributes:
        command: How it is started.
        has_lightning_cli: Whether it takes LightningCLI's arguments, as far as its command line shows.
        subcommand: LightningCLI's, such as ``fit``.
        settings: What it asks for, by the Trainer's argument; later ones override earlier ones.
            ``ckpt_path`` is that of the subcommand.
    """

    command: tuple[str, ...]
    has_lightning_cli: bool
    subcommand: str | None
    settings: Mapping[str, Setting]

    def count(self, name: str) -> int | None:
        """A number of nodes or devices; None where it is not given as a number."""
        value = self.settings[name].value if name in self.settings else None
        if isinstance(value, (list, tuple)):
            return len(value)
        if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
            return None
        return int(value)

    @property
    def launcher(self) -> str | None:
        """The word that starts torchrun, if the program is started by it."""
        before = self.command[: _start(self.command)]
        return next((word for word in before if is_torchrun(word)), None)


def is_torchrun(word: str) -> bool:
    """Whether a word of a command is torchrun, or one of its modules."""
    return _TORCHRUN.search(word) is not None


def read_program(command: Sequence[str], folder: Path, strict: bool = True) -> Program:
    """Reads a program's arguments and configuration files.

    Args:
        command: The program and its arguments.
        folder: Where it will run; paths of files are relative to it.
        strict: Whether a configuration that cannot be read is an error, where the program is one of LightningCLI.

    Raises:
        UsageError: A file cannot be read, or is not YAML.
    """
    words = list(command[_start(command) :])
    positions = [n for n, word in enumerate(words) if word in SUBCOMMANDS and not _is_value(words, n)]
    subcommand = words[positions[0]] if positions else None
    settings: dict[str, Setting] = {}
    has_cli = subcommand is not None
    for option, value, shown in _options(words):
        found: dict[str, Setting] | None = None
        if option in _CONFIG_OPTIONS and value is not None:
            config = _read_config(value, folder, must_be=strict and subcommand is not None)
            found = None if config is None else config.settings(subcommand)
        elif option == "--trainer" and value is not None:
            config = _read_config(value, folder, must_be=strict)
            found = {} if config is None else config.of(())
        elif option.startswith("--trainer."):
            name = option.removeprefix("--trainer.")
            found = {name: Setting(_of_string(value), f'the argument "{shown}"')} if name in _ARGUMENTS else {}
        elif option == "--ckpt_path":
            settings["ckpt_path"] = Setting(value, f'the argument "{shown}"')
        elif option.removeprefix("--").replace("-", "_") in ("num_nodes", "devices"):
            # Not LightningCLI's, but the usual names in programs that parse their own arguments.
            settings[option.removeprefix("--").replace("-", "_")] = Setting(
                _of_string(value), f'the argument "{shown}"'
            )
        if found is not None:
            has_cli = True
            settings |= found
    return Program(tuple(command), has_cli, subcommand, settings)


def _start(command: Sequence[str]) -> int:
    """Where the program's own words begin: at its file or module; the words before start it."""
    for position, word in enumerate(command):
        if re.fullmatch(r"\S+\.py", word):
            return position
        if word == "-m" and position + 1 < len(command) and not is_torchrun(command[position + 1]):
            return position + 1
    return 0


def _is_value(words: Sequence[str], position: int) -> bool:
    # After an option without `=`, a word such as `test` is that option's value, not a subcommand.
    before = words[position - 1] if position else ""
    return before.startswith("-") and "=" not in before


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yields each option, its value, and both as they were written."""
    for position, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            continue
        if "=" in word:
            option, _, value = word.partition("=")
            yield option, value, word
            continue
        following = words[position + 1] if position + 1 < len(words) else None
        if following is not None and following.startswith("--"):
            following = None
        yield word, following, word if following is None else f"{word} {following}"


def _of_string(value: str | None) -> Any:
    """Parses a value as LightningCLI does, as YAML; ``0,1`` is the Trainer's notation for a list of devices."""
    if value is None:
        return None
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(parsed, str) and "," in parsed:
        return [part for part in parsed.split(",") if part.strip()]
    return parsed


class _Config(NamedTuple):
    """A configuration: its values, and the parsed file with its line numbers."""

    value: Mapping[str, Any]
    node: yaml.Node
    shown: str

    def settings(self, subcommand: str | None) -> dict[str, Setting] | None:
        """Its settings of the Trainer; None where it is not a configuration of LightningCLI."""
        if not any(key in self.value for key in _KEYS):
            return None
        settings: dict[str, Setting] = {}
        for path in ((), (subcommand,)) if subcommand is not None else ((),):
            within = _at(self.value, path)
            settings |= self.of((*path, "trainer"))
            if "ckpt_path" in within:
                settings["ckpt_path"] = self._setting(path, "ckpt_path", within["ckpt_path"])
        return settings

    def of(self, path: tuple[str, ...]) -> dict[str, Setting]:
        """The Trainer's arguments in the mapping at ``path``."""
        within = _at(self.value, path)
        return {name: self._setting(path, name, within[name]) for name in _ARGUMENTS if name in within}

    def _setting(self, path: tuple[str, ...], name: str, value: Any) -> Setting:
        node: yaml.Node | None = self.node
        for key in (*path, name):
            node = _child(node, key)
        if node is None:
            # A YAML merge (`<<`) brought it, so it has no line of its own.
            return Setting(value, f'{self.shown}: "{name}: {value}"')
        written = node.value if isinstance(node, yaml.ScalarNode) else "..."
        return Setting(value, f'{self.shown}, line {node.start_mark.line + 1}: "{name}: {written}"')


def _read_config(given: str, folder: Path, must_be: bool) -> _Config | None:
    """Reads a configuration from a file or inline YAML; None where it is neither and ``must_be`` allows that."""
    inline = given.lstrip().startswith("{")
    try:
        text = given if inline else (folder / Path(given).expanduser()).read_text()
        value, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The value of a variable in a path is known only where the program runs.
        if not must_be or (not inline and "$" in given):
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"The configuration {given} of the program cannot be read: {reason}. It must be YAML; paths are relative to"
            " the folder from which the job is submitted."
        ) from error
    return _Config(value, node, given) if isinstance(value, Mapping) and node is not None else None


def _at(value: Any, path: Sequence[str]) -> Mapping[str, Any]:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        # Of duplicate keys, the last one counts.
        for key, value in reversed(node.value):
            if key.value == name:
                return value  # type: ignore[no-any-return]
    return None
