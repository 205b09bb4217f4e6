"""``lightning-parstrat consolidate``: one file of a checkpoint that all ranks have written."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.distributed.checkpoint.consolidation import consolidate, consolidated_bytes
from lightning_parstrat.distributed.checkpoint.reading import (
    CheckpointDamagedError,
    ShardedCheckpoint,
    is_sharded_checkpoint,
)

_DESCRIPTION = """
Makes an ordinary Lightning checkpoint of a folder that was saved with checkpoint_format="sharded". Runs on one machine,
without a GPU, and holds one piece of one tensor in memory at a time. The folder stays as it is.

  lightning-parstrat consolidate checkpoints/last.ckpt last-full.ckpt
"""


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("source", type=str, metavar="IN", help="the folder")
    parser.add_argument("destination", type=str, metavar="OUT", help="the file to be")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    add_trust(parser)
    return parser


def add_trust(parser: ArgumentParser) -> None:
    """The argument by which a user vouches for a checkpoint."""
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="load objects of any class that the checkpoint holds, which may run code of who wrote it",
    )


def run(arguments: Namespace, program: list[str]) -> int:
    """Writes the file; see :func:`main`."""
    if program:
        raise UsageError(f"Nothing is expected after `--`, got {' '.join(program)!r}.")
    source, destination = Path(arguments.source), Path(arguments.destination)
    if destination.is_dir():
        raise UsageError(f"{destination} is a folder. OUT is the file to be written.")
    if destination.exists() and not arguments.overwrite:
        raise UsageError(f"{destination} is there already. Choose another name, or give --overwrite.")
    checkpoint = open_sharded(source, arguments.trusted)
    total = consolidated_bytes(checkpoint)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc=destination.name, file=sys.stderr) as bar:
            consolidate(checkpoint, destination, bar.update)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"{destination}: {destination.stat().st_size} bytes")
    return 0


def open_sharded(source: Path, trusted: bool) -> ShardedCheckpoint:
    """A sharded checkpoint.

    Raises:
        UsageError: There is none, it is damaged, or it holds more than tensors and plain values.
    """
    if not is_sharded_checkpoint(source):
        what = "is a file: it is consolidated already" if source.is_file() else "is no sharded checkpoint"
        raise UsageError(f"{source} {what if source.exists() else 'is not there'}. IN is a folder with `.metadata`.")
    return loaded(lambda: ShardedCheckpoint(source, weights_only=not trusted), source)


def loaded(load: Callable[[], Any], source: Path) -> Any:
    """What ``load`` returns, or what is wrong in terms of the command."""
    try:
        return load()
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{source} holds objects of classes that are not loaded without your word for it ({error}). If you trust"
            " who wrote it, give --trusted."
        ) from error
    except CheckpointDamagedError as error:
        raise UsageError(str(error)) from error
