"""Files and folders that are there whole or not at all, whatever ends the program or the machine.

What is written goes under a temporary name in the same folder, is brought to the disk (fsync), and takes its place by a
rename; the rename is brought to the disk, too. Until then, what had the name before is there as it was.
"""

import ctypes
import errno
import functools
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".saving-"
"""What temporary names begin with. Lightning looks for checkpoints by their names: none may be in these."""

_TEMPORARY = re.compile(re.escape(PREFIX) + r".+-\d+-[0-9a-f]{12}")
_SECONDS_UNTIL_LEFT_BEHIND = 3600.0
_SECONDS_AFTER_ITS_PROCESS = 600.0
_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2


def temporary_name(folder: Path) -> Path:
    """A path in ``folder`` that no other process and no other call uses."""
    return folder / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@contextmanager
def written_durably(path: Path) -> Iterator[Path]:
    """Gives the path to write a file to, which takes the name ``path`` when it is whole. Not collective.

    Args:
        path: What is there is replaced; its folder is made.

    Raises:
        OSError: It could not be written; what was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_behind(path.parent)
    temporary = temporary_name(path.parent)
    try:
        yield temporary
        sync(temporary)
        put_in_place(temporary, path)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError):
            reason = f"{error.strerror} (while it was being written; what was there before is as it was)"
            raise OSError(error.errno, reason, str(path)) from error
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file or folder its name, in the place of what has it, and removes that afterwards.

    A file replaces a file in one step. Folders change places in one step where the file system can do that (ext4, xfs,
    btrfs, tmpfs and others); elsewhere a crash between two renames leaves what had the name under another that begins
    alike, so that who looks for ``last*.ckpt`` finds it; :func:`recover` brings it back.

    Raises:
        IsADirectoryError: There is a folder with other things than a checkpoint in it.
    """
    check_may_be_replaced(path)
    is_replaced_by_rename = not path.exists() or path.is_symlink() or not (path.is_dir() or temporary.is_dir())
    if is_replaced_by_rename and not (path.is_symlink() and temporary.is_dir()):
        os.replace(temporary, path)
        sync(path.parent)
        return
    if _exchange(temporary, path):
        sync(path.parent)
        remove(temporary)
        return
    replaced = _replaced_name(path)
    check_may_be_replaced(replaced)
    remove(replaced)
    os.rename(path, replaced)
    os.rename(temporary, path)
    sync(path.parent)
    remove(replaced)


def check_may_be_replaced(path: Path) -> None:
    """Refuses to replace a folder in which somebody keeps something else.

    Raises:
        IsADirectoryError: There is one.
    """
    if not path.is_dir() or path.is_symlink():
        return
    others = sorted(entry.name for entry in path.iterdir() if not _is_of_checkpoint(entry.name))
    if others:
        raise IsADirectoryError(
            errno.EISDIR,
            f"a folder that holds more than a checkpoint ({', '.join(others[:3])}) is not replaced",
            str(path),
        )


def recover(path: Path) -> None:
    """Brings back what had the name ``path`` where a crash came between two renames of :func:`put_in_place`."""
    replaced = _replaced_name(path)
    if not os.path.lexists(path) and os.path.lexists(replaced):
        try:
            os.rename(replaced, path)
        except OSError:
            # Another rank was first.
            if not os.path.lexists(path):
                raise


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def remove_atomically(path: Path) -> None:
    """Removes a file or a folder so that it is there whole until it is not there at all."""
    if path.is_dir() and not path.is_symlink():
        temporary = temporary_name(path.parent)
        put_in_place(path, temporary)
        path = temporary
    remove(path)


def remove_left_behind(folder: Path) -> None:
    """Removes what programs that ended while they were writing have left here, as far as that is sure.

    Other jobs may be writing to the same folder, from other machines. Theirs change all the time: what has not changed
    for an hour is nobody's; what a process of this machine was writing that is gone, is so after ten minutes.
    """
    own = f"{PREFIX}{socket.gethostname()}-"
    for path in (one for one in folder.glob(f"{PREFIX}*") if _TEMPORARY.fullmatch(one.name)):
        try:
            seconds = time.time() - _last_change(path)
            process = path.name.removeprefix(own).split("-")[0] if path.name.startswith(own) else ""
            is_gone = process.isdigit() and not Path(f"/proc/{process}").exists()
            if seconds > (_SECONDS_AFTER_ITS_PROCESS if is_gone else _SECONDS_UNTIL_LEFT_BEHIND):
                remove(path)
        except OSError:
            # Somebody else was faster, or may do what we may not.
            continue


def sync(path: Path) -> None:
    """Returns when what was written to a file, or which names a folder holds, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not let folders be synchronised.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _is_of_checkpoint(name: str) -> bool:
    return name.endswith(".distcp") or name.startswith(".metadata") or name == "checkpoint.pt"


def _last_change(path: Path) -> float:
    times = [path.lstat().st_mtime]
    if path.is_dir() and not path.is_symlink():
        times += [entry.lstat().st_mtime for entry in path.iterdir()]
    return max(times)


def _replaced_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-replaced{path.suffix}")


def _exchange(one: Path, other: Path) -> bool:
    """Lets two paths change places in one step; whether the system could do that. Linux, renameat2(2)."""
    rename = _renameat2()
    if rename is None:
        return False
    arguments = (_AT_WORKING_DIRECTORY, os.fsencode(one), _AT_WORKING_DIRECTORY, os.fsencode(other), _EXCHANGE)
    if rename(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function
