"""Deleting checkpoints, so that a crash in between leaves no visible one that cannot be loaded.

Two kinds are deleted, and each is made invisible by one creation before anything of it is touched:

*a committed checkpoint*: its tombstone in ``history/`` hides its place from every reader at once. Then the commit, the
seal, the data files and last the manifest go; as long as it is there, what is left can be told from an unfinished save.
The tombstone stays for ever. A process that found the checkpoint complete before, slept, and now writes the seal or the
commit again (their names are free) changes nothing that a reader sees.

*an unfinished save*: the name of its seal is taken by a record that says so. From then on nobody can seal it, hence not
commit it. If the seal was there first, the checkpoint is finished or being finished, and nothing is deleted. That
record stays for ever too; the other files go, the manifest last.
"""

from __future__ import annotations

from holdfast.errors import ConfigurationError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Place
from holdfast.format.tombstones import Abandoned, Removed, removed_key
from holdfast.run.complete import is_abandoned
from holdfast.run.history import Run


def remove_checkpoint(run: Run, commit: Commit) -> None:
    """Delete the checkpoint of `commit`; durable on return. Doing it again finishes what a crash interrupted.

    It is not visible any more, to anybody, from the first change on. Jobs that are reading it fail.

    Raises:
        ConfigurationError: it is the head, or an epoch was opened from it; code ``config.needed``.
    """
    check_unneeded(run, commit.place)
    remove_place(run, commit.place, commit.checkpoint)


def check_unneeded(run: Run, place: Place) -> None:
    """Return only where neither the head nor an epoch needs the checkpoint at `place`."""
    # In this order: an epoch that is opened in between is among those looked at below.
    if next(run.lineage_places(), None) == place:
        raise _needed(run, place, "it is the head of the run")
    for number in run.epochs():
        if number > place.epoch and run.epoch(number).opened_from == place:
            raise _needed(run, place, f"epoch {number} was opened from it")


def remove_place(run: Run, place: Place, folder: str) -> None:
    """Hide whatever is committed at `place`, then delete the commit and what is in ``checkpoints/<folder>``.

    An epoch that is opened from the place at this very moment has the next older checkpoint as its head then.
    """
    run.storage.create(removed_key(place), records.encode(Removed(place=place, checkpoint=folder)))
    run.storage.delete(records.commit_key(place))
    run.storage.delete(records.checkpoint_key(folder, SEAL_NAME))
    _delete_files(run, folder)


def abandon(run: Run, folder: str) -> None:
    """Delete the unfinished checkpoint in ``checkpoints/<folder>``; durable on return.

    Raises:
        ConfigurationError: it was sealed meanwhile, so it is complete; code ``config.needed``.
    """
    key = records.checkpoint_key(folder, SEAL_NAME)
    created = run.storage.create(key, records.encode(Abandoned(checkpoint=folder)))
    if not created and not is_abandoned(run.storage.read(key)):
        raise ConfigurationError(
            f"'{run.storage.path(key)}' exists: the checkpoint was completed meanwhile, and is kept.",
            code="config.needed",
            action="Finish it instead; once it is committed, it can be removed as a checkpoint.",
            path=run.storage.path(key),
        )
    _delete_files(run, folder)


def _delete_files(run: Run, folder: str) -> None:
    """Delete the data files, what died while it was written, and last the manifest; files of others stay."""
    data = [name for name in run.storage.list(f"{CHECKPOINTS}/{folder}") if fmt.is_file_name(name)]
    leftovers = run.storage.leftovers(f"{CHECKPOINTS}/{folder}")
    for name in (*data, *leftovers, fmt.NAME):
        run.storage.delete(records.checkpoint_key(folder, name))


def _needed(run: Run, place: Place, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"checkpoint {place} of '{run.storage.location}' is not removed: {why}.",
        code="config.needed",
        action="Choose another one; a rollback to an older checkpoint makes that one the head.",
        path=run.storage.location.url,
    )
