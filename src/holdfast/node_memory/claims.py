"""The claims of trainers to their ranks' slots: each trainer locks a byte of one file, shared, as long as it lives.

Claims tell which slots belong to a living trainer, and so which belong to none. They do not keep two processes from
changing a slot; the slot's own lock does (see `holdfast.node_memory.slots`). A claim also keeps the folder from being
removed: a process that removes the folder of a run that has ended locks all bytes for itself first. So a claim is valid
only on a file that still has its name.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Final, Self

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder

_NAME: Final = "trainers.lock"
#: Pause between attempts: a process that removes a folder holds the lock for microseconds.
_TURN_S: Final = 0.001
_TIMEOUT_S: Final = 30.0


class Claim:
    """The claim of this process to the slots of `rank` (None: of all ranks) in `folder`, until it is closed or this
    process ends. The folder is created again if it was removed, and cannot be removed as long as the claim lasts.

    Takes no memory except for a file name. Several processes may have a claim to the same rank.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: NodeFolder, rank: int | None = None) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            fd = folder.open_or_create(_NAME)
            try:
                if file_locks.try_lock(fd, *_bytes_of(rank), shared=True) and os.fstat(fd).st_nlink:
                    self._fd = fd
                    return
            except BaseException:
                file_locks.close(fd)
                raise
            file_locks.close(fd)
            time.sleep(_TURN_S)
        raise BlockingIOError(errno.EAGAIN, "a stopped process holds the lock with which it is removing the folder")

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
    """Whether a living process has a claim to the slots of `rank` (None: of any rank). True where that is unknown,
    because something else lies in the place of the file, or it cannot be opened now."""
    try:
        fd = folder.open(_NAME)
    except FileNotFoundError:
        return False
    except (ConfigurationError, StorageError):
        return True
    try:
        return file_locks.is_locked(fd, *_bytes_of(rank))
    finally:
        os.close(fd)


def remove_claims(folder: NodeFolder) -> bool:
    """Remove the file of the claims, if no process has a claim; so a process that claims from now on creates the file
    and the folder again. Returns False, and removes nothing, where a process has a claim, or that is unknown."""
    try:
        fd = folder.open(_NAME)
    except FileNotFoundError:
        return True
    except (ConfigurationError, StorageError):
        return False
    try:
        return file_locks.try_lock(fd, *_bytes_of(None)) and folder.discard(_NAME)
    finally:
        file_locks.close(fd)


def _bytes_of(rank: int | None) -> tuple[int, int]:
    """The bytes that stand for a rank: their start and their number, where 0 means all that follow."""
    return (0, 0) if rank is None else (rank, 1)
