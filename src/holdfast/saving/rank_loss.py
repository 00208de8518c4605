"""The end of a save in which a rank is gone: storage alone says whether the checkpoint is complete.

When a rank dies between its last byte and the commit, all that was saved is durable, and only nobody has said so.
Every rank that is left looks, the lowest one at once and the others in turn, so that not thousands of them read the
headers of thousands of files. That several finish at once is harmless: they write the same bytes.
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

#: A survivor gives each one before it so much time, and all of them together no more than so much.
_TURN_S: Final = 2.0
_MAX_WAIT_S: Final = 30.0
_POLL_S: Final = 0.5


def is_desertion(error: HoldfastError) -> bool:
    """Whether `error` says that other ranks, or the store that connects all of them, are gone."""
    return isinstance(error, DeadlineError) or error.code == "storage.control"


def commit_after_rank_loss(storage: Store, planned: Planned, step: int, *, number: int, absent: Sequence[int]) -> str:
    """Commit what `planned` says if all its data files are durable; returns a sentence that says what came of it.

    `number` is that of this rank, which wrote its part; `absent` are those that are gone, as far as known. Blocking:
    waits up to 30 s for others to do it before it does the work itself. Never raises `HoldfastError`.
    """
    num_before = sum(other not in absent for other in range(number))
    try:
        _finish(Run.open(storage), planned, wait_s=min(_TURN_S * num_before, _MAX_WAIT_S))
    except HoldfastError as error:
        return f"Step {step} was not committed: {error.message}"
    return f"Step {step} was committed nevertheless, at place {planned.place}: all its data files are durable."


def _finish(run: Run, planned: Planned, *, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    stored = read_manifest(run, planned.folder)
    while time.monotonic() < until_s and not missing_files(run.storage, stored):
        if run.storage.nbytes(records.commit_key(planned.place)) is not None:
            return
        time.sleep(_POLL_S)
    complete(run, planned.folder, deep=False)
