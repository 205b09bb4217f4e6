"""Files and folders that are complete or absent, even if the program or the machine ends.

A file is written under a temporary name in the same folder, and synced to the disk (fsync). Then it is renamed, and the
rename is synced, too. Until then, the earlier file of that name is unchanged.
"""

import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".saving-"
"""Prefix of temporary names. Lightning finds checkpoints by patterns of names. None of these may match the prefix."""

_TEMPORARY = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
_BEING_REPLACED = "-being-replaced-by-parstrat"
_BY_ANOTHER_JOB = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)
_TRIES = 100
_SECONDS_UNTIL_LEFT_BEHIND = 3600.0


def temporary_name(folder: Path) -> Path:
    """A path in ``folder`` that no other process and no other call uses."""
    return folder / f"{PREFIX}{uuid.uuid4().hex}"


def temporary_for(path: Path) -> Path:
    """The path to write to before :func:`put_in_place`. A missing folder is created.

    Raises:
        OSError: ``path`` is there and must not be replaced, see :func:`check_may_be_replaced`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The rename checks it again. This check comes before gigabytes are written for nothing.
    check_may_be_replaced(path)
    remove_left_behind(path.parent)
    return temporary_name(path.parent)


@contextmanager
def written_durably(path: Path) -> Iterator[Path]:
    """Yields the path to write a file to. The complete file gets the name ``path``. Not collective.

    Args:
        path: An existing file is replaced. A missing folder is created.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
    """
    temporary = temporary_for(path)
    try:
        yield temporary
        sync(temporary)
        put_in_place(temporary, path)
    except BaseException as error:
        clean_up(temporary)
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

    A file replaces a file in one step. If one of them is a folder, there are two renames. A crash between them leaves
    the old one under a name with the same beginning. A search for ``last*.ckpt`` finds it, and :func:`recover` restores
    it.

    Raises:
        IsADirectoryError: The name belongs to a folder that contains other files than a checkpoint's.
        FileExistsError: The name belongs to a device, or the like.
        OSError: It could not be renamed. The earlier file or folder still has its name.
    """
    check_may_be_replaced(path)
    replaced = _replaced_name(path)
    for tries_left in reversed(range(_TRIES)):
        try:
            # rename(2) puts a file over a file or a link, but a folder over neither.
            if os.path.lexists(path) and (temporary.is_dir() or (path.is_dir() and not path.is_symlink())):
                # Between the two renames no file has the name, so the old one stays until after them.
                remove_atomically(replaced)
                os.rename(path, replaced)
            os.replace(temporary, path)
            break
        except OSError as error:
            with suppress(FileNotFoundError):
                recover(path)
            # Another job has restored the old one in between, because it reads it. Or it saves under the same name.
            if error.errno not in _BY_ANOTHER_JOB or not tries_left or not os.path.lexists(temporary):
                raise
    # The folder is synced as well: it holds the name, and a crash could restore the old one.
    sync(path.parent)
    # Also what an earlier crash has left. If it stayed, the new one, once removed, would be taken for missing.
    if os.path.lexists(replaced):
        remove_atomically(replaced)


def check_may_be_replaced(path: Path) -> None:
    """Raises an error if a path must not be replaced, as it is no checkpoint's folder and no file.

    Raises:
        IsADirectoryError: ``path`` is a folder that contains other files than a checkpoint's.
        FileExistsError: ``path`` is a device, or the like.
    """
    try:
        # Read once: another job may remove or replace it meanwhile.
        kind = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        # Otherwise root's save to /dev/null would leave a file there, for the whole machine.
        raise FileExistsError(errno.EEXIST, "what is neither a file nor a folder is not replaced", str(path))
    names: list[str] = []
    if stat.S_ISDIR(kind) and not path.is_symlink():
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(path)
    others = sorted(
        name
        for name in names
        if not (name.endswith(".distcp") or name.startswith(".metadata") or name == "checkpoint.pt")
    )
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


def identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from others that have had its name. None if it is gone."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def clean_up(temporary: Path) -> None:
    """Removes what an error has left, if the disk allows it. The error is what counts."""
    with suppress(OSError):
        remove(temporary)


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
    """Removes the files of programs that ended while writing here: those that have not changed for an hour.

    Other jobs may be writing to the same folder. Their files change all the time.
    """
    for path in (one for one in folder.glob(f"{PREFIX}*") if _TEMPORARY.fullmatch(one.name)):
        try:
            inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
            last_change = max(one.lstat().st_mtime for one in (path, *inside))
            if time.time() - last_change > _SECONDS_UNTIL_LEFT_BEHIND:
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


def _replaced_name(path: Path) -> Path:
    # Nobody else uses the name: what has it is removed.
    return path.with_name(f"{path.stem}{_BEING_REPLACED}{path.suffix}")
