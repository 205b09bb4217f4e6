"""The command ``lightning-parstrat``."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.imports import RequirementCache

from lightning_parstrat._version import __version__
from lightning_parstrat.cli.errors import UsageError

NEEDED = "jsonargparse[signatures]>=4.39"
"""The commands alone need it: the extra ``cli``. A LightningCLI needs it, too, and checks for it itself."""

COMMANDS = {
    "slurm": "write a Slurm job file for a training, and submit it",
    "doctor": "check what a training needs of this machine, or of all ranks of a job",
    "plan": "show what a training holds and sends under each strategy, and recommend one",
    "inspect": "show what is in a checkpoint, full or sharded",
    "consolidate": "turn a sharded checkpoint into one file, which every strategy reads",
}
"""Each command is a module with ``make_parser`` and ``run``. It is imported on its call: some do not need Lightning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The command line's arguments. The default is the process's own.

    Returns:
        The exit code: 0 for success, 1 if a check has found a problem, 2 for wrong usage.
    """
    if not (needed := RequirementCache(NEEDED)):
        print(f"lightning-parstrat: {needed}", file=sys.stderr)
        return 2
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, program = given, []
    if "--" in given:
        # The rest is another program's command line, which no parser here may read.
        position = given.index("--")
        own, program = given[:position], given[position + 1 :]
    command = next((word for word in own if word in COMMANDS), None)
    parsed = _make_parser(command).parse_args(own)
    try:
        return int(_module(parsed.command).run(parsed[parsed.command], program))
    except UsageError as error:
        print(f"lightning-parstrat {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _make_parser(command: str | None) -> Any:
    from jsonargparse import ArgumentParser

    from lightning_parstrat.cli.text import Verbatim

    parser = ArgumentParser(
        prog="lightning-parstrat",
        # Subcommands inherit it from here.
        formatter_class=Verbatim,
        version=__version__,
        description="What a parallel training with PyTorch Lightning needs before it runs, and what it leaves.",
    )
    commands = parser.add_subcommands(dest="command", required=True)
    for name, line in COMMANDS.items():
        commands.add_subcommand(name, _module(name).make_parser() if name == command else ArgumentParser(), help=line)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"lightning_parstrat.cli.{command}")


if __name__ == "__main__":
    sys.exit(main())
