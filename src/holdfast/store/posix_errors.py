"""Errors of the operating system about files, turned into errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import CorruptError, HoldfastError, NotFoundError, StorageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR})
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ECONNRESET,
    }
)
#: The operations that only read.
_READS = frozenset({"read", "open", "list", "look at"})
#: Most inodes that the creation of an object takes: its file, and on some file systems its second name.
_NUM_INODES = 2


@contextmanager
def reported(operation: str, path: str, *, nbytes: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StorageError`. `nbytes` is the space that the operation needs."""
    try:
        yield
    except OSError as error:
        raise _storage_error(operation, path, error, nbytes) from error


def _storage_error(operation: str, path: str, error: OSError, nbytes: int | None) -> HoldfastError:
    code, action = "storage.failed", "Repair the cause that the system reports, then try again."
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        code, action = "storage.full", "Free space, raise the quota, or save to another place."
        reason += _space(os.path.dirname(path), nbytes)
    elif error.errno in _DENIED:
        code, action = "storage.denied", "Give this user write access, or use another place."
        if error.errno == errno.EROFS:
            action = "Mount it for writing (the kernel log, dmesg, says why it is not), or use another place."
        elif operation in _READS:
            action = "Ask its owner for access: a run is private unless its folder has a wider mode (chmod)."
    elif error.errno in _VANISHED:
        obstacle = in_the_way(path)
        if obstacle is not None:
            code, reason = "storage.not_a_folder", obstacle
            action = "Name another folder, or remove that file or link."
        else:
            code = "storage.vanished"
            reason = (
                "its folder, or the temporary file in it, was removed during the operation, or its file system takes "
                "no new files, as /proc"
            )
            action = "Name another place, or find out who removed it or unmounted its file system; then try again."
    elif error.errno == errno.EIO:
        code, action = "storage.io", "Look for device errors in the kernel log (dmesg), then use another copy or disk."
    elif error.errno in _TRANSIENT:
        code, action = "storage.unavailable", "Try again; if the error persists, check the file server and the mount."
    return StorageError(
        f"cannot {operation} {path}: {reason}.",
        code=code,
        action=action,
        path=path,
        retryable=error.errno in _TRANSIENT,
    )


def _space(folder: str, nbytes: int | None) -> str:
    """A clause for a message about the space on a full disk; empty where the space is not known."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return ""
    free = space.f_bavail * space.f_frsize
    if space.f_files and space.f_favail < _NUM_INODES:
        return f" (no more files can be created; {free:,} bytes free)"
    if nbytes is None or nbytes <= free:
        # The cause is a quota, or others took the space and gave it back: the free space does not explain the error.
        return f" ({free:,} bytes free)"
    return f" ({nbytes:,} bytes needed, {free:,} bytes free: {nbytes - free:,} bytes are missing)"


def check_creatable(path: str) -> None:
    """Raise the `StorageError` that the creation of `path` would end in, as far as the system tells without it: a file
    or a dangling link stands in place of a folder, or this user may not write to the nearest folder that exists."""
    folder = next(each for each in Path(path).parents if os.path.lexists(each))
    with reported("create", path):
        if in_the_way(str(folder)) is not None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def in_the_way(path: str) -> str | None:
    """A clause that names the obstacle in place of a folder, at `path` or above it: a file or a dangling link.

    None where there is no obstacle.
    """
    for each in (Path(path), *Path(path).parents):
        if each.is_symlink() and not each.exists():
            return f"'{each}' is a link to '{each.readlink()}', which does not exist"
        if each.exists():
            return None if each.is_dir() else f"'{each}' is a file, not a folder"
    return None


def exists(path: str) -> StorageError:
    """The error for an object that would replace another."""
    return StorageError(
        f"cannot publish {path}: it exists already.",
        code="storage.exists",
        action="Objects are never replaced: use the one that is there or another name.",
        path=path,
    )


def not_found(path: str) -> NotFoundError:
    """The error for a path without a regular file."""
    other = (
        " (the path exists, but is not a file: it is a folder, a broken link, a pipe or a device)"
        if os.path.lexists(path)
        else ""
    )
    return NotFoundError(
        f"there is no file {path}{other}.",
        code="not_found.object",
        action="Check the path, and whether the run was copied completely.",
        path=path,
    )


def short(path: str, *, start: int, wanted: int, found: int) -> CorruptError:
    """The error for a file that ends too early."""
    return CorruptError(
        f"{path} is too short: {wanted:,} bytes should follow offset {start:,}, but {found:,} are there.",
        code="corrupt.short",
        action="Use another copy or an older checkpoint.",
        path=path,
    )


def long(path: str, *, limit: int, found: int) -> CorruptError:
    """The error for a file that is larger than its content can be."""
    return CorruptError(
        f"{path} is too long: it has {found:,} bytes, but may have at most {limit:,}.",
        code="corrupt.size",
        action="Use another copy or an older checkpoint.",
        path=path,
    )


def unfenced(path: str) -> StorageError:
    """The error for a file system that cannot create without replacing."""
    return StorageError(
        f"cannot create {path}: its file system has neither hard links nor a rename that never replaces, so one "
        "writer could replace the file of another.",
        code="storage.unfenced",
        action="Use a file system that has one of them.",
        path=path,
    )
