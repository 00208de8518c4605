"""Helpers of commands about recorded events: the folder of the events, and the file for the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.cli.screen import console, say
from holdfast.errors import ConfigurationError, StorageError
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.telemetry.event_files import MOST_NBYTES, RecordedEvents, folder_beside, read_events
from holdfast.wording import count

#: The part of an earlier output that is looked at.
_BEGINNING_NBYTES: Final = 4096


def events_folder(run: Run, named: str) -> Path | None:
    """The folder with the events of `run`: the one that is `named`, else the one beside the run. Links that led to the
    run are resolved."""
    if named:
        return Path(named)
    location = run.storage.location
    return folder_beside(location if location.folder is None else Location(run.storage.resolved()))


def events_in(
    folder: Path | None, *, most_nbytes: int = MOST_NBYTES, of_first_rank_only: bool = False
) -> RecordedEvents:
    """The events in `folder`, the newest `most_nbytes` of them, of all ranks or the first one. Raises `StorageError`
    where they cannot be read."""
    if folder is None:
        return RecordedEvents([])
    try:
        return read_events(folder, most_nbytes=most_nbytes, of_first_rank_only=of_first_rank_only)
    except OSError as error:
        raise StorageError(
            f"the events in '{folder}' cannot be read: {error.strerror or error}.",
            code="storage.events",
            action="Find out who may read this folder, or copy it to another place and name that with --events.",
            path=str(folder),
        ) from error


def remarks_about(events: RecordedEvents) -> list[str]:
    """Remarks for the reader about events that are missing."""
    remarks = []
    if events.num_damaged:
        remarks.append(f"{count(events.num_damaged, 'line')} of recorded events cannot be read.")
    if events.num_cut:
        remarks.append(f"Of {count(events.num_cut, 'file')} of events only the newest part was read.")
    return remarks


def output_of(run: Run, named: str, suffix: str) -> Path:
    """The file to write: the one that is `named`, or one in the working directory, called after the run."""
    return Path(named) if named else Path(f"{Path(run.storage.location.url).name}{suffix}")


def write_output(path: Path, data: bytes, *, is_own: Callable[[bytes], bool]) -> None:
    """Write a file, and tell where it is. It may take the place of an earlier one of the same command, whose beginning
    `is_own`.

    Raises `ConfigurationError`, code ``config.output``, where another file lies there, and `StorageError` if it cannot
    be written.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                beginning = file.read(_BEGINNING_NBYTES)
            if beginning and not is_own(beginning):
                raise ConfigurationError(
                    f"'{path}' holds something else, which would be lost.",
                    code="config.output",
                    action="Name another file with --out, or move this one away.",
                    path=str(path),
                )
        path.write_bytes(data)
    except OSError as error:
        raise StorageError(
            f"'{path}' cannot be written: {error.strerror or error}.",
            code="storage.output",
            action="Name a file in a folder that exists and takes files, with room for it.",
            path=str(path),
        ) from error
    say(console(), f"wrote {path}")
