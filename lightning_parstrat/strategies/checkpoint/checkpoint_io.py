"""Checkpoint files that are complete or absent, and that processes of one node share in memory when they read them."""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.checkpoint.folder import OF_ANOTHER_JOB
from lightning_parstrat.distributed.durable_files import (
    identity,
    remove_atomically,
    with_errors_of_the_disk,
    written_durably,
)

CHECKPOINT_KEY = "lightning_parstrat"
"""The key of this package's own entries in a checkpoint. Other strategies ignore it."""

FORMAT = 5
"""Version of the entries under that key, and of sharded checkpoints."""

RESUME = "resume"
"""The key of what ranks need to resume, among this package's entries of a checkpoint.

``ranks`` has the state of each rank. ``within_epoch`` says whether the epoch's iterators had been made, and
``validation_is_due`` whether a resumed training validates before it trains.
"""

_NEEDED = ("state_dict", "pytorch-lightning_version")


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes local files under a temporary name, with fsync and a rename. Maps them into memory to read them.

    Lightning writes and reads files elsewhere (``s3://`` and the like). Ranks of one node that map the same file share
    its pages. Host memory holds the file once, and pages that no rank uses are not read.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes the file. See the class.

        Raises:
            OSError: The file could not be written. An existing file is unchanged.
        """
        local = local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        with written_durably(local) as temporary, with_errors_of_the_disk(), open(temporary, "xb") as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Maps the file into memory.

        Raises:
            MisconfigurationException: It is truncated, or not a checkpoint. The message says what to do.
        """
        local = local_path(path)
        try:
            if local is not None and local.is_file():
                loaded: Any = _mapped(local, map_location, weights_only)
                if not isinstance(loaded, dict):
                    return loaded
                # Copies of tensors outside of these: callbacks may keep them when a save replaces the file.
                mapped = ("state_dict", "optimizer_states")
                return {k: v if k in mapped else replace_leaves(v, lambda one: one.clone()) for k, v in loaded.items()}
            return super().load_checkpoint(path, map_location, weights_only)
        except (RuntimeError, EOFError, KeyError, OSError, pickle.UnpicklingError) as error:
            explained = _explained(path)
            if explained is None:
                raise
            raise explained from error

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a folder. It is complete until it is gone."""
        local = local_path(path)
        if local is not None:
            remove_atomically(local)
        else:
            super().remove_checkpoint(path)


def _mapped(path: Path, map_location: Any, weights_only: bool | None) -> Any:
    """The content of a file. torch opens it twice: if another file has taken its name meanwhile, that file is read.

    Raises:
        MisconfigurationException: It was another file after each of ten tries.
    """
    for _ in range(10):
        opened = identity(path)
        try:
            loaded = torch.load(path, mmap=True, map_location=map_location, weights_only=weights_only)
        except Exception:
            if identity(path) in (opened, None):
                raise
        else:
            if identity(path) in (opened, None):
                return loaded
    raise MisconfigurationException(f"{path} was replaced each time it was read: {OF_ANOTHER_JOB}")


def local_path(path: str | Path) -> Path | None:
    """The local path of a path or URL. None if it is not on this machine."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def check_readable(checkpoint: Any, path: str | Path) -> None:
    """Refuses a file that no Trainer has written, or that a newer version of this package has written.

    Raises:
        MisconfigurationException: It lacks keys that every checkpoint of Lightning has, or has a newer format.
    """
    missing = [key for key in _NEEDED if not isinstance(checkpoint, Mapping) or key not in checkpoint]
    if missing:
        raise MisconfigurationException(
            f"{path} is not a checkpoint of a Lightning Trainer: it lacks {' and '.join(map(repr, missing))}. To start"
            " from weights of another source, load them in the module (`load_state_dict`), and pass no `ckpt_path`."
        )
    found = checkpoint.get(CHECKPOINT_KEY, {}).get("format", FORMAT)
    if found > FORMAT:
        raise MisconfigurationException(
            f"{path} was saved by a newer lightning-parstrat (its format is {found}, this version reads {FORMAT})."
            " Upgrade it: `pip install -U lightning-parstrat`."
        )


def _explained(path: str | Path) -> MisconfigurationException | None:
    """The reason why a file could not be loaded. None if the original error is clear enough."""
    local = local_path(path)
    if local is None:
        return None
    if local.is_dir():
        utilities = MisconfigurationException.__module__.rpartition(".")[0]
        return MisconfigurationException(
            f"{path} is a folder, and not one that lightning_parstrat has written. A sharded checkpoint of Lightning's"
            f" FSDP or ModelParallel becomes a file by `python -m {utilities}.consolidate_checkpoint {path}`, one of"
            " DeepSpeed by its `zero_to_fp32.py`."
        )
    if not local.is_file() or zipfile.is_zipfile(local):
        return None
    return MisconfigurationException(
        f"{path} is truncated, or not a checkpoint: its {local.stat().st_size} bytes do not end as a file of"
        " `torch.save` (torch 1.6 or later). If it was copied incompletely, copy it again, or resume from another one."
    )
