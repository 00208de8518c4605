"""The second reading of a file that a rank has found damaged, before its checkpoint goes into quarantine.

A node with bad memory finds damage in sound files, and must not cost a run its newest checkpoint. So the first rank,
mostly on another node, reads the file too.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_file
from holdfast.errors import CorruptError, HoldfastError, NotFoundError, StorageError
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.run.quarantine import HARMLESS, quarantine
from holdfast.store.timed import TimedStore

_log = logging.getLogger(__name__)


def remember_damage(storage: TimedStore, run: Run, place: Place, damage: HoldfastError) -> None:
    """As `quarantine_if_damaged`, in the time that `storage` has left; warns where the file is sound here."""
    here, path = Run(storage.untimed, run.marker), damage.path or str(storage.location)
    with suppress(StorageError):
        if not storage.limit.run("verify", path, lambda: quarantine_if_damaged(here, place, damage)):
            _log.warning("'%s' is sound when rank 0 reads it: look at the node that found it damaged", path)


def quarantine_if_damaged(run: Run, place: Place, damage: HoldfastError) -> bool:
    """Put the checkpoint at `place`, in which a rank has found `damage`, into quarantine if this process finds it too.

    Reads the file that `damage` names. Returns False where it is sound here. Never raises for trouble of the store.
    """
    with suppress(StorageError):
        if run.is_removed(place):
            return True
        if not _is_damaged(run, place, damage.path or ""):
            return False
        quarantine(run, place, damage.message)
    return True


def _is_damaged(run: Run, place: Place, path: str) -> bool:
    """Whether the checkpoint at `place` is damaged in its records or in the data file at `path`."""
    try:
        checkpoint = Checkpoint(run.locate(run.commit(place)))
    except (CorruptError, NotFoundError):
        return True
    for index, file in enumerate(checkpoint.seal.files):
        if checkpoint.path(file.name) == path:
            return any(fault.code not in HARMLESS for fault in verify_file(checkpoint, index))
    return False
