"""Objects as files of any file system that fsspec knows, such as ``sftp://`` and ``hdfs://``.

A writer builds a file under a temporary name beside the object, and then gives it its name. Over SFTP the rename never
replaces a file. Other file systems have no such call that all of them share: there, a run is *unfenced*.
"""

from __future__ import annotations

import builtins
import logging
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np
from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class

from holdfast.errors import ConfigurationError, StorageError
from holdfast.store.base import Bytes, Location
from holdfast.store.fsspec_files import AnyFiles, Connections, SftpFiles, is_lost, reported
from holdfast.store.posix import TEMPORARY_PREFIX
from holdfast.store.posix_errors import exists, long, not_found, short

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Protocols whose files other processes do not see, or which cannot be written; and those that holdfast opens itself.
_NO_STORES: Final = frozenset({"data", "file", "hf", "http", "https", "local", "memory"})
_SFTP: Final = frozenset({"sftp", "ssh"})
#: The option of a `Location` that refuses an unfenced run.
REQUIRE_FENCING: Final = "require_fencing"

#: Roots whose users this process has told that they are unfenced.
_told: set[str] = set()


def is_known(scheme: str) -> bool:
    """Whether fsspec has a file system for URLs with `scheme` in which runs can lie."""
    return scheme not in _NO_STORES and scheme in available_protocols()


class FsspecStore:
    """The files below the URL of `location`, whose options go to the file system of fsspec as they are.

    Objects are created once and never changed. Over SFTP, `create` and `FileWriter.publish` replace nothing even where
    several writers run at once, and return when OpenSSH has made the bytes durable. On any other file system one of two
    writers at the same moment can replace the file of the other, and durability is the server's. The first creation
    there logs a warning; with the option ``require_fencing`` it raises `StorageError`, code ``storage.unfenced``.

    Over SFTP objects are written in any order, else from the first byte to the last.
    """

    def __init__(self, location: Location) -> None:
        """Raises `ConfigurationError`: code ``config.extra`` where the driver is not installed, and
        ``config.store_option`` for a password in the URL."""
        self.location = location
        parts = urlsplit(location.url)
        if parts.password is not None:
            raise _password(parts.scheme, location.url.replace(f":{parts.password}@", ":...@"))
        options = dict(location.options)
        self._requires_fencing = options.pop(REQUIRE_FENCING, "false").lower() in ("1", "true", "yes", "on")
        kind = _driver(parts.scheme, location.url)
        options = kind._get_kwargs_from_urls(location.url) | options  # noqa: SLF001 - as fsspec's `url_to_fs` does
        self._root = str(kind._strip_protocol(location.url)).rstrip("/")  # noqa: SLF001 - likewise

        def connect() -> AbstractFileSystem:
            with _installed(parts.scheme, location.url):
                return kind(**options, skip_instance_cache=True)

        self._connections = Connections(connect)
        self._files = SftpFiles() if parts.scheme in _SFTP else AnyFiles()
        self._folders: set[str] = set()
        self.capabilities = self._files.capabilities

    def resolved(self) -> str:
        """The URL of the root."""
        return self.location.url

    def path(self, key: str) -> str:
        """The URL of `key`."""
        return f"{self.location.url}/{_checked(key)}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`."""
        size = self.nbytes(key)
        if size is None:
            raise not_found(self.path(key))
        if limit is not None and size > limit:
            raise long(self.path(key), limit=limit, found=size)
        wanted = max(size - start, 0) if nbytes is None else nbytes
        if start + wanted > size and wanted:
            raise short(self.path(key), start=start, wanted=wanted, found=max(size - start, 0))
        return self._range(key, start, wanted) if wanted else b""

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        found = self._status(self._inside_of_any(key))
        return found["size"] if found is not None and found["type"] == "file" else None

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`."""
        return sorted(name for name in self._names(folder) if not name.startswith(TEMPORARY_PREFIX))[:limit]

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`, but two writers at once can both succeed where the run is unfenced."""
        writer = self.writer(key, nbytes=len(data))
        try:
            writer.write_at(0, np.frombuffer(data, np.uint8))
            return writer.give_name(len(data))
        finally:
            writer.abort()

    def writer(self, key: str, *, nbytes: int) -> FsspecWriter:
        """As `Store.writer`; no space is reserved."""
        path = self.path(key)
        self._check_fenced(path)
        inside = self._inside(key)
        self._make_folder(posixpath.dirname(inside), path)
        return FsspecWriter(self._connections, self._files, inside, path)

    def reader(self, key: str) -> FsspecReader:
        """As `Store.reader`."""
        size = self.nbytes(key)
        if size is None:
            raise not_found(self.path(key))
        return FsspecReader(lambda start, nbytes: self._range(key, start, nbytes), size, self.path(key))

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        folder, inside = key.rpartition("/")[0], self._inside_of_any(key)

        def call(files: AbstractFileSystem) -> bool:
            try:
                files.rm_file(inside)
            except FileNotFoundError:
                return False
            if "/" in folder:  # a checkpoint's folder goes with its last object
                self._files.drop_folder(files, posixpath.dirname(inside))
                self._folders.discard(posixpath.dirname(inside))
            return True

        return self._ask("delete", f"{self.location.url}/{key}", call)

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Store.leftovers`. The age is the difference between the server's clock and that of this machine."""
        names = [name for name in self._names(folder) if name.startswith(TEMPORARY_PREFIX)]
        return sorted(name for name in names if self._is_older(f"{self._inside(folder)}/{name}", older_than_s))

    def _inside_of_any(self, key: str) -> str:
        """The path of `key`, which may be a temporary name."""
        return self._inside(key if key.rpartition("/")[2].startswith(TEMPORARY_PREFIX) else _checked(key))

    def _inside(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _range(self, key: str, start: int, nbytes: int) -> bytes:
        inside = self._inside(_checked(key))
        return self._ask("read", self.path(key), lambda files: self._files.read(files, inside, start, nbytes))

    def _names(self, folder: str) -> builtins.list[str]:
        inside = self._inside(_checked(folder) if folder else "")

        def call(files: AbstractFileSystem) -> builtins.list[str]:
            try:
                return [posixpath.basename(str(name).rstrip("/")) for name in files.ls(inside, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._ask("list", f"{self.location.url}/{folder}", call)

    def _status(self, inside: str) -> dict[str, Any] | None:
        def call(files: AbstractFileSystem) -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = files.info(inside)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found

        return self._ask("look at", inside, call)

    def _is_older(self, inside: str, seconds: float) -> bool:
        found = self._status(inside)
        if found is None or seconds <= 0:
            return found is not None
        changed = found.get("mtime", found.get("LastModified"))
        at = changed.timestamp() if isinstance(changed, datetime) else changed
        return isinstance(at, int | float) and at <= time.time() - seconds

    def _make_folder(self, inside: str, path: str) -> None:
        """Make a folder and its parents; another writer may make some of them at the same time."""
        if inside in self._folders:
            return

        def call(files: AbstractFileSystem) -> None:
            for is_last in (False, False, True):
                try:
                    files.makedirs(inside, exist_ok=True)
                    return
                except OSError as error:
                    if is_lost(error) or (is_last and not files.isdir(inside)):
                        raise

        self._ask("create", path, call)
        self._folders.add(inside)

    def _check_fenced(self, path: str) -> None:
        if self.capabilities.is_fenced:
            return
        if self._requires_fencing:
            raise _unfenced(path)
        if self.location.url not in _told:
            _told.add(self.location.url)
            _log.warning(
                "%s is unfenced: its file system has no common way to create a file without replacing another. "
                "Make sure that no two jobs write to it at once.",
                self.location.url,
            )

    def _ask(self, operation: str, path: str, call: Callable[[AbstractFileSystem], T]) -> T:
        with reported(operation, path):
            return self._connections.ask(call)


class FsspecWriter:
    """One file under construction, see `FileWriter`. It has a connection of its own until it is complete."""

    alignment = 1

    def __init__(self, connections: Connections, files: AnyFiles, inside: str, path: str) -> None:
        self._connections, self._files, self._inside, self._path = connections, files, inside, path
        self._temporary = posixpath.join(posixpath.dirname(inside), TEMPORARY_PREFIX + secrets.token_hex(8))
        self._is_done = False
        self.in_order = files.capabilities.in_order
        with reported("create", path):
            self._system, self._file = connections.hold(lambda system: files.begin(system, self._temporary))

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        with reported("write", self._path):
            for each in data:
                self._file.write_at(offset, each)
                offset += len(each)

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        if not self.give_name(nbytes):
            raise exists(self._path)

    def give_name(self, nbytes: int) -> bool:
        """Cut the file to `nbytes`, make it durable, and give it its name. Returns False where that is taken."""
        tries = count()

        def call(files: AbstractFileSystem) -> bool:
            # After a lost answer, a temporary name that is gone says that the name was given.
            if next(tries) and not files.exists(self._temporary):
                return bool(files.exists(self._inside))
            return self._files.give_name(files, self._temporary, self._inside)

        with reported("publish", self._path):
            self._file.end(nbytes)
            self._connections.give_back(self._system)
            self._is_done = self._connections.ask(call)
        return self._is_done

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        if self._is_done:
            return
        self._is_done = True
        self._file.give_up()
        with suppress(Exception):  # a temporary name that stays is invisible, and `leftovers` lists it
            self._connections.ask(lambda files: files.rm_file(self._temporary))


class FsspecReader:
    """An open object, see `FileReader`. It holds no connection between two reads."""

    alignment = 1
    memory = None

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int, path: str) -> None:
        self.nbytes = nbytes
        self._read = read
        self._path = path

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`."""
        data = self._read(offset, len(out)) if len(out) and offset < self.nbytes else b""
        if len(data) < len(out):
            raise short(self._path, start=offset, wanted=len(out), found=len(data))
        out[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """As `FileReader.close`."""


def _checked(key: str) -> str:
    for name in key.split("/"):
        if name in ("", ".", "..") or name.startswith(TEMPORARY_PREFIX):
            raise ValueError(f"{key!r} is not a key: use a relative name without empty, '.', '..' or temporary parts")
    return key


def _driver(scheme: str, url: str) -> type[AbstractFileSystem]:
    with _installed(scheme, url):
        found: type[AbstractFileSystem] = get_filesystem_class(scheme)
        return found


@contextmanager
def _installed(scheme: str, url: str) -> Iterator[None]:
    """A ``with`` block in which a missing package is a `ConfigurationError`. Some drivers import theirs when they are
    loaded, others when they are used."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"the URL '{url}' needs a package that is not installed: {error}.",
            code="config.extra",
            action=f"pip install 'holdfast[fsspec]' for sftp://, and the package that fsspec names for {scheme}://.",
            path=url,
        ) from error


def _password(scheme: str, url: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{url}' has a password: a URL is shown in messages and stored in records, so it must hold no secrets.",
        code="config.store_option",
        action=f"Set it as fsspec takes it: in ~/.config/fsspec, or as FSSPEC_{scheme.upper()}_PASSWORD.",
        path=url,
    )


def _unfenced(path: str) -> StorageError:
    return StorageError(
        f"cannot create {path}: its file system has no common way to create a file without replacing another, so one "
        f"writer could replace the file of another, and {REQUIRE_FENCING} forbids that.",
        code="storage.unfenced",
        action=f"Use a folder, s3://, gs://, az:// or sftp://; or drop {REQUIRE_FENCING}, and let one job write.",
        path=path,
    )
