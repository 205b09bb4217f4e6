"""What a sharded checkpoint is, without what reads and writes one."""

from pathlib import Path

SKELETON = "checkpoint.pt"
"""The file with everything that is not in the other files, and with the names of the tensors that are."""

METADATA = ".metadata"
"""The index of the other files, as torch calls it."""


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written; an earlier one of that name is unchanged."""


class CheckpointDamagedError(ValueError):
    """A checkpoint is truncated, damaged, or lacks a part."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a folder is, or should be, one of these checkpoints."""
    # Lightning's own sharded checkpoints (of FSDP) have this file beside the same index.
    of_others = (path / "meta.pt").exists()
    return path.is_dir() and ((path / SKELETON).exists() or ((path / METADATA).exists() and not of_others))
