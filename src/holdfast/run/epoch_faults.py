"""What is wrong with the epoch records of a run, which say what its head is."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.checkpoint.fault import Fault
from holdfast.errors import CorruptError, IncompatibleError, NotFoundError
from holdfast.format import records
from holdfast.run.history import Run


def epoch_faults(run: Run) -> Iterator[Fault]:
    """What is wrong with the epoch records of `run`, which say what its head is: missing ones, and damaged ones."""
    present = set(run.epochs())
    for number in range(1, max(present, default=0) + 1):
        path = run.storage.path(records.epoch_key(number))
        if number not in present:
            yield Fault("epoch.missing", path, f"The record of epoch {number}, '{path}', is missing.")
            continue
        try:
            run.epoch(number)
        except (CorruptError, NotFoundError, IncompatibleError) as error:
            yield Fault.of(error)
