"""Repair of a commit's damaged record from the checkpoint that it published.

The record is a function of the manifest and the data files, so the checkpoint determines its bytes.
"""

from __future__ import annotations

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Place, Seal
from holdfast.run.complete import check_files, encode_seal, read_manifest, seal_and_commit
from holdfast.run.history import Run
from holdfast.run.uncommitted import UNREADABLE, RunRecords


def published_folder(run: Run, known: RunRecords, place: Place) -> str | None:
    """The folder of the checkpoint that is sealed at `place` and that no readable commit names; None without one."""
    for folder in run.storage.list(CHECKPOINTS):
        if records.parse_folder(folder) is None or known.is_committed(folder):
            continue
        key = records.checkpoint_key(folder, SEAL_NAME)
        try:
            if records.decode(run.storage.read(key), Seal, path=run.storage.path(key)).place == place:
                return folder
        except UNREADABLE:
            continue
    return None


def commit_anew(run: Run, place: Place, folder: str) -> Commit:
    """Replace the damaged record of the commit at `place` by a new one, made from the checkpoint in `folder`.

    Blocking; reads the whole checkpoint first. Durable on return. A sound record stays. After an interruption the
    record is missing, and the doctor can finish the checkpoint.

    Raises:
        CorruptError: the checkpoint is damaged, too.
        ConfigurationError: the checkpoint is not that of `place` (``config.remedy``).
    """
    try:
        return run.commit(place)
    except CorruptError:
        stored = read_manifest(run, folder)
    files = check_files(run, stored, deep=True)
    seal = stored.key(SEAL_NAME)
    if stored.manifest.place != place or run.storage.read(seal) != encode_seal(stored, files):
        raise ConfigurationError(
            f"'{run.storage.path(seal)}' does not seal the checkpoint that was committed at {place}.",
            code="config.remedy",
            action="Restore the record from another copy of the run.",
            path=run.storage.path(seal),
        )
    run.storage.delete(records.commit_key(place))
    return seal_and_commit(run, stored, files)
