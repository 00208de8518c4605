"""The claims of trainers to their ranks' slots: each trainer locks a byte of one file, shared, as long as it lives.

A process that has only reserved memory locks another byte for its rank, until its first save makes it a trainer: it may
be an evaluation, which never saves. Snapshots of trainers that have ended do not wait for it.

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
#: The byte of processes that have reserved memory for rank 0; those for other ranks follow.
_RESERVERS: Final = 1 << 41
#: The byte of the process that alone has the folder for rank 0, among jobs that save in turn; those for others follow.
_TURNS: Final = 1 << 42
#: Pause between attempts: a process that removes a folder holds the lock for microseconds.
_TURN_S: Final = 0.001
_TIMEOUT_S: Final = 30.0


class Claim:
    """The claim of this process to the slots of `rank` in `folder`, which it fills (None: to those of all ranks, which
    it only reads), until it is closed or this process ends. The folder is created again if it was removed, and cannot
    be removed as long as the claim lasts. With `reserves`, the process has only reserved these slots, until `fill`.

    Takes no memory except for a file name. Several processes may have a claim to the same rank.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: NodeFolder, rank: int | None = None, *, reserves: bool = False) -> None:
        self._rank, self._fills = rank, not reserves
        start = _LOOKERS if rank is None else _RESERVERS + rank if reserves else rank
        end = time.monotonic() + _TIMEOUT_S
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

    def fill(self) -> None:
        """Claim the slots that were reserved as a trainer's: this process fills them from now on."""
        if not self._fills:
            # Nobody has locked this byte for itself: that takes all bytes of the file, and this claim has one.
            self._fills = file_locks.try_lock(self._fd, self._rank or 0, 1, shared=True)

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
    """Whether a living process has a claim to the slots of `rank` (None: of any rank), also one that only reads or has
    reserved them. True where that is unknown, because something else lies in the place of the file, or it cannot be
    opened now."""
    if rank is None:
        return _is_locked(folder, 0, 0)
    return any(_is_locked(folder, byte, 1) for byte in (rank, _LOOKERS, _RESERVERS + rank))


def has_trainer(folder: NodeFolder, rank: int) -> bool:
    """Whether a living process has a claim to the slots of `rank` and fills them: it has not only reserved them. True
    where that is unknown."""
    return _is_locked(folder, rank, 1)


def has_any_trainer(folder: NodeFolder) -> bool:
    """As `has_trainer`, for the slots of any rank."""
    return _is_locked(folder, 0, _LOOKERS)


def take_turn(folder: NodeFolder, rank: int) -> int | None:
    """Take `folder` for `rank`, which no two processes can that call this. Returns a descriptor, which holds the folder
    until it is closed or the process ends; None where another living process has it."""
    with Claim(folder):  # so that the file keeps its name
        fd = folder.open_or_create(_NAME)
        if file_locks.try_lock(fd, _TURNS + rank):
            return fd
        file_locks.close(fd)
        return None


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
