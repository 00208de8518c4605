"""A file system that falls silent: every look at what is below its mount point hangs until the mount ends.

It is a real one, of the kernel's FUSE, whose server never answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def silent(folder: Path) -> Iterator[None]:
    """Have all that is below `folder` hang for the time of a ``with`` block. All of it comes back with its end."""
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if _libc.mount(b"silent", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "cannot mount", str(folder))
        yield
    finally:
        _libc.umount2(os.fsencode(folder), _MNT_DETACH)
        os.close(server)  # calls that hang end with an error


def can_fall_silent(folder: Path) -> bool:
    """Whether this process may mount such a file system."""
    try:
        with silent(folder):
            return True
    except OSError:
        return False
