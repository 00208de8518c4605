"""A board on which the ranks of one node show each other what they have read in the store that all ranks share.

In a large world, every rank of a node needs the same broadcast. The rank that holds the lock of a notice reads it in
the store, and posts it; the others find it on the board. The lock ends with the process that holds it, so another rank
then reads instead.

The board is a cache and nothing else. A rank that finds no notice, or no board, reads in the store itself: ranks whose
containers share no memory, whatever failed on the board, and ranks whose notice another one has removed. So anybody of
this user may remove a board or a notice at any time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - what is made in it is private
_NAME: Final = re.compile(r"[0-9a-f]{16}")
#: Age from which a notice is removed, and the board of a job that was killed.
_OLD_NOTICE_S: Final = 60.0
_OLD_BOARD_S: Final = 3600.0
#: The pause between two looks is this part of the wait so far, within these limits.
_PAUSE_SHARE: Final = 1 / 8
_MIN_PAUSE_S: Final = 0.001
_MAX_PAUSE_S: Final = 0.02
#: Interval at which a waiting rank tries to get the lock, whose holder may have ended. It costs more than a look.
_TRY_S: Final = 0.1
#: Time after which a rank reads in the store itself: the process that reads for it may be stopped.
_PATIENCE_S: Final = 30.0
#: Stores take 0 as "no limit".
_LEAST_S: Final = 0.001

_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
#: Most notices have fewer bytes, and so cost one request.
_READ_NBYTES: Final = 64 * 2**10

_log = logging.getLogger(__name__)


class NodeBoard:
    """The board of one group of ranks on this node. Before `join`, every rank reads in the store itself.

    Its name comes from rank 0, which makes a new one for each process group: so no rank finds what the ranks of an
    earlier job have posted.
    """

    def __init__(self, memory: Path = _MEMORY) -> None:
        self._parent = memory / f"holdfast-boards-{os.geteuid()}"
        self._folder: Path | None = None
        self._has_joined = False
        self._cleaned_s = time.monotonic()
        #: The name for the boards of this group, if this is its rank 0.
        self.name = secrets.token_hex(8)

    def join(self, name: str) -> None:
        """Use the board `name` from now on. Does nothing where memory cannot be used, or after the first call."""
        if self._has_joined or _NAME.fullmatch(name) is None:
            return
        self._has_joined = True
        try:
            _make_private(self._parent)
            _remove_older(self._parent, _OLD_BOARD_S)
            folder = self._parent / name
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            _log.debug("the ranks of this node share no board: %s", error)
            return
        self._folder = folder

    def read(self, key: str, fetch: Callable[[float], bytes | None], timeout_s: float) -> bytes | None:
        """The value of `key` in the store, which never changes there. One rank of this node calls `fetch`, which waits
        for it so many seconds; the others wait for that rank, but no longer than `_PATIENCE_S`. Returns None where the
        value did not come in `timeout_s`."""
        if self._folder is None:
            return fetch(timeout_s)
        notice = f"{self._folder}/{key.replace('/', '.')}"
        start_s = now_s = tries_at_s = time.monotonic()
        while True:
            lock = None
            try:
                data = _posted(notice)
                if data is not None:
                    return data
                if now_s >= tries_at_s:
                    lock, tries_at_s = self._locked(notice), now_s + _TRY_S
            except OSError as error:
                _log.debug("this rank reads in the store itself: %s", error)
                return fetch(max(timeout_s - (time.monotonic() - start_s), _LEAST_S))
            now_s = time.monotonic()
            waited_s = now_s - start_s
            if lock is not None:
                return self._fetched(notice, lock, fetch, max(timeout_s - waited_s, _LEAST_S))
            if waited_s >= min(timeout_s, _PATIENCE_S):
                return fetch(max(timeout_s - waited_s, _LEAST_S))
            pause_s = min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            time.sleep(min(pause_s, timeout_s - waited_s))

    def close(self) -> None:
        """Remove the board."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # other jobs have boards there
                self._parent.rmdir()

    def _locked(self, notice: str) -> int | None:
        """The file of the lock of a notice, if this process gets it now. The lock ends when the file is closed, or with
        the process, and forked children do not inherit it."""
        try:
            fd = os.open(f"{notice}.lock", _LOCK, 0o600)
        except FileNotFoundError:  # another rank has removed the board
            Path(notice).parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(f"{notice}.lock", _LOCK, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (EACCES, EAGAIN):
                return None
            raise
        return fd

    def _fetched(
        self, notice: str, lock: int, fetch: Callable[[float], bytes | None], timeout_s: float
    ) -> bytes | None:
        """The value of a notice whose `lock` this rank has."""
        try:
            with suppress(OSError):  # the lock's last holder may have posted it, and released it, just now
                data = _posted(notice)
                if data is not None:
                    return data
            data = fetch(timeout_s)
            if data is not None:
                self._post(notice, data)
            return data
        finally:
            os.close(lock)

    def _post(self, notice: str, data: bytes) -> None:
        assert self._folder is not None
        try:
            # A name of its own: the lock's file may have been removed as old, and then two ranks post at the same time.
            new = Path(f"{notice}.{secrets.token_hex(4)}.new")
            new.write_bytes(data)
            new.rename(notice)
            if time.monotonic() - self._cleaned_s > _OLD_NOTICE_S:
                self._cleaned_s = time.monotonic()
                _remove_older(self._folder, _OLD_NOTICE_S)
        except OSError as error:
            _log.debug("the other ranks of this node read in the store: %s", error)


def _posted(notice: str) -> bytes | None:
    """The data of a notice, if it is posted."""
    try:
        fd = os.open(notice, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        data = os.read(fd, _READ_NBYTES)
        if len(data) < _READ_NBYTES:
            return data
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return data + file.readall()
    finally:
        os.close(fd)


def _make_private(folder: Path) -> None:
    """Make `folder`, or raise `PermissionError` where another user could change what is in it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user")


def _remove_older(folder: Path, age_s: float) -> None:
    """Remove the files in `folder` that have not changed for `age_s`."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > age_s:
                if stat.S_ISDIR(path.lstat().st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
