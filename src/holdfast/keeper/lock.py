"""Who keeps a folder: one process has its lock, and says by which protocol it understands what is in it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from contextlib import suppress
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.keeper.node_folder import NodeFolder

#: Changes with the records of slots and generations, and with who may do what in which state.
PROTOCOL: Final = 1

_LOCK_NAME: Final = "keeper.lock"
_PROTOCOL_NAME: Final = "keeper.protocol"
#: ``struct flock``: type, from where, start, length, process.
_FLOCK: Final = struct.Struct("hhqqi4x")
_LOOK_S: Final = 0.05


def try_lock(folder: NodeFolder) -> int | None:
    """The right to be the keeper of `folder`, as a descriptor, for as long as it is open; None where another has it.

    It goes with the process that holds it, however that ends.
    """
    fd = open_lock(folder)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        os.close(fd)
        return None
    return fd


def is_kept(folder: NodeFolder) -> bool:
    """Whether a keeper of `folder` is at work."""
    fd = open_lock(folder)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Whether a keeper holds the lock that `fd` is open for, also where its file was removed since. (Asks for the lock
    without taking it, which could keep a keeper away.)"""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def open_lock(folder: NodeFolder) -> int:
    """A descriptor of the file that the keeper of `folder` locks."""
    with suppress(FileExistsError):
        os.close(folder.create(_LOCK_NAME))
    return folder.open(_LOCK_NAME)


def write_protocol(folder: NodeFolder) -> None:
    """Say that what is in `folder` follows `PROTOCOL`. Only for its keeper."""
    folder.write(_PROTOCOL_NAME, b"%d\n" % PROTOCOL)


def clear_protocol(folder: NodeFolder) -> None:
    """Say that nothing is in `folder` that is not durable: a keeper of any protocol may come. Only for its keeper."""
    folder.remove(_PROTOCOL_NAME)


def require_protocol(folder: NodeFolder, *, timeout_s: float) -> None:
    """Return when `folder` is no other version's: a keeper of another protocol is told to end, and makes durable first
    what is there.

    Raises:
        ConfigurationError: it did not end, or could not make everything durable, within `timeout_s`.
    """
    protocol = _protocol_of(folder)
    end = time.monotonic() + timeout_s
    if protocol != PROTOCOL and is_kept(folder):
        os.kill(int((folder.path / _LOCK_NAME).read_text()), signal.SIGTERM)
        while is_kept(folder) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        protocol = _protocol_of(folder)
    if protocol != PROTOCOL:
        raise ConfigurationError(
            f"What is in '{folder.path}' was staged by another version of holdfast (protocol {protocol}; this one has "
            f"{PROTOCOL}), and is not durable.",
            code="config.keeper_version",
            action="Run `holdfast keeper` of that version until it is, or remove the folder to give it up.",
            path=str(folder.path),
        )


def _protocol_of(folder: NodeFolder) -> int:
    """What the last keeper of `folder` followed, if it left anything that is not durable; else the one of this."""
    try:
        with os.fdopen(folder.open(_PROTOCOL_NAME), "rb") as file:
            return int(file.read())
    except FileNotFoundError:
        return PROTOCOL
