"""What a sharded checkpoint is, without what reads and writes one."""

from pathlib import Path

SKELETON = "checkpoint"
"""Under this name rank 0 writes all that is not in pieces, with placeholders for the tensors that are."""

METADATA = ".metadata"
"""The file that says where each piece is, as torch calls it."""

OF_ANOTHER_JOB = (
    "probably another job saves to the same folder. Give each job a folder of its own (`dirpath` of ModelCheckpoint, or"
    " `default_root_dir` of the Trainer)."
)
"""What to say of a checkpoint that changes while it is read."""


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written; an earlier one of that name is unchanged."""


class CheckpointDamagedError(ValueError):
    """A checkpoint is truncated, damaged, or lacks a part."""


def states_of(rank: int) -> str:
    """Under which name a rank writes what it alone needs to go on."""
    return f"ranks/{rank}"


def file_of(rank: int) -> str:
    """The file that a rank writes, as torch calls it."""
    return f"__{rank}_0.distcp"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a folder is, or should be, one of these checkpoints."""
    # Lightning's own sharded checkpoints (of FSDP) have this file beside the same index.
    of_others = (path / "meta.pt").exists()
    return path.is_dir() and not of_others and ((path / METADATA).exists() or (path / file_of(0)).exists())
