"""File systems of fsspec, as `FsspecStore` uses them: connections, the calls in which they differ, their errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import gaierror
from threading import Condition, Lock
from typing import Any, Final, Protocol, TypeVar

from fsspec import AbstractFileSystem

from holdfast.errors import ConfigurationError, HoldfastError, StorageError
from holdfast.store.base import Bytes, Capabilities
from holdfast.store.posix_errors import not_found

T = TypeVar("T")

_PIECE_NBYTES: Final = 1 << 20
_KEPT_NBYTES: Final = 64 << 10
#: The number of a request that an extension of SFTP defines.
_EXTENDED: Final = 200

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_UNREACHABLE: Final = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors of drivers that mean a lost connection and derive from no error of the system, by the names of their classes.
_LOST_NAMES: Final = frozenset({"SSHException", "ChannelException", "NoValidConnectionsError"})
_LOGIN_NAMES: Final = frozenset({"AuthenticationException", "BadHostKeyException", "PasswordRequiredException"})


class GivenUpError(Exception):
    """Another thread gave the file up; it knows why."""


class UnfinishedFile(Protocol):
    """A file under construction."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data`; an error of it is raised here or by `end`."""

    def end(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, make it as durable as the server can, and close it."""

    def give_up(self) -> None:
        """Close the file, and make threads that wait in `write_at` raise. Never raises."""


class AppendedFile:
    """A file that is written from its first byte to its last. `write_at` waits until all bytes before it were written.

    At most the last 64 KiB can be cut off: they are sent at the end.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._changed = Condition()
        self._next = 0
        self._kept = bytearray()
        self._is_given_up = False

    def write_at(self, offset: int, data: Bytes) -> None:
        """As `UnfinishedFile.write_at`."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == offset or self._is_given_up)
            if self._is_given_up:
                raise GivenUpError
            for start in range(0, len(data), _PIECE_NBYTES):
                self._kept += data[start : start + _PIECE_NBYTES].data
                self._send(max(len(self._kept) - _KEPT_NBYTES, 0))
            self._next = offset + len(data)
            self._changed.notify_all()

    def end(self, nbytes: int) -> None:
        """As `UnfinishedFile.end`."""
        surplus = self._next - nbytes
        if not 0 <= surplus <= len(self._kept):
            raise ValueError(f"{self._next} bytes were written: a file of {nbytes} cannot be made of them")
        self._send(len(self._kept) - surplus)
        self._file.close()

    def give_up(self) -> None:
        """As `UnfinishedFile.give_up`."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        with suppress(Exception):
            self._file.close()

    def _send(self, nbytes: int) -> None:
        if nbytes:
            self._file.write(bytes(self._kept[:nbytes]))
            del self._kept[:nbytes]


class SftpFile:
    """A file of SFTP, which is written in any order."""

    def __init__(self, client: Any, path: str) -> None:
        self._client = client
        self._file = client.open(path, "wb")
        self._lock = Lock()

    def write_at(self, offset: int, data: Bytes) -> None:
        """As `UnfinishedFile.write_at`, with all of `data` under way at a time. paramiko would drop the errors of the
        last hundred packets, so the last byte is sent by itself, and waits for the answers to all packets."""
        with self._lock:
            self._file.seek(offset)
            self._file.set_pipelined(True)
            self._file.write(data[:-1].tobytes())
            self._file.set_pipelined(False)
            self._file.write(data[-1:].tobytes())

    def end(self, nbytes: int) -> None:
        """As `UnfinishedFile.end`."""
        if self._file.stat().st_size != nbytes:
            self._file.truncate(nbytes)
        try:
            self._client._request(_EXTENDED, "fsync@openssh.com", self._file.handle)  # noqa: SLF001 - no public call
        except OSError as error:
            if is_lost(error):
                raise
            # The server is another than OpenSSH, and lacks the request.
        self._file.close()

    def give_up(self) -> None:
        """As `UnfinishedFile.give_up`."""
        with suppress(Exception):
            self._file.close()


class AnyFiles:
    """The calls that all file systems of fsspec have.

    They have no common way to create a file without replacing another: `give_name` looks first, and a writer that does
    so at the same moment is not seen.
    """

    capabilities = Capabilities(in_order=True, is_fenced=False)

    def read(self, files: AbstractFileSystem, path: str, start: int, nbytes: int) -> bytes:
        """Read a range of a file; fewer bytes where it ends before."""
        data: bytes = files.cat_file(path, start=start, end=start + nbytes)
        return data

    def begin(self, files: AbstractFileSystem, path: str) -> UnfinishedFile:
        """Open a new file for writing."""
        return AppendedFile(files.open(path, "wb"))

    def give_name(self, files: AbstractFileSystem, temporary: str, path: str) -> bool:
        """Give the file `temporary` the name `path`. Returns False where that is taken."""
        if files.exists(path):
            return False
        files.mv(temporary, path)
        return True

    def drop_folder(self, files: AbstractFileSystem, path: str) -> None:
        """Remove a folder if it is empty, where the file system has such a call."""


class SftpFiles(AnyFiles):
    """SFTP, by the calls of paramiko below fsspec: many packets under way at a time, and a rename that never replaces.

    The protocol (version 3, which OpenSSH speaks) says of a rename: "It is an error if there already exists a file with
    the name specified by newpath." OpenSSH makes a hard link for it, so of two at once one fails.
    """

    capabilities = Capabilities()

    def read(self, files: Any, path: str, start: int, nbytes: int) -> bytes:
        """As `AnyFiles.read`, with requests for all of the range under way at a time."""
        with files.ftp.open(path, "rb") as file:
            stop, packet = min(file.stat().st_size, start + nbytes), file.MAX_REQUEST_SIZE
            # In parts as large as a packet: of a larger one, paramiko copies all that it has with each further packet.
            parts = [(at, min(packet, stop - at)) for at in range(start, stop, packet)]
            return b"".join(file.readv(parts)) if parts else b""

    def begin(self, files: Any, path: str) -> UnfinishedFile:
        """As `AnyFiles.begin`."""
        return SftpFile(files.ftp, path)

    def give_name(self, files: Any, temporary: str, path: str) -> bool:
        """As `AnyFiles.give_name`, in one step."""
        try:
            files.ftp.rename(temporary, path)
        except OSError as error:
            if is_lost(error) or not files.exists(path):  # the protocol says "Failure" for most errors
                raise
            return False
        return True

    def drop_folder(self, files: Any, path: str) -> None:
        """As `AnyFiles.drop_folder`."""
        with suppress(OSError):
            files.ftp.rmdir(path)


class Connections:
    """Connections to one server, made by `connect` when they are needed. Each is used by one thread at a time, since
    drivers such as paramiko's mix up the answers to several."""

    def __init__(self, connect: Callable[[], AbstractFileSystem]) -> None:
        self._connect = connect
        self._idle: list[AbstractFileSystem] = []
        #: Servers refuse many logins at once.
        self._logging_in = Lock()
        self._pid = os.getpid()
        self._inherited: list[AbstractFileSystem] = []

    def ask(self, call: Callable[[AbstractFileSystem], T]) -> T:
        """Make a call that may be made twice: a second time where the connection is lost."""
        files, result = self.hold(call)
        self.give_back(files)
        return result

    def hold(self, call: Callable[[AbstractFileSystem], T]) -> tuple[AbstractFileSystem, T]:
        """As `ask`, but also returns the connection, which nobody else uses until `give_back`."""
        try:
            return self._held(call)
        except Exception as error:
            if not is_lost(error):
                raise
            self._idle.clear()  # what is older is lost, too
        return self._held(call)

    def give_back(self, files: AbstractFileSystem) -> None:
        """Let others use a connection that is sound."""
        self._idle.append(files)

    def _held(self, call: Callable[[AbstractFileSystem], T]) -> tuple[AbstractFileSystem, T]:
        files = self._taken()
        try:
            return files, call(files)
        except Exception as error:
            if not is_lost(error):
                self.give_back(files)
            raise

    def _taken(self) -> AbstractFileSystem:
        if self._pid != os.getpid():
            # Connections are the parent's. They are kept, since their destructors would end them for the parent, too.
            self._inherited, self._idle = [*self._inherited, *self._idle], []
            self._pid, self._logging_in = os.getpid(), Lock()
        try:
            files = self._idle.pop()
        except IndexError:
            with self._logging_in:
                return self._connect()
        files.invalidate_cache()
        return files


@contextmanager
def reported(operation: str, path: str) -> Iterator[None]:
    """Turn an error of fsspec or a driver in the block into one of holdfast's."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        if not isinstance(error, OSError | EOFError | RuntimeError) and _names(error).isdisjoint(_LOST_NAMES):
            raise
        raise _error(operation, path, error) from error


def is_lost(error: BaseException) -> bool:
    """Whether a connection was lost, so that its last request may have been served, or not."""
    if isinstance(error, EOFError | ConnectionError | TimeoutError | gaierror):
        return True
    if isinstance(error, OSError) and (error.errno in _UNREACHABLE or str(error) == "Socket is closed"):
        return True
    return not _names(error).isdisjoint(_LOST_NAMES) and _names(error).isdisjoint(_LOGIN_NAMES)


def _names(error: BaseException) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(error).__mro__)


def _error(operation: str, path: str, error: Exception) -> HoldfastError:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError) and operation in ("read", "look at"):
        return not_found(path)
    message = f"cannot {operation} {path}: {str(error).rstrip('.') or type(error).__name__}."
    if not _names(error).isdisjoint(_LOGIN_NAMES):
        return ConfigurationError(
            message,
            code="config.credentials",
            action="Give the user in the URL, and keys or passwords as fsspec takes them: in ~/.config/fsspec, or in "
            "variables such as FSSPEC_SFTP_KEY_FILENAME, in the environment of the job.",
            path=path,
        )
    code, action, retryable = (
        "storage.failed",
        "Repair the cause that the server reports, then try again. SFTP says 'Failure' for a full disk, too.",
        False,
    )
    if isinstance(error, FileNotFoundError):
        code = "storage.vanished"
        action = "Find out who removed its folder or its temporary file, or name another place; then try again."
    elif isinstance(error, PermissionError) or number in _DENIED:
        code, action = "storage.denied", "Give this user write access on the server, or use another place."
    elif number in _FULL:
        code, action = "storage.full", "Free space, raise the quota, or save to another place."
    elif is_lost(error):
        is_reached = not isinstance(error, gaierror) and number not in _UNREACHABLE | {errno.ECONNREFUSED}
        is_reached &= "NoValidConnectionsError" not in _names(error)
        code, retryable = "storage.unavailable" if is_reached else "storage.unreachable", True
        action = "Try again; if the error persists, check the address, the network and the server."
    return StorageError(message, code=code, action=action, path=path, retryable=retryable)
