"""References of a run: the still files of earlier checkpoints that a new one may need, and what keeps them.

Somebody who refers to a checkpoint and somebody who deletes it work beside each other without a lock. Each first
creates a record, and then looks for the record of the other:

* *A save* creates a record for each folder that holds one of its candidates, and then looks whether the head, through
  which it came to them, has no tombstone, and still its own record for each other folder. Else the save refers to
  nothing.
* *A deletion* creates its tombstone, then lists all tombstones, then lists leases and records. It keeps the still files
  that a record needs, unless the referring checkpoint is in the list of tombstones, and no reader has a lease on it.

So take a save that found no tombstone of the head P, and the deletion of the folder K that holds the file. If P's
tombstone is in the deletion's list, or P is what it deletes, then the tombstone is older than the list of records, and
the record of the save is older than the tombstone: the deletion finds it. If P's tombstone is not in the list, P's own
record keeps K, unless `compact` has deleted it before the deletion lists the records: then the save, which has seen it
since, created its own record even earlier. In all cases the file stays.

A record without a checkpoint is left by a process that died between the record and the manifest. Once there is a newer
epoch, that checkpoint can never be committed, and the record does not count any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from holdfast.errors import CorruptError, IncompatibleError, NotFoundError, StorageError
from holdfast.format import records
from holdfast.format.digests import DigestKind, digests_of
from holdfast.format.manifest import Candidate
from holdfast.format.records import CHECKPOINTS, FileSeal, Place
from holdfast.format.reference_records import Reference, ReferenceName
from holdfast.run.history import Run
from holdfast.run.holds import Holds, create_by_name
from holdfast.run.quarantine import in_quarantine
from holdfast.run.reference_names import references_of

_log = logging.getLogger(__name__)


def candidates_for(
    run: Run, files: Collection[int], *, place: Place, folder: str, digests: DigestKind
) -> tuple[Candidate, ...]:
    """The still files of earlier checkpoints that the data files with the numbers `files` may turn out to equal, for
    the new checkpoint at `place` in `folder`: those of the head. From then on, deletions keep them for it. `digests` is
    the kind of the new checkpoint: where the head has another one, no file of it can be equal.

    Call it before the manifest is published. Some requests where there are `files`, else none. Where a request fails,
    there are no candidates: a disk that cannot read an earlier checkpoint may be able to take a new one.
    """
    if not files:
        return ()
    try:
        return _found_for(run, files, place=place, folder=folder, digests=digests)
    except StorageError as error:
        _log.warning("checkpoint %s refers to no earlier one, and is written whole: %s", place, error.message)
        return ()


def _found_for(
    run: Run, files: Collection[int], *, place: Place, folder: str, digests: DigestKind
) -> tuple[Candidate, ...]:
    head = _head_files(run)
    if head is None or head.digests is not digests or head.place in in_quarantine(run.storage):
        return ()
    kept = _kept_for(run, head)
    found = tuple(
        Candidate(index, _holder(each, head.folder, kept), each.content)
        for index, each in enumerate(head.files)
        if index in files and isinstance(each.content, str)
    )
    holders = {each.checkpoint for each in found}
    for holder in sorted(holders):
        record = Reference(place=place, checkpoint=folder, holder=holder, created=records.now())
        create_by_name(run.storage, ReferenceName(place, folder, holder).key, record)
    is_kept = not found or (not run.is_removed(head.place) and holders - {head.folder} <= _kept_for(run, head))
    return found if is_kept else ()


def needed_folders(run: Run) -> frozenset[str]:
    """The folders that hold still files which other checkpoints need. A few requests.

    Whoever deletes such files MUST call this after the tombstone of their checkpoint was created.
    """
    return frozenset(each.holder for each, counts in _judged(run) if counts)


def ended_references(run: Run) -> list[str]:
    """The keys of the records that do not count any more. A few requests."""
    return [each.key for each, counts in _judged(run) if not counts]


def _judged(run: Run) -> list[tuple[ReferenceName, bool]]:
    """All records, each with whether it counts. Lists them last."""
    newest, removed = run.newest_epoch() or 0, run.history().removed()
    folders = frozenset(run.storage.list(CHECKPOINTS))
    # A reader of a checkpoint that is removed meanwhile needs its files as long as he has his lease.
    gone = removed - {lease.place for lease in Holds.of(run.storage).leases}
    return [
        (each, each.place not in gone and (each.place.epoch >= newest or each.checkpoint in folders))
        for each in references_of(run.storage)
    ]


def delete_references_of(run: Run, folder: str) -> None:
    """Delete the records of the checkpoint in `folder`, which needs nothing any more."""
    for each in references_of(run.storage):
        if each.checkpoint == folder:
            run.storage.delete(each.key)


class _HeadFiles(NamedTuple):
    """The head's place, folder, data files and kind of digests."""

    place: Place
    folder: str
    files: Sequence[FileSeal]
    digests: DigestKind


def _head_files(run: Run) -> _HeadFiles | None:
    """The data files of the head; None where there is no sound one: then everything is written."""
    with suppress(CorruptError, NotFoundError, IncompatibleError):
        head = run.head()
        if head is not None:
            seal = run.locate(head).seal
            return _HeadFiles(head.place, head.checkpoint, seal.files, digests_of(seal.reader_features))
    return None


def _kept_for(run: Run, head: _HeadFiles) -> frozenset[str]:
    """The folders that the records of the head keep for it."""
    return frozenset(each.holder for each in references_of(run.storage) if each.checkpoint == head.folder)


def _holder(file: FileSeal, folder: str, kept: Collection[str]) -> str:
    """The folder that holds a data file of the checkpoint in `folder`. After `compact`, which deletes the records, that
    is its own one."""
    return file.checkpoint if isinstance(file.checkpoint, str) and file.checkpoint in kept else folder
