"""Faults of the epoch records of a run, which determine its head."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.checkpoint.fault import Fault
from holdfast.errors import CorruptError, IncompatibleError, NotFoundError
from holdfast.format import records
from holdfast.run.history import Run


def epoch_faults(run: Run) -> Iterator[Fault]:
    """The faults of `run` that hide its head from a load, or what came before it: missing and damaged epoch records,
    missing commits from which epochs were opened, and others."""
    present = set(run.epochs())  # before the history: what an epoch was opened from was committed earlier
    history = run.history()
    places = set(history.places())
    found: set[str | None] = set()
    for number in range(1, max(history.newest_epoch() or 0, *present, 0) + 1):
        path = run.storage.path(records.epoch_key(number))
        if number not in present:
            found.add(path)
            yield Fault("epoch.missing", path, f"The record of epoch {number}, '{path}', is missing.")
            continue
        try:
            origin = run.epoch(number).opened_from
        except (CorruptError, NotFoundError, IncompatibleError) as error:
            found.add(path)
            yield Fault.of(error)
            continue
        if origin is not None and origin not in places and not history.is_removed(origin):
            path = run.storage.path(records.commit_key(origin))
            found.add(path)
            text = f"Epoch {number} was opened from {origin}, but the record of that commit, '{path}', is missing."
            yield Fault("commit.missing", path, text)
    try:
        run.head()
    except CorruptError as error:
        if error.path not in found:
            yield Fault.of(error)
