"""The command ``lightning-parstrat``."""

import importlib
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

from lightning_parstrat._version import __version__
from lightning_parstrat.cli.text import UsageError

COMMANDS = {
    "slurm": "write a Slurm job file for a training, and submit it",
    "doctor": "check what a training needs of this machine, or of all ranks of a job",
    "plan": "show what a training holds and sends under each strategy, and recommend one",
    "tune": "run a program under each strategy for some steps, and write down the fastest",
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, program = given, []
    if "--" in given:
        # The rest is another program's command line, which no parser here may read.
        position = given.index("--")
        own, program = given[:position], given[position + 1 :]
    command = next((word for word in own if word in COMMANDS), None)
    parsed = _make_parser(command).parse_args(own)
    try:
        if program and parsed.command not in ("slurm", "tune"):
            raise UsageError(f"nothing is expected after `--`, got {' '.join(program)!r}.")
        parsed.program = program
        code = int(_module(parsed.command).run(parsed))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"lightning-parstrat {parsed.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Its reader has ended, such as `head`. Python would write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # Such as a program that does not exist, a folder that cannot be written, or a full disk.
        print(f"lightning-parstrat {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _make_parser(command: str | None) -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-parstrat",
        description="What a parallel training with PyTorch Lightning needs before it runs, and what it leaves.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, line in COMMANDS.items():
        # Descriptions have examples, and keep their lines.
        own = _module(name).make_parser() if name == command else ArgumentParser()
        commands.add_parser(
            name,
            parents=[own],
            add_help=False,
            help=line,
            description=own.description,
            formatter_class=RawDescriptionHelpFormatter,
        )
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"lightning_parstrat.cli.{command}")


if __name__ == "__main__":
    sys.exit(main())
