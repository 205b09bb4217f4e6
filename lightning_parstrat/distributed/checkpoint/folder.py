"""The form of a sharded checkpoint, without the code that reads and writes one."""

from pathlib import Path

SKELETON = "checkpoint.pt"
"""The file that rank 0 writes, by ``torch.save``: the checkpoint with placeholders for tensors that all ranks write."""

METADATA = ".metadata"
"""The index file, which has the place of each run of elements, by torch's name."""

OF_ANOTHER_JOB = (
    "probably another job saves to the same folder. Give each job a separate folder (`dirpath` of ModelCheckpoint, or"
    " `default_root_dir` of the Trainer)."
)
"""The message about a checkpoint that changes while it is read."""


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written. An earlier one of that name is unchanged."""


class CheckpointDamagedError(ValueError):
    """A checkpoint is truncated, damaged, or lacks a part."""


def file_of(rank: int) -> str:
    """The file that a rank writes, by torch's name."""
    return f"__{rank}_0.distcp"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a folder is, or should be, one of these checkpoints."""
    # Lightning's own sharded checkpoints (of FSDP) have this file beside the same index.
    of_others = (path / "meta.pt").exists()
    return path.is_dir() and not of_others and ((path / METADATA).exists() or (path / file_of(0)).exists())
