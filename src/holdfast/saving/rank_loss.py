"""The commit of a save in which a rank died: storage alone tells whether the checkpoint is complete.

When a rank dies between its last byte and the commit, all data files are durable and only the commit is missing. So
every remaining rank checks the files: the lowest one at once, the others in turn, so that thousands of ranks do not
read the headers of thousands of files at the same time. It is safe for several ranks to commit at once, because they
write the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from holdfast.errors import DeadlineError, HoldfastError
from holdfast.format import records
from holdfast.run.complete import complete, missing_files, read_manifest
from holdfast.run.history import Run
from holdfast.saving.messages import Planned
from holdfast.store.base import Store

#: Time that a remaining rank gives to each remaining rank before it, and the limit of that wait in total.
_TURN_S: Final = 2.0
_MAX_WAIT_S: Final = 30.0
_POLL_S: Final = 0.5


def is_desertion(error: HoldfastError) -> bool:
    """Whether `error` says that other ranks, or the store that connects all of them, are gone."""
    return isinstance(error, DeadlineError) or error.code == "storage.control"


def commit_after_rank_loss(storage: Store, planned: Planned, step: int, *, number: int, absent: Sequence[int]) -> str:
    """Commit the checkpoint of `planned` if all its data files are durable; returns a sentence about the outcome.

    `number` is this rank's number in the group; it has written its data file. `absent` are the numbers of the ranks
    known to be gone. Blocks: waits up to 30 s for other ranks to commit before it does so itself. Never raises
    `HoldfastError`.
    """
    num_before = sum(other not in absent for other in range(number))
    try:
        _finish(Run.open(storage), planned, wait_s=min(_TURN_S * num_before, _MAX_WAIT_S))
    except HoldfastError as error:
        return f"Step {step} was not committed: {error.message}"
    return f"Step {step} was committed all the same, at place {planned.place}: all its data files are durable."


def _finish(run: Run, planned: Planned, *, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    stored = read_manifest(run, planned.folder)
    while time.monotonic() < until_s and not missing_files(run.storage, stored):
        if run.storage.nbytes(records.commit_key(planned.place)) is not None:
            return
        time.sleep(_POLL_S)
    complete(run, planned.folder, deep=False)
