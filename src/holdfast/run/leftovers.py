"""Temporary files of a run: of writers that died, or that are still at work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.format.hold_records import PINS
from holdfast.format.quarantine_records import QUARANTINE
from holdfast.format.records import CHECKPOINTS, EPOCHS, HISTORY, REPLACED
from holdfast.format.reference_records import REFERENCES
from holdfast.format.resume_records import RESUMES
from holdfast.run.save_requests import REQUESTS
from holdfast.store.base import Store

#: The folders of a run.
FOLDERS: Final = (CHECKPOINTS, EPOCHS, HISTORY, REQUESTS, PINS, RESUMES, QUARANTINE, REFERENCES, REPLACED)


def temporary_keys(storage: Store, *, older_than_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Each folder of a run that has temporary files, ``""`` being the root, with their keys; `older_than_s` is as for
    `Store.leftovers`."""
    checkpoints = (f"{CHECKPOINTS}/{name}" for name in storage.list(CHECKPOINTS))
    for folder in ("", *FOLDERS, *checkpoints):
        names = storage.leftovers(folder, older_than_s=older_than_s)
        if names:
            yield folder, [f"{folder}/{name}" if folder else name for name in names]
