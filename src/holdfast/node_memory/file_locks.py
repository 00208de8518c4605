"""Locks on bytes of files in a node folder, by which one process of a node knows that another one lives.

The kernel drops such a lock when the process that holds it ends, however it ends. A PID would say less: the system
reuses it, and in another PID namespace (a sidecar) it means no process or another one. These are locks of open file
descriptions: two of them in one process exclude each other too, and they work between all processes that mount the same
file system, whatever their namespaces.

Forked children share their parent's open file descriptions, so they would keep a lock after the parent's death. So a
child that Python forks gives up the locks of its parent, unless the parent took them as `inherited`. (Executed programs
inherit none: descriptors are close-on-exec.)
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

#: ``struct flock``: type, whence, start, length, PID.
_FLOCK: Final = struct.Struct("hhqqi4x")
#: Descriptors with locks that forked children give up.
_private: Final[set[int]] = set()


def try_lock(fd: int, start: int = 0, nbytes: int = 1, *, shared: bool = False, inherited: bool = False) -> bool:
    """Lock `nbytes` (0: all that follow) from `start` on of the file `fd`. A `shared` lock excludes exclusive ones
    only. Returns whether it got the lock; does not block.

    The lock lasts until `unlock`, until `close`, or until this process ends.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, start, nbytes))
    except (BlockingIOError, PermissionError):
        return False
    if not inherited:
        _private.add(fd)
    return True


def is_locked(fd: int, start: int = 0, nbytes: int = 1) -> bool:
    """Whether another open file has a lock on any of these bytes. Only asks, and takes no lock that could keep others
    away."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, nbytes))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def unlock(fd: int) -> None:
    """Release all locks on the file `fd`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    _private.discard(fd)


def close(fd: int) -> None:
    """Close `fd`, and release its locks. A child that was forked a moment ago may still have the open file, and so
    would keep the locks; only an `inherited` one is to."""
    if fd in _private:
        unlock(fd)
    os.close(fd)


def _flock(kind: int, start: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, nbytes, 0)


def _give_up_in_child() -> None:
    """In a forked child, replace the parent's locked files by ``/dev/null``. The descriptors stay open, since objects
    still have their numbers."""
    if not _private:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _private:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _private.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
