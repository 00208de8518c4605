"""Rollback: an older checkpoint becomes the head, and the checkpoints after it become an abandoned future."""

from __future__ import annotations

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError, NotFoundError
from holdfast.format.records import Commit, Place
from holdfast.run.complete import check_present
from holdfast.run.history import Run
from holdfast.run.resumes import forget_resumes


def rollback(run: Run, to: Place | int) -> Commit:
    """Make the commit at a place, or the newest one of a step on the head's lineage, the head; durable on return.

    Opens a new epoch from that commit. So the next job that loads the run continues from there. A job that is running,
    or that loaded before, stops with `FencedError` at its next save, and its late commits land in the abandoned future.
    That future stays in the history, and another rollback can return to it. No checkpoint is deleted. The jobs that
    resumed a checkpoint before, and died, count no longer.

    Raises:
        NotFoundError: there is no such commit, or it was removed meanwhile.
        CorruptError: its seal, its manifest or a data file is missing, or is not the committed one.
        FencedError: another job opened an epoch at the same time; look again whether to roll back.
    """
    newest = run.newest_epoch() or 0
    commit = run.find(place=to) if isinstance(to, Place) else run.find(step=to)
    try:
        check_present(Checkpoint(run.locate(commit)))
    except (CorruptError, NotFoundError):
        if run.is_removed(commit.place):
            raise _removed(run, commit, "The head has not changed.") from None
        raise
    run.open_epoch(after=newest, opened_from=commit.place, why="rollback", world_size=1)
    forget_resumes(run.storage)
    if run.is_removed(commit.place):
        action = "The head is now the next older checkpoint. Roll back again if you want another head."
        raise _removed(run, commit, action)
    return commit


def _removed(run: Run, commit: Commit, action: str) -> NotFoundError:
    return NotFoundError(
        f"checkpoint {commit.place} of '{run.storage.location}' was removed during the rollback to it.",
        code="not_found.removed",
        action=action,
        path=run.storage.location.url,
        step=commit.step,
    )
