"""What a training program's own command line asks of a cluster: nodes, devices, folders.

A program that uses LightningCLI says so in its arguments and in YAML files; both are read without running it. Of any
other program nothing is known but its arguments.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_parstrat.cli.errors import UsageError

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_CONFIG_OPTIONS = ("--config", "-c")
_SWEPT = ("num_nodes", "devices", "accelerator", "strategy", "default_root_dir")


class Setting(NamedTuple):
    """A value and who says so.

    Attributes:
        value: As YAML has it.
        source: Where it stands, such as ``c.yaml, line 4: "num_nodes: 4"``.
    """

    value: Any
    source: str


class Program(NamedTuple):
    """A training program.

    Attributes:
        command: How it is started.
        has_lightning_cli: Whether it takes LightningCLI's arguments, as far as its own show.
        settings: What it asks for, by the Trainer's argument; later ones go over earlier ones. ``ckpt_path`` is that of
            the subcommand.
    """

    command: tuple[str, ...]
    has_lightning_cli: bool
    settings: Mapping[str, Setting]

    def count(self, name: str) -> int | None:
        """A number of nodes or devices; None where the program leaves it to what it finds."""
        value = self.settings[name].value if name in self.settings else None
        if isinstance(value, str):
            value = _of_string(value)
        if isinstance(value, (list, tuple)):
            return len(value)
        return None if value in (None, "auto", -1) or isinstance(value, bool) else int(value)


def read_program(command: Sequence[str], folder: Path) -> Program:
    """Reads what a program's arguments and configuration files say.

    Args:
        command: The program and its arguments.
        folder: Where it will run; paths of files are relative to it.

    Raises:
        UsageError: A file cannot be read, or is no YAML.
    """
    settings: dict[str, Setting] = {}
    has_cli = any(word in _SUBCOMMANDS for word in command)
    subcommand = next((word for word in command if word in _SUBCOMMANDS), None)
    for option, value, shown in _options(command):
        if option in _CONFIG_OPTIONS and value is not None and not value.startswith("{"):
            has_cli = True
            settings |= _settings_of_file(folder / value, value, subcommand)
        elif option == "--trainer" and value is not None:
            has_cli = True
            settings |= _settings_of_group(value, folder, shown)
        elif option.startswith("--trainer."):
            has_cli = True
            name = option.removeprefix("--trainer.").split(".")[0]
            if name in _SWEPT and option == f"--trainer.{name}":
                settings[name] = Setting(_of_string(value), f'the argument "{shown}"')
        elif option.removeprefix("--").replace("-", "_") in ("num_nodes", "devices"):
            # Not LightningCLI's, but by far the most common names in programs that parse for themselves.
            settings[option.removeprefix("--").replace("-", "_")] = Setting(
                _of_string(value), f'the argument "{shown}"'
            )
        elif option == "--ckpt_path":
            settings["ckpt_path"] = Setting(value, f'the argument "{shown}"')
    return Program(tuple(command), has_cli, settings)


def _options(command: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Option, value, and both as they were written."""
    for position, word in enumerate(command):
        if not word.startswith("-") or word == "-":
            continue
        if "=" in word:
            option, _, value = word.partition("=")
            yield option, value, word
            continue
        following = command[position + 1] if position + 1 < len(command) else None
        if following is not None and following.startswith("--"):
            following = None
        yield word, following, word if following is None else f"{word} {following}"


def _of_string(value: str | None) -> Any:
    """As LightningCLI's parser takes it: YAML; ``0,1`` is the Trainer's own way to write a list of devices."""
    if value is None:
        return None
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(parsed, str) and "," in parsed:
        return [part for part in parsed.split(",") if part.strip()]
    return parsed


def _settings_of_group(value: str, folder: Path, shown: str) -> dict[str, Setting]:
    """What ``--trainer`` says, which takes a file or YAML itself."""
    if value.lstrip().startswith("{"):
        found = yaml.safe_load(value)
        return {name: Setting(found[name], f'the argument "{shown}"') for name in _SWEPT if name in found}
    root = _compose(folder / value, value)
    return _settings_of_mapping(root, value)


def _settings_of_file(path: Path, shown: str, subcommand: str | None) -> dict[str, Setting]:
    root = _compose(path, shown)
    settings: dict[str, Setting] = {}
    for within in (root, _child(root, subcommand)):
        settings |= _settings_of_mapping(_child(within, "trainer"), shown)
        checkpoint = _child(within, "ckpt_path")
        if checkpoint is not None:
            settings["ckpt_path"] = _setting(checkpoint, "ckpt_path", shown)
    return settings


def _settings_of_mapping(node: yaml.Node | None, shown: str) -> dict[str, Setting]:
    found = {name: _child(node, name) for name in _SWEPT}
    return {name: _setting(child, name, shown) for name, child in found.items() if child is not None}


def _setting(node: yaml.Node, name: str, shown: str) -> Setting:
    value = yaml.safe_load(yaml.serialize(node))
    written = node.value if isinstance(node, yaml.ScalarNode) else "..."
    return Setting(value, f'{shown}, line {node.start_mark.line + 1}: "{name}: {written}"')


def _compose(path: Path, shown: str) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(
            f"The configuration {shown} of the program cannot be read ({error.strerror}). Paths are relative to the"
            " folder from which the job is submitted."
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(f"The configuration {shown} of the program is no YAML: {error}") from error


def _child(node: yaml.Node | None, name: str | None) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == name:
            return value  # type: ignore[no-any-return]
    return None
