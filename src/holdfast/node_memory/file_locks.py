"""Locks on bytes of files in a node folder: how one process of a node knows that another one lives.

The kernel drops such a lock when the process that holds it ends, however it ends. The number of a process would say
less: it comes again, and means nothing, or another process, in another PID namespace (a sidecar). These are locks of
open file descriptions: they exclude each other also within a process, and they hold between all processes that mount
the same file system, whatever namespaces these are in.

An open file description is shared with forked children, which would keep the lock after the death of their parent. So
a child that Python forks gives up what it inherited, unless the lock was taken to be `inherited`. (Programs that are
executed inherit nothing: descriptors are close-on-exec.)
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

#: ``struct flock``: type, from where, start, length, process.
_FLOCK: Final = struct.Struct("hhqqi4x")
#: Descriptors with locks that forked children give up.
_private: Final[set[int]] = set()


def try_lock(fd: int, start: int = 0, nbytes: int = 1, *, shared: bool = False, inherited: bool = False) -> bool:
    """Lock `nbytes` from `start` on (0: all that follow) of the file `fd`, if nobody else has: nobody at all, or, where
    the lock is `shared`, nobody alone. Whether that worked. Does not block.

    It holds until `unlock`, until `close`, or until this process ends.
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
    """Whether anybody else has locked any of these bytes. Asks without taking them, which could keep others away."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, nbytes))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def unlock(fd: int) -> None:
    """Let go of all locks on the file `fd`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    _private.discard(fd)


def close(fd: int) -> None:
    """Close `fd`, and let go of its locks."""
    _private.discard(fd)
    os.close(fd)


def _flock(kind: int, start: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, nbytes, 0)


def _give_up_in_child() -> None:
    """Have a forked child refer to no lock of its parent. The numbers stay taken, since objects refer to them."""
    if not _private:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _private:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _private.clear()


os.register_at_fork(after_in_child=_give_up_in_child)
