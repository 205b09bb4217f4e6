"""What a sharded checkpoint is, without what reads and writes one."""

from pathlib import Path

SKELETON = "checkpoint.pt"
"""The file with everything that is not in the other files, and with the names of the tensors that are."""

METADATA = ".metadata"
"""The index of the other files, as torch calls it."""

OF_ANOTHER_JOB = (
    "probably another job saves to the same folder. Give each job a folder of its own (`dirpath` of ModelCheckpoint, or"
    " `default_root_dir` of the Trainer)."
)
"""What to say of a checkpoint that changes while it is read."""


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written; an earlier one of that name is unchanged."""


class CheckpointDamagedError(ValueError):
    """A checkpoint is truncated, damaged, or lacks a part."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a folder is, or should be, one of these checkpoints."""
    # Lightning's own sharded checkpoints (of FSDP) have this file beside the same index.
    of_others = (path / "meta.pt").exists()
    return path.is_dir() and ((path / SKELETON).exists() or ((path / METADATA).exists() and not of_others))
