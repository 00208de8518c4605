"""Files of recorded events: one of each process, one line for each event, in a folder beside the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from holdfast.decoding import decode_json
from holdfast.errors import NotFoundError
from holdfast.store.base import Location
from holdfast.telemetry.event_record import EventRecord

SUFFIX: Final = ".jsonl"
#: Most bytes that are read of all files of a folder together, and the least that are read of each: the newest ones.
MOST_NBYTES: Final = 128 * 2**20
_LEAST_NBYTES: Final = 4096


class RecordedEvents(NamedTuple):
    """The events in a folder, in the order in which each process recorded them. `num_damaged` lines cannot be read, and
    of `num_cut` files only the newest part was read."""

    records: list[EventRecord]
    num_damaged: int = 0
    num_cut: int = 0


def folder_beside(run: Location) -> Path | None:
    """The folder in which the events of `run` are recorded unless the user names another one: ``<run>.events``, beside
    the run. None for a run that is in no folder."""
    folder = run.folder
    return None if folder is None else folder.with_name(f"{folder.name}.events")


def read_events(folder: Path, *, most_nbytes: int = MOST_NBYTES, of_first_rank_only: bool = False) -> RecordedEvents:
    """The events that are recorded in `folder`; none where there is no such folder. If its files are larger than
    `most_nbytes`, the newest part of the large ones is read; the files of the first rank, which tell of all steps, get
    half of that. With `of_first_rank_only`, no others are read. Raises `OSError` for a file that cannot be read."""
    records: list[EventRecord] = []
    num_damaged = num_cut = 0
    for path, share in _shares(folder, most_nbytes, of_first_rank_only=of_first_rank_only):
        try:
            lines, is_cut = _newest_lines(path, share)
        except FileNotFoundError:  # somebody has just deleted it, which is allowed
            continue
        num_cut += is_cut
        for line in lines:
            try:
                records.append(decode_json(line, EventRecord))
            except (msgspec.DecodeError, RecursionError):  # the latter for a line with thousands of brackets
                num_damaged += 1
    return RecordedEvents(records, num_damaged, num_cut)


def _shares(folder: Path, most_nbytes: int, *, of_first_rank_only: bool) -> list[tuple[Path, int]]:
    """The files of events, and how much is read of each."""
    sizes: dict[Path, int] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):  # somebody has just deleted it, which is allowed
            sizes[path] = path.stat().st_size
    first_rank = next((_rank_in(path) for path in sizes), "")
    of_first = {path: size for path, size in sizes.items() if _rank_in(path) == first_rank}
    others = {path: size for path, size in sizes.items() if path not in of_first and not of_first_rank_only}
    shares = _fair(of_first, most_nbytes // 2 if others else most_nbytes)
    used = sum(min(sizes[path], share) for path, share in shares.items())
    shares |= _fair(others, max(most_nbytes - used, 0))
    return [(path, shares[path]) for path in sizes if path in shares]


def _rank_in(path: Path) -> str:
    """The part of the file's name that has the rank."""
    return "-".join(path.name.split("-")[:2])


def _fair(sizes: Mapping[Path, int], most_nbytes: int) -> dict[Path, int]:
    """Divide `most_nbytes` among files. A small one leaves what it does not need to larger ones; if it grows before
    somebody reads it, it still has its share."""
    shares: dict[Path, int] = {}
    for number, path in enumerate(sorted(sizes, key=lambda path: sizes[path])):
        shares[path] = max(most_nbytes // (len(sizes) - number), _LEAST_NBYTES)
        most_nbytes = max(most_nbytes - min(sizes[path], shares[path]), 0)
    return shares


def no_events(folder: Path | None, run: str) -> NotFoundError:
    """The error for a run of which no events are recorded in `folder`."""
    if folder is None:  # a bucket has no folder beside it, so `JsonLines` needs the name of one
        what, listener, named = f"'{run}' is in no folder, so there are no events beside it.", "'/shared/events'", ""
    else:
        what, listener, named = f"no events of '{run}' are recorded in '{folder}'.", "", " if it has another one"
    return NotFoundError(
        what,
        code="not_found.events",
        action=f"Give the Checkpointer listeners=[JsonLines({listener})] from holdfast.observing, and name the folder "
        f"with --events{named}.",
        path=run,
    )


def _newest_lines(path: Path, most_nbytes: int) -> tuple[list[bytes], bool]:
    """The last whole lines of a file, `most_nbytes` of them at most, and whether others come before them. The process
    may be writing a line now, or may have been killed while it did: so the part after the last newline is no line."""
    with path.open("rb") as file:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(max(nbytes - most_nbytes, 0))
        data = file.read(most_nbytes)
    lines = data.split(b"\n")[:-1]
    is_cut = nbytes > most_nbytes
    return lines[1:] if is_cut else lines, is_cut
