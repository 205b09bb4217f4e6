"""``lightning-parstrat consolidate``: turns a sharded checkpoint into one file."""

import os
import pickle
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.cli.text import UsageError
from lightning_parstrat.distributed.checkpoint.folder import CheckpointDamagedError, is_sharded_checkpoint
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.durable_files import with_errors_of_the_disk, written_durably

_DESCRIPTION = """
Turns a folder that was saved with state_dict_type="sharded" into an ordinary Lightning checkpoint. Runs on one
machine without a GPU, and needs twice the file's room on the disk, but little memory. The folder is not changed.

  lightning-parstrat consolidate checkpoints/last.ckpt last-full.ckpt
"""


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    parser.add_argument("source", type=str, metavar="IN", help="the folder")
    parser.add_argument("destination", type=str, metavar="OUT", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_trust(parser)
    return parser


def add_trust(parser: ArgumentParser) -> None:
    """Adds the argument by which a user trusts a checkpoint."""
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="load objects of any class in the checkpoint; this can run code that its author put in it",
    )


def run(arguments: Namespace) -> int:
    """Writes the file. See :func:`main`."""
    source, destination = Path(arguments.source), Path(arguments.destination)
    if destination.is_dir():
        raise UsageError(f"{destination} is a folder. OUT must be the file to write.")
    if destination.exists() and not arguments.overwrite:
        raise UsageError(f"{destination} already exists. Choose another name, or add --overwrite.")
    checkpoint = open_sharded(source, arguments.trusted)
    try:
        loaded(lambda: _consolidate(checkpoint, destination), source)
    except OSError as error:
        raise UsageError(str(error)) from error
    print(f"{destination}: {destination.stat().st_size} bytes")
    return 0


def _consolidate(checkpoint: ShardedCheckpoint, destination: Path) -> None:
    """Writes an ordinary checkpoint without holding it in memory.

    Each tensor is read into an unnamed file beside it. The kernel keeps as much of these in memory as it has room for.
    """

    def room(like: Tensor) -> Tensor:
        with tempfile.NamedTemporaryFile(dir=destination.parent) as file:
            # Not later, when memory is written: a full disk would then end the process.
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
            flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    with written_durably(destination) as temporary:
        whole = checkpoint.filled(checkpoint.skeleton, room=room)
        with with_errors_of_the_disk(), open(temporary, "xb") as target:
            torch.save(whole, target)


def open_sharded(source: Path, trusted: bool) -> ShardedCheckpoint:
    """Opens a sharded checkpoint.

    Raises:
        UsageError: There is no sharded checkpoint, or it is damaged, or it holds more than tensors and plain values.
    """
    if not is_sharded_checkpoint(source):
        what = "is a file, as a consolidated checkpoint is" if source.is_file() else "is not a sharded checkpoint"
        raise UsageError(f"{source} {what if source.exists() else 'does not exist'}. IN is a folder with `.metadata`.")
    checkpoint: ShardedCheckpoint = loaded(lambda: ShardedCheckpoint(source, weights_only=not trusted), source)
    loaded(checkpoint.check_files, source)
    return checkpoint


def loaded(load: Callable[[], Any], source: Path) -> Any:
    """The result of ``load``. Its errors become those of the command."""
    # Classes of the program, if it is started in its folder. The console's script leaves that out.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return load()
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{source} holds objects of classes that are loaded only with your permission ({error}). If you trust"
            " its author, add --trusted."
        ) from error
    except (ImportError, AttributeError, CheckpointDamagedError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, (ImportError, AttributeError)):
            raise UsageError(
                f"{source} holds objects of classes that cannot be imported from here ({cause}). Run this in the"
                " program's folder."
            ) from error
        raise UsageError(str(error)) from error
