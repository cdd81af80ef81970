"""Data files in the user's cache: private, checked when read, replaced atomically; failures are not fatal."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

MOST_BYTES = 16 << 20


def user_folder(name: str, *, create: bool) -> Path | None:
    """The folder `name` in the user's cache of this library; `None` if it does not exist and `create` is false.

    Raises:
        OSError: if it cannot be created, others could have written to it, or the user's cache is unknown.
    """
    try:
        import platformdirs
    except ImportError as error:  # a copy of the sources without an installation
        raise OSError(str(error)) from None

    top = platformdirs.user_cache_path("seqfuse")
    if not top.is_absolute():
        raise OSError(f"{top} is not an absolute path: there is no home directory")
    for folder in (top, top / name):
        if create:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=True)
        try:
            about = os.lstat(folder)
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(about.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "no folder"
            raise PermissionError(f"{folder} is {what}")
        if hasattr(os, "getuid") and about.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others may write to {folder}")
    return top / name


def read(path: Path) -> bytes | None:
    """The content of a file; `None` if it does not exist.

    Raises:
        OSError: if it cannot be read, is a symbolic link, or is not a regular file.
        ValueError: if it is too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError("it is a symbolic link") if error.errno == errno.ELOOP else error from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if about.st_size > MOST_BYTES:
            raise ValueError(f"it has {about.st_size} bytes, more than {MOST_BYTES}")
        return file.read(MOST_BYTES)


def write(path: Path, data: bytes) -> None:
    """Replaces a file atomically.

    Raises:
        OSError: if it cannot be written; the old file stays.
    """
    descriptor, new = tempfile.mkstemp(".new", f"{path.name}.", path.parent)  # a unique name
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
