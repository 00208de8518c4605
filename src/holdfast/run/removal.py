"""Deletion of checkpoints: a crash in the middle never leaves a visible checkpoint that cannot be loaded.

There are two kinds, and for each the creation of one record makes the checkpoint invisible before any file is deleted:

*a committed checkpoint*: its tombstone in ``history/`` hides its place from every reader at once. Then the commit, the
seal, the data files and last the manifest are deleted; as long as the manifest exists, the rest can be told from an
unfinished save. The tombstone stays for ever. A process that found the checkpoint complete before, slept, and now
writes the seal or the commit again (their names are free) changes nothing that a reader sees.

*an unfinished save*: a record that says so takes the name of its seal. From then on nobody can seal the checkpoint, and
so nobody can commit it. If the seal existed first, the checkpoint is finished or being finished, and nothing is
deleted. The record stays for ever, too; the other files are deleted, the manifest last.

A deletion of the first kind writes nothing but names: where storage is full, its records are empty, so it can begin
there. One of the second kind needs room for the record that takes the name of the seal.

Still files that other checkpoints refer to stay, with the manifest; `holdfast.run.references` says why none is deleted
that a save has just begun to refer to.

The head, a pinned checkpoint and one that a reader uses are not deleted. `holdfast.run.holds` says why that is safe
while others pin, read, and open epochs at the same moment. A place that an epoch was opened from may be deleted once it
is not the head any more: the epoch's record goes on to say where the lineage continues.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import ConfigurationError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Place
from holdfast.format.tombstones import Abandoned, Removed, removed_key
from holdfast.run.complete import is_abandoned
from holdfast.run.history import Run
from holdfast.run.holds import check_unheld, check_unread, create_by_name, removal_announced
from holdfast.run.quarantine import lift
from holdfast.run.references import delete_references_of, needed_folders


def remove_checkpoint(run: Run, commit: Commit) -> bool:
    """Delete the checkpoint of `commit`; durable on return. A second call finishes a deletion that a crash interrupted.

    From the first change on, no reader sees the checkpoint any more. Returns False where its still files stay, because
    other checkpoints refer to them.

    Raises:
        ConfigurationError: it is the head (``config.needed``), it is pinned (``config.pinned``), or a reader uses it
            (``config.in_use``).
    """
    return remove_place(run, commit.place, commit.checkpoint)


def check_removable(run: Run, place: Place) -> None:
    """Raise `ConfigurationError` where the checkpoint at `place` is pinned, used by a reader, or the head."""
    check_unheld(run.storage, place)
    if run.head_place() == place:
        raise ConfigurationError(
            f"checkpoint {place} of '{run.storage.location}' cannot be removed: it is the head of the run.",
            code="config.needed",
            action="Choose another one; a rollback to an older checkpoint makes that one the head.",
            path=run.storage.location.url,
        )


def remove_place(run: Run, place: Place, folder: str) -> bool:
    """Hide the commit at `place`, if any, then delete the commit and the files in ``checkpoints/<folder>``. Returns
    False where still files and the manifest stay, because other checkpoints refer to these files: a later call goes on.

    Raises as `check_removable`, before the first change. If the lease of a reader came at the same moment, this raises
    ``config.in_use`` when the commit is hidden already; all files stay, and a later call goes on.
    """
    if not run.is_removed(place):
        _hide(run, place, folder)
    # A reader that has not found the tombstone had its lease before this look.
    check_unread(run.storage, place)
    run.storage.delete(records.commit_key(place))
    lift(run.storage, place)
    run.storage.delete(records.checkpoint_key(folder, SEAL_NAME))
    return _delete_files(run, folder)


def _hide(run: Run, place: Place, folder: str) -> None:
    """Create the tombstone of `place`, unless somebody needs its checkpoint."""
    check_removable(run, place)
    with removal_announced(run.storage, place) as check_in_time:
        # Once more: somebody who pins the checkpoint, or opens an epoch from it, may not have seen the notice.
        check_removable(run, place)
        check_in_time()
        create_by_name(run.storage, removed_key(place), Removed(place=place, checkpoint=folder))


def abandon(run: Run, folder: str) -> None:
    """Delete the unfinished checkpoint in ``checkpoints/<folder>``; durable on return.

    Raises:
        ConfigurationError: another process sealed it meanwhile, so it is complete; code ``config.needed``.
    """
    key = records.checkpoint_key(folder, SEAL_NAME)
    # Look first: going on with an older deletion must be possible on a full disk.
    exists = run.storage.nbytes(key) is not None
    if not exists:
        _delete_leftovers(run, folder)  # nothing of them was published, and the record may need their space
    created = not exists and run.storage.create(key, records.encode(Abandoned(checkpoint=folder)))
    if not created and not is_abandoned(run.storage.read(key)):
        raise ConfigurationError(
            f"the checkpoint is not removed: another process has completed it, so '{run.storage.path(key)}' exists.",
            code="config.needed",
            action="Finish the checkpoint first (holdfast doctor --finish), then remove it (holdfast rm).",
            path=run.storage.path(key),
        )
    _delete_files(run, folder)


def _delete_files(run: Run, folder: str) -> bool:
    """Delete the data files, temporary files of dead writers, the references, and last the manifest; keep files of
    other programs. Keeps still files that other checkpoints need, and then the manifest too, and returns False.

    Nobody begins to refer to the files any more: the checkpoint is hidden, or was never sealed.
    """
    names = run.storage.list(f"{CHECKPOINTS}/{folder}")
    are_needed = _are_needed(run, folder, names)
    for name in names:
        if _goes_with_data(name, are_needed=are_needed):
            run.storage.delete(records.checkpoint_key(folder, name))
    _delete_leftovers(run, folder)
    # Before the manifest, without which nobody would go on with this deletion.
    delete_references_of(run, folder)
    if not are_needed:
        run.storage.delete(records.checkpoint_key(folder, fmt.NAME))
    return not are_needed


def _are_needed(run: Run, folder: str, names: Collection[str]) -> bool:
    """Whether others refer to still files among the `names` in a folder."""
    return any(map(fmt.is_still_name, names)) and folder in needed_folders(run)


def _goes_with_data(name: str, *, are_needed: bool) -> bool:
    """Whether a deletion takes the file of this name with the data files. If `are_needed`, still files stay."""
    return fmt.is_mark_name(name) or (fmt.is_file_name(name) and not (are_needed and fmt.is_still_name(name)))


def doomed_keys(run: Run, place: Place | None, folder: str) -> list[str]:
    """The keys in ``checkpoints/<folder>`` that `remove_place` would delete, or `abandon` without a `place`. Changes
    nothing."""
    names = run.storage.list(f"{CHECKPOINTS}/{folder}")
    are_needed = _are_needed(run, folder, names)
    own = ([] if place is None else [SEAL_NAME]) + ([] if are_needed else [fmt.NAME])
    taken = [name for name in names if name in own or _goes_with_data(name, are_needed=are_needed)]
    taken += run.storage.leftovers(f"{CHECKPOINTS}/{folder}")
    return [records.checkpoint_key(folder, name) for name in taken]


def _delete_leftovers(run: Run, folder: str) -> None:
    for name in run.storage.leftovers(f"{CHECKPOINTS}/{folder}"):
        run.storage.delete(records.checkpoint_key(folder, name))
