"""Objects as files of a POSIX file system.

A writer builds a file under a temporary name, makes it durable, and then gives it its name by ``link``, which never
replaces a file. It makes the folder with the new name durable before it reports success. Data files bypass the page
cache (``O_DIRECT``), because only that reaches a disk's speed; where the file system has no direct I/O, the same calls
go through the page cache.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.store.base import Bytes, Capabilities, Location
from holdfast.store.linux import ALIGNMENT, is_local, open_direct, read_no_more, rename_without_replace, reserve
from holdfast.store.modes import PRIVATE, in_folder, new_folder_mode
from holdfast.store.posix_errors import exists, long, not_found, reported, short, unfenced

_log = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"
_BUFFERED_ALIGNMENT = 1
#: Longest time from the creation of a temporary file to its writer's lock.
_UNLOCKED_S = 2.0

_MISSING = (FileNotFoundError, NotADirectoryError)
_UNSUPPORTED = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class PosixStore:
    """The files below the folder `root`, which is created with the first object.

    Objects are created once and never changed. `create` and `FileWriter.publish` return when the object and the
    entries of all folders down to it are durable. Keys are relative names without ``.``, ``..``, empty or
    temporary components; anything else is a ValueError.

    What is created has the mode of the root (`holdfast.store.modes`); a new root is private.
    """

    capabilities = Capabilities(is_mappable=True)

    def __init__(self, root: str) -> None:
        self.location = Location(root)
        self._root = os.path.abspath(root)
        self._durable_folders: set[str] = set()
        #: The modes of new folders and files; known once the root exists.
        self._modes = in_folder(PRIVATE)

    def resolved(self) -> str:
        """The path of the root, with its current links resolved."""
        with reported("look at", self._root):
            return os.path.realpath(self._root)

    def path(self, key: str) -> str:
        """The full path of `key`."""
        for name in key.split("/"):
            if name in ("", ".", "..") or name.startswith(TEMPORARY_PREFIX):
                raise ValueError(
                    f"{key!r} is not a key: use a relative name without empty, '.', '..' or temporary parts"
                )
        return os.path.join(self._root, key)

    def _folder(self, folder: str) -> str:
        return self.path(folder) if folder else self._root

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """Read the bytes of an object, or `nbytes` of them from `start`.

        Raises `CorruptError` for fewer than `nbytes`, and for an object of more than `limit` bytes.
        """
        path = self.path(key)
        with reported("read", path), open(_open_existing(path), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if limit is not None and found > limit:
                raise long(path, limit=limit, found=found)
            if nbytes is not None:
                read_no_more(file.fileno())
            file.seek(start)
            data = file.read(-1 if nbytes is None else nbytes)
        if nbytes is not None and len(data) < nbytes:
            raise short(path, start=start, wanted=nbytes, found=len(data))
        return data

    def nbytes(self, key: str) -> int | None:
        """Size of an object, or None where there is none."""
        path = self._path_of_any(key)
        with reported("look at", path):
            try:
                status = os.stat(path)
            except _MISSING:
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """The names directly below `folder`, or the first `limit` of them, sorted; ``""`` is the root; empty where
        there is no such folder."""
        return sorted(name for name in _names(self._folder(folder)) if not name.startswith(TEMPORARY_PREFIX))[:limit]

    def create(self, key: str, data: bytes) -> bool:
        """Publish `data` under `key`, atomically and durably. Returns False, and changes nothing, when the key exists.

        The existing object, too, is durable on return, whichever process created it.
        """
        return self._create(key, data, _give_name)

    def replace(self, key: str, data: bytes) -> None:
        """Publish `data` under `key`, atomically and durably, in place of an object that may be there.

        Nothing in a run is ever replaced. This is for a file of another system that names the newest of something: a
        reader finds the old one or the new one, whenever this process dies.
        """
        self._create(key, data, _take_name)

    def _create(self, key: str, data: bytes, publish: Callable[[str, str], bool]) -> bool:
        path = self._path_to_create(key)
        temporary = _temporary_beside(path)
        with reported("create", path, nbytes=len(data)):
            try:
                with open(temporary, "xb", opener=self._opened) as file:
                    _show_life(file.fileno())
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    created = publish(temporary, path)
                _fsync_folder(os.path.dirname(path))
            finally:
                _remove(temporary)
        return created

    def writer(self, key: str, *, nbytes: int) -> PosixWriter:
        """Begin an object of `nbytes`. Raises `StorageError`, code ``storage.full``, where the disk lacks the space."""
        return PosixWriter(self._path_to_create(key), nbytes=nbytes, mode=self._modes[1])

    def reader(self, key: str) -> PosixReader:
        """Open an object for positional reads."""
        return PosixReader(self.path(key))

    def delete(self, key: str) -> bool:
        """Delete an object, durably. Returns False where there was none. Removes a checkpoint's folder with its last
        object.
        """
        folder, path = key.rpartition("/")[0], self._path_of_any(key)
        parent = os.path.dirname(path)
        with reported("delete", path):
            try:
                os.unlink(path)
            except _MISSING:
                return False
            _fsync_folder(parent)
        # Remove only folders below the top level: a writer may create records in `epochs` and `history` at any time,
        # and relies on these folders.
        if "/" in folder:
            with suppress(OSError):
                os.rmdir(parent)
        return True

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """Temporary names directly below `folder`, sorted.

        Lists only files to which nothing was written for `older_than_s` seconds, or whose writer is known to be dead.
        """
        folder = self._folder(folder)
        temporary = (name for name in _names(folder) if name.startswith(TEMPORARY_PREFIX))
        return sorted(name for name in temporary if _is_abandoned(os.path.join(folder, name), older_than_s))

    def _path_of_any(self, key: str) -> str:
        """The path of `key`, which may be a temporary name."""
        folder, _, name = key.rpartition("/")
        return os.path.join(self._folder(folder), name) if name.startswith(TEMPORARY_PREFIX) else self.path(key)

    def _opened(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, self._modes[1])

    def _path_to_create(self, key: str) -> str:
        path = self.path(key)
        with reported("create", path):
            self._make_folder(os.path.dirname(path))
        return path

    def _make_folder(self, folder: str) -> None:
        """Create `folder` and its missing parents. On return its entry and those up to the root's are durable.

        Another process may have created a level and died before its fsync. So existing levels are fsynced, too, once
        per folder and store.
        """
        if folder in self._durable_folders and os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        below_root = folder.startswith(self._root + os.sep)
        if below_root or not os.path.isdir(parent):
            self._make_folder(parent)
        existed = os.path.isdir(folder)
        if not existed:
            # Folders above the root belong to no run: the umask alone decides on them.
            mode = self._modes[0] if below_root else new_folder_mode() if folder == self._root else 0o777
            with suppress(FileExistsError):
                os.mkdir(folder, mode)
        if folder == self._root:
            self._modes = in_folder(os.stat(folder).st_mode)
        try:
            _fsync_folder(parent)
        except PermissionError:
            # This user need not have any rights above a root that existed already: its owner answers for it.
            if below_root or not existed:
                raise
        self._durable_folders.add(folder)


class _OpenFile:
    """A file that is open twice: for direct I/O, where the file system has it, and through the page cache."""

    def __init__(self, path: str, descriptor: int, direct: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._direct = direct
        self.alignment = _BUFFERED_ALIGNMENT if self._direct is None else ALIGNMENT
        if self._direct is None:
            _log.info("no direct I/O for %s: reading and writing through the page cache", path)

    def _direct_for(self, offset: int, data: Bytes) -> int | None:
        """The descriptor for direct I/O, where offset and address are aligned for it; else None."""
        if self.alignment != ALIGNMENT or offset % ALIGNMENT:
            return None
        address: int = data.__array_interface__["data"][0]
        return None if address % ALIGNMENT else self._direct

    def _check_refused(self, error: OSError) -> None:
        """Fall back to the page cache where `error` says that the file system refuses direct I/O; else raise `error`.

        The descriptor for direct I/O stays open, because other threads may be using it.
        """
        if error.errno != errno.EINVAL:
            raise error
        if self.alignment == ALIGNMENT:
            self.alignment = _BUFFERED_ALIGNMENT
            _log.info("direct I/O was refused for %s: continuing through the page cache", self._path)

    def close(self) -> None:
        """Close the file. Does nothing the second time."""
        descriptors = self._descriptor, self._direct
        self._descriptor, self._direct = -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


class PosixWriter(_OpenFile):
    """One file under construction, see `FileWriter`.

    Writes whose offset, address and length are multiples of `alignment` go to the device directly. The incomplete last
    block of an aligned write, and all of an unaligned one, go through the page cache. Threads that write at once must
    write whole aligned blocks, so that one block is never written both ways.
    """

    in_order = False

    def __init__(self, path: str, *, nbytes: int, mode: int) -> None:
        self._temporary = _temporary_beside(path)
        with reported("create", path, nbytes=nbytes):
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                _show_life(descriptor)
                # Reserve the padding of the last block, too: a write that grows the file would serialise the others.
                reserve(descriptor, nbytes + -nbytes % ALIGNMENT)
                super().__init__(path, descriptor, open_direct(self._temporary, os.O_WRONLY))
            except BaseException:
                os.close(descriptor)
                _remove(self._temporary)
                raise

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        with reported("write", self._path):
            for each in data:
                self._write_all(offset, each)
                offset += len(each)

    def _write_all(self, offset: int, data: Bytes) -> None:
        while len(data):
            num_written = self._write_some(offset, data)
            if num_written == 0:
                raise OSError(errno.EIO, "the file system wrote no bytes and reported no error")
            offset += num_written
            data = data[num_written:]

    def _write_some(self, offset: int, data: Bytes) -> int:
        whole = len(data) - len(data) % ALIGNMENT
        direct = self._direct_for(offset, data)
        if direct is not None and whole:
            try:
                return os.pwrite(direct, data[:whole].data, offset)
            except OSError as error:
                self._check_refused(error)
        return os.pwrite(self._descriptor, data.data, offset)

    def publish(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, make it durable, and make it visible under its key.

        Raises `StorageError`, code ``storage.exists``, when the key exists.
        """
        with reported("publish", self._path):
            os.ftruncate(self._descriptor, nbytes)
            os.fsync(self._descriptor)
            if not _give_name(self._temporary, self._path):
                raise exists(self._path)
            _fsync_folder(os.path.dirname(self._path))
        self._finish()

    def abort(self) -> None:
        """Drop the file and all bytes written. Does nothing after `publish`; never raises."""
        self._finish()

    def _finish(self) -> None:
        if self._descriptor < 0:
            return
        # A published file is durable already, and an aborted one need not be, so an error of closing does not matter.
        with suppress(OSError):
            self.close()
        _remove(self._temporary)


class PosixReader(_OpenFile):
    """An open file, see `FileReader`. Reads with aligned offset and address are direct, whatever their length."""

    memory = None

    def __init__(self, path: str) -> None:
        with reported("open", path):
            descriptor = _open_existing(path)
            try:
                self.nbytes = os.fstat(descriptor).st_size
                super().__init__(path, descriptor, open_direct(path, os.O_RDONLY))
            except BaseException:
                os.close(descriptor)
                raise

    def read_at(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises `CorruptError`, code ``corrupt.short``, where the file ends before `out` is full.
        """
        done = 0
        with reported("read", self._path):
            while done < len(out):
                num_read = self._read_some(offset + done, out[done:])
                if num_read == 0:
                    raise short(self._path, start=offset, wanted=len(out), found=done)
                done += num_read

    def _read_some(self, offset: int, out: Bytes) -> int:
        direct = self._direct_for(offset, out)
        if direct is not None:
            try:
                return _read_direct(direct, offset, out)
            except OSError as error:
                self._check_refused(error)
        return os.preadv(self._descriptor, [out.data], offset)


def _read_direct(direct: int, offset: int, out: Bytes) -> int:
    over = len(out) % ALIGNMENT
    if not over:
        return os.preadv(direct, [out.data], offset)
    # The device reads whole blocks. So the same call reads the last one to a block of its own.
    whole = len(out) - over
    with mmap.mmap(-1, ALIGNMENT) as block:
        num_read = min(os.preadv(direct, [out[:whole].data, block] if whole else [block], offset), len(out))
        if num_read > whole:
            out[whole:num_read] = bytearray(block[: num_read - whole])
    return num_read


def _open_existing(path: str) -> int:
    """Open the file `path` for reading. Raises `NotFoundError` where it does not exist or is no regular file."""
    try:
        # O_NONBLOCK, because opening a pipe under the name of a file would wait for a writer. Files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except _MISSING:
        raise not_found(path) from None  # the message says as much as the system's error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise not_found(path)


def _names(folder: str) -> list[str]:
    """All names in `folder`; none where there is no such folder."""
    with reported("list", folder):
        try:
            return os.listdir(folder)
        except _MISSING:
            return []


def _show_life(descriptor: int) -> None:
    """Lock a file under construction, as a sign that its writer lives: the lock ends with this process.

    Only on local file systems, where every process that sees the file sees the lock: a lock server could hang, or
    answer for its own node only.
    """
    if is_local(descriptor):
        with suppress(OSError):  # without a lock, other processes only wait longer until they call the file abandoned
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def _is_abandoned(path: str, older_than_s: float) -> bool:
    """Whether no process writes to the file `path` any more: it is old enough, or its writer's lock ended with it."""
    if _is_older(path, older_than_s):
        return True
    # A writer locks its file just after it has created it.
    return _is_older(path, _UNLOCKED_S) and _is_unlocked(path)


def _is_unlocked(path: str) -> bool:
    with reported("look at", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except _MISSING:
            return False
        try:
            if not is_local(descriptor):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
    return True


def _is_older(path: str, seconds: float) -> bool:
    """Whether the file `path` exists and nobody wrote to it for `seconds`."""
    with reported("look at", path):
        try:
            return seconds <= 0 or os.stat(path).st_mtime <= time.time() - seconds
        except _MISSING:
            return False


def _temporary_beside(path: str) -> str:
    return os.path.join(os.path.dirname(path), TEMPORARY_PREFIX + secrets.token_hex(8))


def _remove(temporary: str) -> None:
    # A temporary name that stays is invisible and harmless, and an error of the caller matters more.
    with suppress(OSError):
        os.unlink(temporary)


def _give_name(temporary: str, path: str) -> bool:
    """Give the file `temporary` the name `path` unless that is taken, atomically. Durable after `_fsync_folder`."""
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        # A network file system may repeat a call whose answer was lost, and then finds the name it has created itself.
        return os.path.samestat(os.lstat(temporary), os.lstat(path))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    try:
        return rename_without_replace(temporary, path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        raise unfenced(path) from error


def _take_name(temporary: str, path: str) -> bool:
    """As `_give_name`, in place of a file that has the name."""
    os.replace(temporary, path)
    return True


def _fsync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders: there is nothing more that we could do.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
