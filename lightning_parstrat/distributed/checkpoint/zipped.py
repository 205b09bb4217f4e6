"""A piece of a tensor as ``torch.save`` would write it, in a file of its own or in a part of one.

torch cannot write one without holding the interpreter while it does, nor say how many bytes it will take. Here the
bytes around the elements are computed, as many whatever the elements are; ``torch.load`` reads it, and so does torch's
reader of sharded checkpoints.
"""

import io
import struct
import sys
import zipfile
import zlib
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.distributed.torch_compat import pickled_tensor

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LARGE_END = struct.Struct("<4sQ2H2I4Q")
_LARGE_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_VERSION, _DAY = 45, 0x21
"""Of the zip format: with sizes of 64 bits; and 1980-01-01, where its calendar begins."""

_IN_EXTRA, _NOT_HERE = 1, 0xFFFFFFFF
_PADDING = 0x4246
"""What torch calls its padding."""

_DATA = b"archive/data/0"
_HEAD = 1024
"""Bytes before the elements."""


def _records(pickled: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"archive/data.pkl", pickled),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ]


_TAIL = (
    sum(_CENTRAL.size + len(name) for name, _ in _records(b""))
    + (_CENTRAL.size + len(_DATA) + 28)
    + (_LARGE_END.size + _LARGE_LOCATOR.size + _END.size)
)
"""Bytes after the elements."""


def zipped_bytes(nbytes: int) -> int:
    """Bytes of a piece of so many bytes."""
    return _HEAD + nbytes + _TAIL


def write_zipped(elements: Tensor, file: IO[bytes]) -> None:
    """Writes a piece of :func:`zipped_bytes` bytes, at the file's position; the interpreter is free meanwhile.

    Args:
        elements: 1-D, contiguous, in host memory.
        file: In binary mode.
    """
    head, tail = _around(elements.dtype, elements.numel())
    file.write(head)
    # As bytes: numpy has no bfloat16.
    file.write(elements.view(torch.uint8).numpy().data)
    file.write(tail)


def _around(dtype: torch.dtype, numel: int) -> tuple[bytes, bytes]:
    """What is written before and after the elements."""
    nbytes = numel * dtype.itemsize
    head = bytearray()
    central = bytearray()
    for name, content in _records(pickled_tensor(dtype, numel)):
        entry = (0, 0, 0, _DAY, zlib.crc32(content), len(content), len(content), len(name))
        central += _CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, *entry, 0, 0, 0, 0, 0, len(head)) + name
        head += _LOCAL.pack(b"PK\3\4", _VERSION, *entry, 0) + name + content
    # The checksum of the elements is left out, as torch does when it is asked for speed; it never looks at it.
    entry = (0, 0, 0, _DAY, 0, _NOT_HERE, _NOT_HERE, len(_DATA))
    sizes = struct.pack("<2H2Q", _IN_EXTRA, 16, nbytes, nbytes)
    room = _HEAD - len(head) - _LOCAL.size - len(_DATA) - len(sizes) - 4
    if room < 0:
        raise AssertionError("there is no room for what describes a tensor")
    place = struct.pack("<2H3Q", _IN_EXTRA, 24, nbytes, nbytes, len(head))
    central += _CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, *entry, len(place), 0, 0, 0, 0, _NOT_HERE) + _DATA + place
    head += _LOCAL.pack(b"PK\3\4", _VERSION, *entry, len(sizes) + 4 + room) + _DATA + sizes
    head += struct.pack("<2H", _PADDING, room) + bytes(room)
    start, end = _HEAD + nbytes, _HEAD + nbytes + len(central)
    tail = central + _LARGE_END.pack(
        b"PK\6\6", _LARGE_END.size - 12, _VERSION, _VERSION, 0, 0, 4, 4, len(central), start
    )
    tail += _LARGE_LOCATOR.pack(b"PK\6\7", 0, end, 1)
    tail += _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _NOT_HERE, _NOT_HERE, 0)
    return bytes(head), bytes(tail)


class _Part(io.RawIOBase):
    """A part of a file, to be read as if it were all of it."""

    def __init__(self, file: BinaryIO, position: int, length: int) -> None:
        super().__init__()
        self._file, self._position, self._length = file, position, length
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("a position before the beginning")
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._position + self._at)
        read = self._file.readinto(memoryview(buffer)[: max(self._length - self._at, 0)])  # type: ignore[attr-defined]
        self._at += read
        return int(read)


def elements_in(file: BinaryIO, position: int, length: int) -> int:
    """Where in a file the elements of a piece begin, in bytes.

    Args:
        file: Which holds it.
        position: Where the piece begins.
        length: Its bytes.

    Raises:
        zipfile.BadZipFile: It is none.
    """
    # Of what this package writes, the head says it. Otherwise the directory is read: some 200 calls.
    file.seek(position)
    begin = _begin_by_head(file.read(_HEAD))
    return _begin_by_directory(file, position, length) if begin is None else position + begin


def _begin_by_head(head: bytes) -> int | None:
    at = head.find(_DATA) - _LOCAL.size
    if at < 0:
        return None
    signature, _, _, compression, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
    begin = at + _LOCAL.size + int(name_bytes) + int(extra_bytes)
    is_whole = head.startswith(b"PK\3\4") and signature == b"PK\3\4" and len(head) == begin == _HEAD
    return begin if is_whole and compression == zipfile.ZIP_STORED and name_bytes == len(_DATA) else None


def _begin_by_directory(file: BinaryIO, position: int, length: int) -> int:
    with zipfile.ZipFile(io.BufferedReader(_Part(file, position, length))) as archive:
        (info,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
        # Opened, as that compares what is said of it in two places.
        archive.open(info).close()
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("the elements are compressed")
    file.seek(position + info.header_offset)
    header = _LOCAL.unpack(file.read(_LOCAL.size))
    return position + info.header_offset + _LOCAL.size + int(header[-2]) + int(header[-1])
