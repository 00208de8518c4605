"""Which ranks have a trainer on this node: each trainer has a byte of one file locked, shared, as long as it lives.

A claim says whose memory it is, and so what is nobody's. It is not what keeps two processes from changing a slot (see
`holdfast.node_memory.slots`). It also keeps the folder: whoever removes the folder of a run that has ended locks all
bytes for itself first, so a claim holds only on a file that still has its name.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import Final, Self

from holdfast.errors import ConfigurationError
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder

_NAME: Final = "trainers.lock"
#: Whoever removes a folder has it locked for microseconds.
_TURN_S: Final = 0.001
_TIMEOUT_S: Final = 30.0


class Claim:
    """Says that this process has the slots of `rank` (None: of all ranks) in `folder`, until it is closed or this
    process ends. The folder is made anew where it was removed, and is not removed as long as the claim lasts.

    Takes no memory beside a file's name. Several processes may have a claim to the same rank.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: NodeFolder, rank: int | None = None) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            fd = folder.open_or_create(_NAME)
            if file_locks.try_lock(fd, *_bytes_of(rank), shared=True) and os.fstat(fd).st_nlink:
                self._fd = fd
                return
            file_locks.close(fd)
            time.sleep(_TURN_S)
        raise BlockingIOError(errno.EAGAIN, "a process that stands still is about to remove its folder")

    def close(self) -> None:
        """End the claim."""
        if self._fd >= 0:
            file_locks.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_claimed(folder: NodeFolder, rank: int | None = None) -> bool:
    """Whether a living process has the slots of `rank` (None: of any). True where nobody can tell, because somebody has
    put something else in the place of the file."""
    try:
        fd = folder.open(_NAME)
    except FileNotFoundError:
        return False
    except ConfigurationError:
        return True
    try:
        return file_locks.is_locked(fd, *_bytes_of(rank))
    finally:
        os.close(fd)


def remove_claims(folder: NodeFolder) -> bool:
    """Remove the file of the claims, so that a claim that comes from now on finds that the folder is to be made anew.
    Whether nobody has a claim; else nothing is removed."""
    with suppress(FileNotFoundError):
        fd = folder.open(_NAME)
        try:
            if not file_locks.try_lock(fd, *_bytes_of(None)):
                return False
            folder.remove(_NAME)
        finally:
            file_locks.close(fd)
    return True


def _bytes_of(rank: int | None) -> tuple[int, int]:
    """The bytes that stand for a rank: where they begin, and how many; 0 for all that follow."""
    return (0, 0) if rank is None else (rank, 1)
