"""A private folder in a node's memory, where slots live: ``<node_dir>/holdfast-<user>/<run>``.

Files in memory survive the processes that made them, which is the point; and anybody on the node can make files beside
them. So nothing here trusts a name: every folder and file is opened without following links, and must belong to this
user and nobody else.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import xxhash

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory import file_locks

#: Memory that is a file system, on every Linux.
DEFAULT_NODE_DIR: Final = Path("/dev/shm")  # noqa: S108 - what is made in it is private

#: Why something of this user cannot be opened when it is none: a link, a file, a folder, a socket, of somebody else.
_NOT_OURS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO)
_NEW_PREFIX: Final = "new-"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class NodeFolder:
    """The folder of one run in the memory of this node, made where it is not there. Use as a context manager.

    `run` is what names the run on all nodes. Safe for several threads and processes.

    Raises:
        ConfigurationError: `node_dir` is no folder, or somebody else has made what should be private.
    """

    def __init__(self, run: str, *, node_dir: Path = DEFAULT_NODE_DIR) -> None:
        self._open(_user_folder(node_dir) / xxhash.xxh3_64_hexdigest(run.encode()), make=True)

    @classmethod
    def at(cls, path: Path) -> Self:
        """The folder of some run at `path`; FileNotFoundError where there is none."""
        folder = cls.__new__(cls)
        folder._open(path, make=False)  # noqa: SLF001 - another constructor
        return folder

    def _open(self, path: Path, *, make: bool) -> None:
        self.path = path
        self._fd = self._opened(make=make)

    @property
    def node_dir(self) -> Path:
        """The folder in memory that it was made in."""
        return self.path.parent.parent

    def identity(self) -> str:
        """What tells this folder from those of other nodes, and of this one before it was booted."""
        status = os.fstat(self._fd)
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}-{status.st_dev}-{status.st_ino}"

    def remake(self) -> None:
        """Make the folder anew, where somebody has removed it."""
        fd = self._opened(make=True)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)

    def _opened(self, *, make: bool) -> int:
        """A descriptor of the folder, made where it is not there."""
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
        """Descriptor of the folder."""
        return self._fd

    def changed_ns(self) -> int:
        """When a file last came or went, as far as the system's clock for that tells instants apart."""
        return os.fstat(self._fd).st_mtime_ns

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the folder: nothing can be created in it any more."""
        return os.fstat(self._fd).st_nlink == 0

    def names(self) -> list[str]:
        """Names of the files in the folder, sorted; none in a folder that was removed."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self._fd))  # noqa: PTH208 - it takes a descriptor
        return []

    def create(self, name: str) -> int:
        """A descriptor of the new file `name`; FileExistsError where there is one."""
        return os.open(name, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)

    def open(self, name: str) -> int:
        """A descriptor of the file `name`; FileNotFoundError where there is none.

        Raises `ConfigurationError` where it is not a file of this user alone.
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
        """A descriptor of the file `name`, made where it is not there; so is the folder."""
        while True:
            with suppress(FileNotFoundError):  # removed since it was created
                try:
                    with suppress(FileExistsError):
                        os.close(self.create(name))
                except FileNotFoundError:
                    self.remake()
                return self.open(name)

    def write(self, name: str, data: bytes) -> None:
        """Have the file `name` hold `data`, whole; what is called so already is replaced."""
        new, fd = self.create_unnamed()
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            self.rename(new, name)
        except BaseException:
            self.remove(new)
            raise
        finally:
            file_locks.close(fd)

    def create_unnamed(self) -> tuple[str, int]:
        """A new file that is to be renamed when it is whole: what it is called until then, and a descriptor, to be
        closed by `file_locks.close`. The file is this process's as long as that is open: its lock says so."""
        while True:
            name = f"{_NEW_PREFIX}{secrets.token_hex(8)}"
            fd = self.create(name)
            if file_locks.try_lock(fd) and os.fstat(fd).st_nlink:
                return name, fd
            file_locks.close(fd)  # it was taken for a dead process's, before it was locked

    def remove_unnamed(self) -> None:
        """Remove files that got no name of their own, because the processes that made them have ended."""
        for name in self.names():
            if name.startswith(_NEW_PREFIX):
                with suppress(FileNotFoundError):
                    fd = self.open(name)
                    if file_locks.try_lock(fd):
                        self.remove(name)
                    file_locks.close(fd)

    def rename(self, name: str, new: str) -> None:
        """Rename a file. What is called `new` already is replaced."""
        os.rename(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Its memory goes when nobody has it mapped."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Close the folder; its files stay."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def unusable_memory(path: Path) -> Iterator[None]:
    """Turn what the operating system reports of the node memory at `path` into a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise memory_error(path, error) from error


def memory_error(path: Path, error: OSError) -> StorageError:
    """What the operating system reported of the node memory at `path`, for a user."""
    why = "somebody removed its folder" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    return StorageError(
        f"The memory of this node at '{path}' cannot be used: {why}.",
        code="storage.memory",
        action="Make room there (bytes and inodes, see df -i), and keep others from removing it (RemoveIPC=no in "
        "logind.conf). Later saves try memory again.",
        path=str(path),
        tier="node memory",
    )


def node_folders(node_dir: Path) -> Iterator[NodeFolder]:
    """The folders of all runs of this user in the memory of this node, each open for its turn. Makes none, and passes
    over what is no folder of this user alone: no run has made it."""
    path = _user_folder(node_dir)
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_open(path, error) from error
    for name in names:
        with suppress(FileNotFoundError, ConfigurationError), NodeFolder.at(path / name) as folder:
            yield folder


def _user_folder(node_dir: Path) -> Path:
    return node_dir / f"holdfast-{os.geteuid()}"


def _private(parent: int, name: str, path: Path, *, make: bool) -> int:
    """A descriptor of the folder `name` in `parent`; where it is not there, it is made, or FileNotFoundError raised."""
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
    """The error for what cannot be opened: it is none of this user's, or memory cannot be used now."""
    if error.errno in _NOT_OURS:
        return _not_private(path, error.strerror or "it cannot be opened")
    return memory_error(path, error)  # too many open files, say


def _require_private(found: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode):
        raise _not_private(path, "it is something else")
    if found.st_uid != os.geteuid():
        raise _not_private(path, f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o077:
        raise _not_private(path, f"others may use it (mode {stat.S_IMODE(found.st_mode):04o})")


def not_a_folder(node_dir: Path, error: OSError) -> ConfigurationError:
    """The error for a `node_dir` that cannot be opened."""
    return ConfigurationError(
        f"'{node_dir}' cannot be opened as a folder ({error.strerror}).",
        code="config.node_dir",
        action="Pass as node_dir= a folder in memory (a tmpfs) that exists on every node.",
        path=str(node_dir),
    )


def _not_private(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{path}' is not a private place for the state of a run: {why}.",
        code="config.node_dir",
        action="Remove it, or pass another folder in memory as node_dir=.",
        path=str(path),
    )
