"""The lock on a folder that an export or an import writes to, so that of two calls at once one succeeds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.store.linux import is_local
from holdfast.store.posix_errors import reported


@contextmanager
def only_writer(folder: Path | None, doing: str) -> Iterator[None]:
    """A ``with`` block in which no other call writes to `folder`, which exists; the lock ends with this process. Does
    nothing where other machines see the folder, and for None: there, the later call stops the earlier.

    `doing`, such as "writes an export to", is for the error: `ConfigurationError`, code ``config.destination``, where
    another call writes to it.
    """
    if folder is None:
        yield
        return
    with reported("lock", str(folder)):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if is_local(descriptor):
            _lock(descriptor, folder, doing)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, doing: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"another call {doing} {folder} now.",
            code="config.destination",
            action="Wait for that one, or name another folder.",
            path=str(folder),
        ) from None
