"""A private folder in a node's memory that holds the slots of one run: ``<node_dir>/holdfast-<user>/<run>``.

Files in memory survive the processes that made them, as slots must. But every user of the node can make files beside
them. So nothing here trusts a name: it opens every folder and file without following links, and requires that only this
user can use it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import xxhash

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory import file_locks

#: A file system in memory that every Linux has.
DEFAULT_NODE_DIR: Final = Path("/dev/shm")  # noqa: S108 - what is made in it is private

#: Errors of opening something that is not a file or folder of this user: a link, another kind of file, a socket, or a
#: file of another user.
_NOT_OURS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO)
_NO_ROOM: Final = (
    "Make room there (bytes and inodes, see df -i), and keep others from removing it (RemoveIPC=no in logind.conf)."
)
#: The action for errors for which the limits of a process are the reason, not the room in memory.
_LIMITS: Final = {
    errno.EMFILE: "Let this process open more files (ulimit -n).",
    errno.ENFILE: "Let this machine open more files (sysctl fs.file-max).",
    errno.EFBIG: "Let this process write larger files (ulimit -f).",
    errno.ENOMEM: "Let this process map more memory (ulimit -v, sysctl vm.max_map_count, the limit of its cgroup).",
}
_NEW_PREFIX: Final = "new-"
_log = logging.getLogger(__name__)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def boot_id() -> str:
    """An identifier of this boot of the node."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


class NodeFolder:
    """The folder of one run in the memory of this node, created if it is missing. Use it as a context manager.

    `run` is the name of the run: its location, without links in its path (`holdfast.store.urls.canonical`).
    Safe for several threads and processes.

    Raises:
        ConfigurationError: `node_dir` is not a folder, or the folder is not private to this user.
    """

    def __init__(self, run: str, *, node_dir: Path = DEFAULT_NODE_DIR) -> None:
        self._open(_user_folder(node_dir) / xxhash.xxh3_64_hexdigest(run.encode()), make=True)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open the folder of a run at `path`; FileNotFoundError where there is none."""
        folder = cls.__new__(cls)
        folder._open(path, make=False)  # noqa: SLF001 - another constructor
        return folder

    def _open(self, path: Path, *, make: bool) -> None:
        self.path = path
        self._fd = self._opened(make=make)

    @property
    def node_dir(self) -> Path:
        """The folder in memory that holds the folders of all users."""
        return self.path.parent.parent

    def identity(self) -> str:
        """An identifier that differs from that of folders of other nodes, and of this node before its last boot."""
        status = os.fstat(self._fd)
        return f"{boot_id()}-{status.st_dev}-{status.st_ino}"

    def remake(self) -> None:
        """Create the folder again after some process has removed it."""
        fd = self._opened(make=True)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)

    def _opened(self, *, make: bool) -> int:
        """A descriptor of the folder; with `make`, created if it is missing."""
        try:
            root = os.open(self.node_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise not_a_folder(self.node_dir, error) from error
        try:
            above = _private(root, self.path.parent.name, self.path.parent, make=make)
        finally:
            os.close(root)
        try:
            return _private(above, self.path.name, self.path, make=make)
        finally:
            os.close(above)

    def fileno(self) -> int:
        """The descriptor of the folder."""
        return self._fd

    def changed_ns(self) -> int:
        """The time of the last creation or removal of a file, in the resolution of the system's clock for file
        times."""
        return os.fstat(self._fd).st_mtime_ns

    @property
    def is_removed(self) -> bool:
        """Whether some process has removed the folder: no file can be created in it."""
        return os.fstat(self._fd).st_nlink == 0

    def names(self) -> list[str]:
        """The names of the files in the folder, sorted; empty for a folder that was removed."""
        with suppress(FileNotFoundError):
            # A descriptor of its own: threads that list by one descriptor share its position, and each sees a part.
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                return sorted(os.listdir(fd))  # noqa: PTH208 - it takes a descriptor
            finally:
                os.close(fd)
        return []

    def has(self, name: str) -> bool:
        """Whether the folder has a file of that name."""
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            return True
        return False

    def create(self, name: str) -> int:
        """Create the file `name`, and return its descriptor; FileExistsError where it exists."""
        return os.open(name, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)

    def open(self, name: str) -> int:
        """Open the file `name`, and return its descriptor; FileNotFoundError where there is none.

        Raises `ConfigurationError` where it is not a file that only this user can use.
        """
        try:
            fd = os.open(name, _FILE | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _cannot_open(self.path / name, error) from error
        try:
            _require_private(os.fstat(fd), self.path / name, stat.S_ISREG)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_or_create(self, name: str) -> int:
        """Open the file `name`, and return its descriptor. Creates the file, and the folder, if they are missing."""
        while True:
            with suppress(FileNotFoundError):  # another process removed it between its creation and its opening
                try:
                    with suppress(FileExistsError):
                        os.close(self.create(name))
                except FileNotFoundError:
                    self.remake()
                return self.open(name)

    def write(self, name: str, data: bytes) -> None:
        """Write `data` as the file `name`, atomically; an existing file of any kind, or an empty folder, is
        replaced."""
        new, fd = self.create_unnamed()
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            try:
                self.rename(new, name)
            except IsADirectoryError:
                self.remove(name)  # an empty folder; raises for one that holds anything
                self.rename(new, name)
        except BaseException:
            self.remove(new)
            raise
        finally:
            file_locks.close(fd)

    def create_unnamed(self) -> tuple[str, int]:
        """Create a file that the caller renames once it is complete. Returns its temporary name, and a descriptor that
        the caller closes with `file_locks.close`. Until then, the descriptor's lock shows other processes that the file
        has an owner."""
        while True:
            name = f"{_NEW_PREFIX}{secrets.token_hex(8)}"
            fd = self.create(name)
            if file_locks.try_lock(fd) and os.fstat(fd).st_nlink:
                return name, fd
            file_locks.close(fd)  # before it was locked here, another process took its owner for dead

    def remove_unnamed(self) -> None:
        """Remove the files that `create_unnamed` made in processes that have ended before they renamed them, and
        whatever else has such a name. Leaves what cannot be removed."""
        for name in self.names():
            if not name.startswith(_NEW_PREFIX):
                continue
            try:
                fd = self.open(name)
            except ConfigurationError:  # no process of this user made it
                self.discard(name)
            except (OSError, StorageError) as error:
                _log.debug("'%s' stays: %s", self.path / name, error)
            else:
                if file_locks.try_lock(fd):
                    self.discard(name)
                file_locks.close(fd)

    def rename(self, name: str, new: str) -> None:
        """Rename a file. An existing file `new` is replaced."""
        os.rename(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file of any kind, or an empty folder, if it is there. The system frees a file's memory when no
        process has it mapped."""
        with suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self._fd)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=self._fd)

    def discard(self, name: str) -> bool:
        """As `remove`, but leaves what cannot be removed, such as a folder that holds something. Returns whether
        nothing has the name now."""
        try:
            self.remove(name)
        except OSError as error:
            _log.debug("'%s' stays: %s", self.path / name, error)
            return False
        return True

    def close(self) -> None:
        """Close the descriptor of the folder; its files stay."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def unusable_memory(path: Path) -> Iterator[None]:
    """Turn an `OSError` about the node memory at `path` into a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise memory_error(path, error) from error


def memory_error(path: Path, error: OSError) -> StorageError:
    """The error for a user about an `OSError` from the node memory at `path`."""
    why = "its folder was removed" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    return StorageError(
        f"The memory of this node at '{path}' cannot be used: {why}.",
        code="storage.memory",
        action=f"{_LIMITS.get(error.errno or 0, _NO_ROOM)} Later saves try memory again.",
        path=str(path),
        tier="node memory",
    )


def node_folders(node_dir: Path) -> Iterator[NodeFolder]:
    """The folders of all runs of this user in the memory of this node, each open until the next one. Creates none, and
    skips everything that is not a folder that only this user can use: no run made it."""
    for number in count():
        path = _user_folder(_turn_path(node_dir, number))
        try:
            names = sorted(os.listdir(path))  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return
        except OSError as error:
            raise _cannot_open(path, error) from error
        for name in names:
            with suppress(FileNotFoundError, ConfigurationError), NodeFolder.at(path / name) as folder:
                yield folder


def turn_dir(node_dir: Path, number: int) -> Path:
    """The folder in memory of job `number` of those that live on this node and save into one run in turn: `node_dir`
    itself for the first one, 0, else a folder in it, which is created if it is missing.

    Raises:
        ConfigurationError: `node_dir` is not a folder, or the folder in it is not private to this user.
    """
    path = _turn_path(node_dir, number)
    if number:
        try:
            root = os.open(node_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise not_a_folder(node_dir, error) from error
        try:
            os.close(_private(root, path.name, path, make=True))
        finally:
            os.close(root)
    return path


def _turn_path(node_dir: Path, number: int) -> Path:
    return node_dir / f"{_user_folder(node_dir).name}-turn-{number}" if number else node_dir


def _user_folder(node_dir: Path) -> Path:
    return node_dir / f"holdfast-{os.geteuid()}"


def _private(parent: int, name: str, path: Path, *, make: bool) -> int:
    """A descriptor of the folder `name` in `parent`. If it is missing, creates it with `make`, else raises
    FileNotFoundError."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _cannot_open(path, error) from error
    try:
        _require_private(os.fstat(fd), path, stat.S_ISDIR)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _cannot_open(path: Path, error: OSError) -> ConfigurationError | StorageError:
    """The error for a path that cannot be opened: it is not this user's, or memory cannot be used now."""
    if error.errno in _NOT_OURS:
        return _not_private(path, error.strerror or "it cannot be opened")
    return memory_error(path, error)  # for example, too many open files


def _require_private(found: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode):
        raise _not_private(path, "it is not of the expected kind (folder or file)")
    if (why := why_not_private(found)) is not None:
        raise _not_private(path, why)


def why_not_private(found: os.stat_result) -> str | None:
    """Why others than the user of this process can access a file or folder; None where nobody else can."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"other users may access it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def not_a_folder(node_dir: Path, error: OSError) -> ConfigurationError:
    """The error for a `node_dir` that cannot be opened."""
    return ConfigurationError(
        f"'{node_dir}' cannot be opened as a folder ({error.strerror}).",
        code="config.node_dir",
        action="Pass as node_dir= a folder in memory (tmpfs) that exists on every node.",
        path=str(node_dir),
    )


def _not_private(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{path}' is not a private place for the state of a run: {why}.",
        code="config.not_private",
        action="Remove it, or pass another folder in memory as node_dir=.",
        path=str(path),
    )
