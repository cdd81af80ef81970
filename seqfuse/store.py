"""Files of data that are kept for a user: private, read with suspicion, replaced whole, never in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 16 << 20
LOCK_SECONDS = 10.0


class Corrupt(ValueError):
    """A file that does not hold what it should."""


def user_folder(name: str, *, create: bool) -> Path | None:
    """The folder `name` in the user's cache of this library; `None` where it is not there and is not to be made.

    Raises:
        OSError: if it cannot be made, others could have written to it, or nothing knows where it would be.
    """
    try:
        import platformdirs
    except ImportError as error:  # a copy of the sources, where nothing was installed
        raise OSError(str(error)) from None

    top = platformdirs.user_cache_path("seqfuse")
    if not top.is_absolute():
        raise OSError(f"{top} is no absolute path: there is no home directory")
    if create:
        top.parent.mkdir(parents=True, exist_ok=True)
    for folder in (top, top / name):
        if create:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        try:
            about = os.lstat(folder)
        except FileNotFoundError:
            if create:
                raise
            return None
        if not stat.S_ISDIR(about.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "no folder"
            raise PermissionError(f"{folder} is {what}")
        if hasattr(os, "getuid") and about.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others may write to {folder}")
    return top / name


def read(path: Path) -> tuple[bytes, int] | None:
    """What a file holds, and its inode; `None` where there is none.

    Raises:
        OSError: if it cannot be read, is a symbolic link, or is no regular file.
        Corrupt: if it is too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError("it is a symbolic link") from error
        raise
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        if about.st_size > MOST_BYTES:
            raise Corrupt(f"it has {about.st_size} bytes, more than {MOST_BYTES}")
        return file.read(MOST_BYTES), about.st_ino


def update(path: Path, change: Callable[[], bytes], *, own: bool = True) -> None:
    """Replace a file by what `change()` returns, which no other process changes meanwhile.

    Two more files stand beside it, to lock it and to write it. In a folder that is not of this library's `own` their
    names are such that no file of the user's is taken for them: `poetry.lock` is none of `poetry`.

    Raises:
        OSError: if it cannot be locked or written; what was there stays.
    """
    from filelock import FileLock

    beside = path.name if own else f"{path.name}.seqfuse"
    try:
        with FileLock(path.with_name(f"{beside}.lock"), timeout=LOCK_SECONDS, mode=0o600):
            data = change()
            new = path.with_name(f"{beside}.new")  # the one of a writer that was killed is written over
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            try:
                with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(new, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(new)
                raise
    except NotImplementedError as error:  # a file system without locks
        raise OSError(str(error)) from error


def quarantine(path: Path, inode: int | None) -> None:
    """Rename a corrupt file of this library's own to `*.bad`, unless another process has replaced it meanwhile.

    Raises:
        OSError: if it cannot be renamed.
    """
    if inode is None or os.lstat(path).st_ino == inode:
        os.replace(path, path.with_name(f"{path.name}.bad"))
