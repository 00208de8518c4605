"""A checkpoint that is newer than the head, sealed, and without a commit.

A save writes the seal right before the commit. So the save is between the two now, or died there, or somebody deleted
the record of the commit: in storage these look alike. In each case the data was durable, and the doctor can commit it.
"""

from __future__ import annotations

import shlex
from typing import Final

from holdfast.errors import CorruptError, IncompatibleError, NotFoundError
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Seal
from holdfast.run.history import Run

#: Most seals that a look reads, so that its requests do not grow with the history.
_MAX_SEALS: Final = 8


def lost_head(run: Run, head: Commit, *, newest: int) -> str | None:
    """A text about a sealed checkpoint of epoch `newest`, the newest, that is beyond the `head` and has no commit; None
    where none is found.

    Looks at the folders whose steps follow the head's. One listing, and usually nothing more; after a rollback to an
    early step it may overlook one.
    """
    folders = ((records.parse_folder(name), name) for name in run.storage.list(CHECKPOINTS))
    steps = sorted((parsed[0], name) for parsed, name in folders if parsed is not None and parsed[0] >= head.step)
    for _, name in [each for each in steps if each[1] != head.checkpoint][:_MAX_SEALS]:
        key = records.checkpoint_key(name, SEAL_NAME)
        try:
            data = run.storage.read(key, limit=records.MAX_SEAL_NBYTES)
            seal = records.decode(data, Seal, path=run.storage.path(key))
        except (CorruptError, IncompatibleError, NotFoundError):
            continue  # unfinished, or given up
        place = seal.place
        is_beyond = place.epoch == newest and place > head.place
        if is_beyond and not run.is_committed(place) and not run.is_removed(place):
            path, url = run.storage.path(f"{CHECKPOINTS}/{name}"), run.storage.location.url
            return (
                f"'{path}' (place {place}, step {seal.step}) is sealed and newer than the head {head.place} of '{url}'"
                ", but has no commit: its save is just ending, or died right before its commit, or the record was "
                f"deleted. Look with: holdfast doctor {shlex.quote(url)}. With --finish that makes it the head; do so "
                "before the next save."
            )
    return None
