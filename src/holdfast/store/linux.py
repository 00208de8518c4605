"""System calls of Linux that Python lacks: space reservation, a rename that never replaces, direct I/O, huge pages."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import Final

ALIGNMENT: Final = 4096

_C_LIBRARY = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_RENAME_NOREPLACE = 1
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MADV_COLLAPSE = 25
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
#: Fields of ``struct statx``: the mask of filled fields, and the alignment of direct I/O in memory and in the file.
_STATX_DIRECT = struct.Struct("=I148x2I")

_STATFS_NBYTES = 256
#: A field of ``struct statfs``: the kind of file system.
_STATFS_TYPE = struct.Struct("@l")
_TMPFS = 0x01021994
#: File systems on a disk that only one machine mounts: ext2 to ext4, xfs, btrfs, overlayfs, zfs, f2fs.
_ON_DISK = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x794C7630, 0x2FC12FC1, 0xF2F52010})
#: File systems that only one machine mounts.
_LOCAL = _ON_DISK | {_TMPFS}

_Argument = int | bytes | ctypes.c_int64 | ctypes.c_size_t | ctypes.c_void_p | ctypes.Array[ctypes.c_char]


def _call(name: str, *arguments: _Argument) -> int:
    """Call a function of the C library. Returns 0 or the error number."""
    function = getattr(_C_LIBRARY, name, None)
    if function is None:
        return errno.ENOSYS
    return ctypes.get_errno() if function(*arguments) else 0


def rename_without_replace(source: str, target: str) -> bool:
    """Rename `source` to `target` atomically. Returns False where `target` exists.

    Raises `OSError` for other failures, such as a file system without this kind of rename.
    """
    names = os.fsencode(source), os.fsencode(target)
    failed = _call("renameat2", _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE)
    if failed in (0, errno.EEXIST):
        return failed == 0
    raise OSError(failed, os.strerror(failed))


def reserve(descriptor: int, nbytes: int) -> None:
    """Reserve `nbytes` of space for a file, where the file system can; else only compare with the free space.

    (``posix_fallocate`` would write to every block where the file system cannot.)
    """
    failed = errno.EINTR if nbytes else 0
    while failed == errno.EINTR:
        failed = _call("fallocate", descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if failed in (errno.EOPNOTSUPP, errno.ENOSYS):
        space = os.fstatvfs(descriptor)
        # `f_bfree` has the blocks that only root may use; a file system that does not know its size has no blocks.
        failed = errno.ENOSPC if space.f_blocks and nbytes > space.f_bfree * space.f_frsize else 0
    if failed:
        raise OSError(failed, os.strerror(failed))


def is_local(descriptor: int) -> bool:
    """Whether only this machine can open the file, so that all processes with it open see each other's locks."""
    return _file_system(descriptor) in _LOCAL


def is_on_disk(descriptor: int) -> bool:
    """Whether the file is in a file system that is known to lie on a disk of this machine."""
    return _file_system(descriptor) in _ON_DISK


def _file_system(descriptor: int) -> int | None:
    """The number of the kind of file system that has the file; None where the system does not say."""
    status = ctypes.create_string_buffer(_STATFS_NBYTES)
    failed = _call("fstatfs", descriptor, status)
    kind: int = _STATFS_TYPE.unpack_from(status)[0]
    return None if failed else kind


def map_file(
    descriptor: int, nbytes: int, *, start: int = 0, protection: int, flags: int, address: int | None = None
) -> int:
    """Map `nbytes` of a file from `start` on into memory, and return the address.

    With `address` the mapping is made there and replaces the one that exists. (A mapping of Python's `mmap` keeps a
    descriptor open, and cannot choose its address.)
    """
    call = _C_LIBRARY.mmap
    call.restype = ctypes.c_void_p
    if address is not None:
        flags |= _MAP_FIXED
    where, length = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    found: int | None = call(where, length, protection, flags, descriptor, ctypes.c_long(start))
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory that `map_file` mapped."""
    _call("munmap", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def collapse_pages(address: int, nbytes: int) -> None:
    """Turn the memory at `address` into huge pages, where the system can. Touch some of each before."""
    _call("madvise", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_COLLAPSE)


def keep_private(address: int, nbytes: int) -> None:
    """Keep the memory at `address` out of core dumps, and out of the children of this process."""
    for advice in (_MADV_DONTDUMP, _MADV_DONTFORK):
        _call("madvise", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def open_direct(path: str, access: int) -> int | None:
    """Open `path` for direct I/O in blocks of 4096 bytes. Returns None where the file system does not support it."""
    flag: int | None = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(path, access | flag | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    status = ctypes.create_string_buffer(_STATX_NBYTES)
    if _call("statx", descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status) == 0:
        mask, in_memory, in_file = _STATX_DIRECT.unpack_from(status)
        if mask & _STATX_DIOALIGN and not 0 < max(in_memory, in_file) <= ALIGNMENT:
            os.close(descriptor)
            return None
    # Where the kernel does not say, the first transfer shows whether direct I/O works.
    return descriptor


def read_no_more(descriptor: int) -> None:
    """Have reads of a file bring into the page cache what they ask for, and nothing behind it."""
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
