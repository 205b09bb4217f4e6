"""Files and folders that are complete or absent, even if the program or the machine ends.

A file is written under a temporary name in the same folder, and synced to the disk (fsync). Then it is renamed, and the
rename is synced, too. Until then, the earlier file of that name is unchanged.
"""

import ctypes
import errno
import functools
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".saving-"
"""Prefix of temporary names. Lightning finds checkpoints by patterns of names. None of these may match the prefix."""

_TEMPORARY = re.compile(re.escape(PREFIX) + r".+-\d+-[0-9a-f]{12}")
_TRIES = 10
_SECONDS_UNTIL_LEFT_BEHIND = 3600.0
# Not at once: a process of another container on this host is not visible here.
_SECONDS_AFTER_ITS_PROCESS = 600.0
# AT_FDCWD and RENAME_EXCHANGE of Linux' headers. Python has neither the constants nor the call.
_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2


def temporary_name(folder: Path) -> Path:
    """A path in ``folder`` that no other process and no other call uses."""
    # Host and process, so that `remove_left_behind` can tell whether the writer is still running.
    return folder / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@contextmanager
def written_durably(path: Path) -> Iterator[Path]:
    """Yields the path to write a file to. The complete file gets the name ``path``. Not collective.

    Args:
        path: An existing file is replaced. A missing folder is created.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
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
            reason = f"{error.strerror} (while it was being written; an earlier file of that name is unchanged)"
            raise OSError(error.errno, reason, str(path)) from error
        raise


@contextmanager
def with_errors_of_the_disk() -> Iterator[None]:
    """Within it, if ``torch.save`` cannot write, the error is that of the disk: for example, the disk is full."""
    try:
        yield
    except RuntimeError as error:
        # torch's error for its zip file is an "unexpected pos".
        if isinstance(error.__context__, OSError) and "inline_container" in str(error):
            raise error.__context__ from None
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file or folder its final name, and removes the earlier file or folder of that name.

    A file replaces a file in one step. If the file system can exchange folders in one step, it does so (ext4, xfs,
    btrfs, tmpfs and others). On other file systems, there are two renames. A crash between them leaves the old folder
    under a name with the same beginning. A search for ``last*.ckpt`` finds it, and :func:`recover` restores it.

    Raises:
        IsADirectoryError: The name belongs to a folder that contains other files than a checkpoint's.
        FileExistsError: The name belongs to a device, or the like.
    """
    tries_left = _TRIES
    while True:
        try:
            _put_in_place(temporary, path)
            return
        except OSError as error:
            # Another job has given the name to another file, or removed it, since the check.
            tries_left -= 1
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not temporary.exists() or not tries_left:
                raise


def _put_in_place(temporary: Path, path: Path) -> None:
    check_may_be_replaced(path)
    # rename(2) puts a file over a file or a link, but a folder only over an empty folder.
    is_replaced_by_rename = not path.exists() or path.is_symlink() or not (path.is_dir() or temporary.is_dir())
    if is_replaced_by_rename and not (path.is_symlink() and temporary.is_dir()):
        # The folder is synced as well: it holds the name, and a crash could restore the old one.
        os.replace(temporary, path)
        sync(path.parent)
        return
    if _exchange(temporary, path):
        sync(path.parent)
        remove(temporary)
        return
    replaced = _replaced_name(path)
    # Without the exchange: between the two renames no file has the name, so the old folder stays until after them.
    check_may_be_replaced(replaced)
    remove(replaced)
    os.rename(path, replaced)
    os.rename(temporary, path)
    sync(path.parent)
    remove(replaced)


def check_may_be_replaced(path: Path) -> None:
    """Raises an error if a path must not be replaced, as it is no checkpoint's folder and no file.

    Raises:
        IsADirectoryError: ``path`` is a folder that contains other files than a checkpoint's.
        FileExistsError: ``path`` is a device, or the like.
    """
    try:
        # Read once: another job may remove it meanwhile.
        kind = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        # Otherwise root's save to /dev/null would leave a file there, for the whole machine.
        raise FileExistsError(errno.EEXIST, "what is neither a file nor a folder is not replaced", str(path))
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
    """Restores the name ``path`` after a crash between the two renames of :func:`put_in_place`."""
    replaced = _replaced_name(path)
    if not os.path.lexists(path) and os.path.lexists(replaced):
        try:
            os.rename(replaced, path)
        except OSError:
            # Another rank was faster.
            if not os.path.lexists(path):
                raise


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def remove_atomically(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists. It is complete until it is removed."""
    # Removing a folder takes many steps. Under its own name, a crash would leave half a checkpoint.
    temporary = temporary_name(path.parent)
    try:
        os.rename(path, temporary)
    except FileNotFoundError:
        return
    if temporary.is_dir():
        sync(path.parent)
    remove(temporary)


def remove_left_behind(folder: Path) -> None:
    """Removes the files of programs that ended while writing here, if that is certain.

    Other jobs may be writing to the same folder, from other machines. Their files change all the time. A file is taken
    to be abandoned after an hour without a change. If its process was on this machine and has ended, ten minutes
    suffice.
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
            # Another process was faster, or the file is another user's.
            continue


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _is_of_checkpoint(name: str) -> bool:
    return name.endswith(".distcp") or name.startswith(".metadata")


def _last_change(path: Path) -> float:
    times = [path.lstat().st_mtime]
    if path.is_dir() and not path.is_symlink():
        times += [entry.lstat().st_mtime for entry in path.iterdir()]
    return max(times)


def _replaced_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-replaced{path.suffix}")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two paths in one step, by renameat2(2) of Linux. If the system cannot, returns False."""
    rename = _renameat2()
    if rename is None:
        return False
    arguments = (_AT_WORKING_DIRECTORY, os.fsencode(one), _AT_WORKING_DIRECTORY, os.fsencode(other), _EXCHANGE)
    if rename(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    # The kernel or the file system cannot exchange. Any other error is a real one.
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function
