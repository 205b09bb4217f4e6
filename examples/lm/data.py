"""The source text of Python's standard library as bytes: a corpus that is on every machine already."""

import hashlib
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SKIPPED_DIRS = {"site-packages", "dist-packages", "__pycache__"}
FILE_SEPARATOR = b"\0"  # occurs in no Python source, so a model can learn where files end
DEFAULT_CACHE = Path(__file__).resolve().parent / "runs" / "data"


def source_files(root: Path) -> list[Path]:
    """All Python sources under `root`, in an order that is the same on every machine."""

    def walk() -> Iterator[Path]:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRS]
            yield from (Path(folder, name) for name in names if name.endswith(".py"))

    return sorted(walk())


def is_held_out(path: Path, one_in: int) -> bool:
    """Whether a file is for validation. Whole files are held out, so no window of one is seen in training."""
    return zlib.crc32(path.as_posix().encode()) % one_in == 0


def write_bytes_file(target: Path, sources: Iterable[Path]) -> None:
    """Concatenates `sources` into `target`, which appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, suffix=".tmp", delete=False) as out:
        try:
            for source in sources:
                out.write(source.read_bytes())
                out.write(FILE_SEPARATOR)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, target)
        except BaseException:
            os.unlink(out.name)
            raise


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes, `stride` bytes apart, each with the bytes that follow as its targets.

    Args:
        data: The text, one byte per element.
        context: Length of a window.
        stride: Distance between the starts of two windows.
        limit: The most windows there are.
    """

    def __init__(self, data: np.ndarray, context: int, stride: int, limit: int | None = None) -> None:
        if len(data) <= context:
            raise ValueError(f"a window of {context=} bytes does not fit into a text of {len(data)} bytes")
        windows = (len(data) - context - 1) // stride + 1
        self.windows = windows if limit is None else min(limit, windows)
        self.data, self.context, self.stride = data, context, stride

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = torch.from_numpy(self.data[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


class StdlibBytes(LightningDataModule):
    """The standard library's source text, split by file into training and validation bytes.

    Args:
        context: Length of a window in bytes.
        batch_size: Windows per process and step.
        val_windows: Windows validated on, spread evenly over the held-out files; null takes all of them.
        val_one_in: One file in this many is held out.
        num_workers: Loader processes. Cutting windows from mapped memory costs next to nothing: 0 is enough.
        cache_dir: Where the byte files are kept; null is `runs/data` beside this program.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 8,
        val_windows: int | None = 256,
        val_one_in: int = 40,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.source_root = Path(sysconfig.get_path("stdlib"))
        self.cache_dir = Path(cache_dir) if cache_dir else DEFAULT_CACHE

    def prepare_data(self) -> None:
        """Writes the byte files, unless they are there already. Runs in one process per node."""
        parts: dict[Path, list[Path]] = {self._byte_file("train"): [], self._byte_file("val"): []}
        train, val = parts.values()
        for source in source_files(self.source_root):
            held_out = is_held_out(source.relative_to(self.source_root), self.hparams.val_one_in)
            (val if held_out else train).append(source)
        for target, sources in parts.items():
            if not target.exists():
                write_bytes_file(target, sources)

    def setup(self, stage: str) -> None:
        context, val_windows = self.hparams.context, self.hparams.val_windows
        self.train_set = ByteWindows(self._load("train"), context, stride=context)
        val = self._load("val")
        stride = max(context, len(val) // val_windows) if val_windows else context
        self.val_set = ByteWindows(val, context, stride, limit=val_windows)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_set, shuffle=False)

    def unigram_bits(self) -> float:
        """Entropy of the single bytes of the whole text: what a model that ignores context would need at best."""
        counts = sum(np.bincount(self._load(part), minlength=256) for part in ("train", "val"))
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log2(frequencies)).sum())

    def text_bytes(self) -> int:
        """Length of the whole text."""
        return sum(len(self._load(part)) for part in ("train", "val"))

    def _loader(self, windows: ByteWindows, shuffle: bool) -> DataLoader:
        return DataLoader(
            windows,
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            # A ragged last training batch would give the processes steps of different cost.
            drop_last=shuffle,
            num_workers=self.hparams.num_workers,
            persistent_workers=self.hparams.num_workers > 0,
        )

    def _load(self, part: str) -> np.ndarray:
        return np.memmap(self._byte_file(part), dtype=np.uint8, mode="r")

    def _byte_file(self, part: str) -> Path:
        # Another interpreter is another text: it must not be served from this one's cache.
        identity = f"{self.source_root} {sys.version} {self.hparams.val_one_in}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return self.cache_dir / f"stdlib-{key}" / f"{part}.bin"
