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
#: The byte of the processes that only look at the slots of all ranks, behind those of all ranks.
_LOOKERS: Final = 1 << 40
#: Pause between attempts: a process that removes a folder holds the lock for microseconds.
_TURN_S: Final = 0.001
_TIMEOUT_S: Final = 30.0


class Claim:
    """The claim of this process to the slots of `rank` in `folder`, which it fills (None: to those of all ranks, which
    it only reads), until it is closed or this process ends. The folder is created again if it was removed, and cannot
    be removed as long as the claim lasts.

    Takes no memory except for a file name. Several processes may have a claim to the same rank.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: NodeFolder, rank: int | None = None) -> None:
        start, end = _LOOKERS if rank is None else rank, time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            fd = folder.open_or_create(_NAME)
            try:
                if file_locks.try_lock(fd, start, 1, shared=True) and os.fstat(fd).st_nlink:
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
    """Whether a living process has a claim to the slots of `rank` (None: of any rank), also one that only reads them.
    True where that is unknown, because something else lies in the place of the file, or it cannot be opened now."""
    if rank is None:
        return _is_locked(folder, 0, 0)
    return _is_locked(folder, rank, 1) or _is_locked(folder, _LOOKERS, 1)


def has_trainer(folder: NodeFolder, rank: int) -> bool:
    """Whether a living process has a claim to the slots of `rank`, which it fills. True where that is unknown."""
    return _is_locked(folder, rank, 1)


def _is_locked(folder: NodeFolder, start: int, nbytes: int) -> bool:
    """Whether a living process has locked any of these bytes (0: all that follow)."""
    try:
        fd = folder.open(_NAME)
    except FileNotFoundError:
        return False
    except (ConfigurationError, StorageError):
        return True
    try:
        return file_locks.is_locked(fd, start, nbytes)
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
        return file_locks.try_lock(fd, 0, 0) and folder.discard(_NAME)
    finally:
        file_locks.close(fd)
