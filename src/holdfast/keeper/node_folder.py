"""A private folder in a node's memory, where slots live: ``<node_dir>/holdfast-<user>/<run>``.

Files in memory survive the processes that made them, which is the point; and anybody on the node can make files beside
them. So nothing here trusts a name: every folder and file is opened without following links, and must belong to this
user and nobody else.
"""

from __future__ import annotations

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

#: Memory that is a file system, on every Linux.
DEFAULT_NODE_DIR: Final = Path("/dev/shm")  # noqa: S108 - what is made in it is private

_NEW_PREFIX: Final = "new-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class NodeFolder:
    """The folder of one run in the memory of this node, made where it is not there. Use as a context manager.

    `run` is what names the run on all nodes. Safe for several threads and processes.

    Raises:
        ConfigurationError: `node_dir` is no folder, or somebody else has made what should be private.
    """

    def __init__(self, run: str, *, node_dir: Path = DEFAULT_NODE_DIR) -> None:
        user, key = f"holdfast-{os.geteuid()}", xxhash.xxh3_64_hexdigest(run.encode())
        self.path = node_dir / user / key
        try:
            root = os.open(node_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"'{node_dir}' cannot be opened as a folder ({error.strerror}).",
                code="config.node_dir",
                action="Pass as node_dir= a folder in memory (a tmpfs) that exists on every node.",
                path=str(node_dir),
            ) from error
        try:
            above = _private(root, user, node_dir / user)
        finally:
            os.close(root)
        try:
            self._fd = _private(above, key, self.path)
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
        except OSError as error:  # a link, a folder, a socket, a file of somebody else
            raise _not_private(self.path / name, error.strerror or "it cannot be opened") from error
        try:
            _require_private(os.fstat(fd), self.path / name, stat.S_ISREG)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, name: str, data: bytes) -> None:
        """Have the file `name` hold `data`, whole; what is called so already is replaced."""
        new = self.unnamed()
        with os.fdopen(self.create(new), "wb") as file:
            try:
                file.write(data)
                file.flush()
                self.rename(new, name)
            except BaseException:
                self.remove(new)
                raise

    @staticmethod
    def unnamed() -> str:
        """A name for a file that is to be renamed when it is whole."""
        return f"{_NEW_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"

    def remove_unnamed(self) -> None:
        """Remove files that got no name of their own, because the processes that made them have ended."""
        for name in self.names():
            if name.startswith(_NEW_PREFIX) and not Path(f"/proc/{name.split('-')[1]}").exists():
                self.remove(name)

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


def _private(parent: int, name: str, path: Path) -> int:
    """A descriptor of the folder `name` in `parent`, made where it is not there."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:  # a link, a file, a folder of somebody else
        raise _not_private(path, error.strerror or "it cannot be opened") from error
    try:
        _require_private(os.fstat(fd), path, stat.S_ISDIR)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_private(found: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode):
        raise _not_private(path, "it is something else")
    if found.st_uid != os.geteuid():
        raise _not_private(path, f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o077:
        raise _not_private(path, f"others may use it (mode {stat.S_IMODE(found.st_mode):04o})")


def _not_private(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{path}' is not a private place for the state of a run: {why}.",
        code="config.node_dir",
        action="Remove it, or pass another folder in memory as node_dir=.",
        path=str(path),
    )
