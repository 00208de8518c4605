"""Faults of the epoch records of a run, which determine its head."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.checkpoint.fault import Fault
from holdfast.errors import CorruptError, IncompatibleError, NotFoundError
from holdfast.format import records
from holdfast.run.history import Run


def epoch_faults(run: Run) -> Iterator[Fault]:
    """The faults of `run` that hide its head from a load: missing and damaged epoch records, and others."""
    present = set(run.epochs())
    found: set[str | None] = set()
    for number in range(1, max(run.history().newest_epoch() or 0, *present, 0) + 1):
        path = run.storage.path(records.epoch_key(number))
        if number not in present:
            found.add(path)
            yield Fault("epoch.missing", path, f"The record of epoch {number}, '{path}', is missing.")
            continue
        try:
            run.epoch(number)
        except (CorruptError, NotFoundError, IncompatibleError) as error:
            found.add(path)
            yield Fault.of(error)
    try:
        run.head()
    except CorruptError as error:
        if error.path not in found:
            yield Fault.of(error)
