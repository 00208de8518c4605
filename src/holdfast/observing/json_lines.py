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
from holdfast.store.base import Location
from holdfast.store.modes import in_folder, new_folder_mode
from holdfast.telemetry.event_files import SUFFIX, folder_beside


class JsonLines:
    """Appends each event as one line of JSON to a file of this process in `folder` (default: ``<run>.events``, beside
    the folder of the run). Give it to all ranks: the commands read the files of all processes together.

    A line takes some 250 bytes, and a save some seven lines on each rank. The folder is no part of the run: any of its
    files may be deleted at any time.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self._token = secrets.token_hex(4)

    def hear(self, event: Event, source: EventSource) -> None:
        """Append a line. Raises `OSError` if that fails, and `ConfigurationError` if the run is in no folder and none
        was named."""
        folder = self._folder or folder_beside(Location(source.run))
        if folder is None:
            raise ConfigurationError(
                f"the run '{source.run}' is in no folder, so there is none beside it for its events.",
                code="config.events",
                action="Name a folder: holdfast.observing.JsonLines('/shared/events').",
            )
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


def _like_folder(path: str, flags: int) -> int:
    """Open a file of events, which has the mode of its folder when it is new."""
    return os.open(path, flags, in_folder(Path(path).parent.stat().st_mode)[1])
