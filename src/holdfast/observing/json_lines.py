"""Events as lines of JSON in files, which `holdfast report`, `holdfast top` and `holdfast trace` read."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import msgspec

from holdfast.checkpointer.events import Event, EventSource
from holdfast.errors import ConfigurationError
from holdfast.observing.recording import record_of
from holdfast.store.base import SCHEME, Location
from holdfast.store.modes import in_folder, new_folder_mode
from holdfast.store.urls import absolute, local_path
from holdfast.telemetry.event_files import SUFFIX, folder_beside


class JsonLines:
    """Appends each event as one line of JSON to a file of this process in `folder` (default: ``<run>.events``, beside
    the folder of the run). Give it to all ranks: the commands read the files of all processes together.

    A line takes some 250 bytes, and a save some seven lines on each rank. The folder is no part of the run: any of its
    files may be deleted at any time.

    Raises `ConfigurationError`: ``config.events`` if `folder` is the URL of a bucket. A `Checkpointer` of a run in a
    bucket raises it too, when it gets a listener for which no folder was named.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else _local(os.fspath(folder))
        self._token = secrets.token_hex(4)

    def check(self, run: str) -> None:
        """Raise `ConfigurationError`, code ``config.events``, if `run` is in no folder and none was named. A
        `Checkpointer` calls this when it is made."""
        self._folder_for(run)

    def hear(self, event: Event, source: EventSource) -> None:
        """Append a line. Raises `OSError` if that fails, and as `check`."""
        folder = self._folder_for(source.run)
        if not folder.is_dir():
            folder.mkdir(mode=new_folder_mode(), parents=True, exist_ok=True)
        line = msgspec.json.encode(record_of(event, source)) + b"\n"
        path = folder / f"rank-{source.rank:05d}-{source.process}-{self._token}{SUFFIX}"
        # Opened for each line: the file may be moved away or deleted meanwhile, and few events happen.
        with open(path, "ab", buffering=0, opener=_like_folder) as file:
            written = file.write(line)
            if written < len(line):  # or the next line would begin in the middle of this one
                file.truncate(file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _folder_for(self, run: str) -> Path:
        folder = self._folder or folder_beside(Location(run))
        if folder is None:
            raise _no_folder(f"the run '{run}' is in no folder, so there is none beside it for its events.")
        return folder


def _local(folder: str) -> Path:
    """The folder of a file system that the user named."""
    path = local_path(folder)
    if SCHEME.match(path):
        raise _no_folder(f"'{folder}' is no folder of a file system, and JsonLines appends to files.")
    return Path(absolute(path))


def _no_folder(what: str) -> ConfigurationError:
    return ConfigurationError(
        what, code="config.events", action="Name a folder: holdfast.observing.JsonLines('/shared/events')."
    )


def _like_folder(path: str, flags: int) -> int:
    """Open a file of events, which has the mode of its folder when it is new."""
    return os.open(path, flags, in_folder(Path(path).parent.stat().st_mode)[1])
