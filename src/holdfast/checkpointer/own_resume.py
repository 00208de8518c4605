"""The record that this job resumes a checkpoint (`holdfast.run.resumes`), from its `restore` to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.checkpointer.events import SaveCommitted, SaveEvent
from holdfast.errors import DeadlineError, HoldfastError, StorageError
from holdfast.run.resumes import ResumeLimit
from holdfast.run.session import Takeover
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Longest wait for the deletion of the record, at the end of the job.
_PATIENCE_S: Final = 5.0


class OwnResume:
    """The resumes of one `Checkpointer`. `run` says where its run is. Only the first rank has a record.

    The record stays where the job dies, or an exception ends it: then it counts. A commit makes it void. A job that
    ends in an orderly way before its first commit deletes it.

    With `takeover` "always" it has none: jobs with one live state resume one checkpoint at the same time, and live.
    """

    def __init__(self, run: Callable[[], Location], max_resumes: int | None, takeover: Takeover) -> None:
        self._run = run
        self._max = max_resumes
        self._counts = takeover != "always"
        self._limit = ResumeLimit()

    def begin(self, *, is_chosen: bool) -> ResumeLimit:
        """A restore begins. A checkpoint that the user chose is resumed as often as he likes."""
        self._limit = ResumeLimit(None if is_chosen else self._max, key=self._limit.key, counts=self._counts)
        return self._limit

    def fail(self, error: HoldfastError) -> None:
        """The restore raises `error`. If that says why the checkpoint cannot be restored, the job did not resume it;
        but ranks that do not answer may be dead because they did."""
        if not isinstance(error, DeadlineError | StorageError):
            self.end()

    def hear(self, event: SaveEvent) -> None:
        """Note the first commit. Any thread may call this."""
        if isinstance(event, SaveCommitted):
            self._limit.key = ""

    def end(self, left_s: float = _PATIENCE_S) -> None:
        """The job ends in an orderly way, and its machine exists for ``left_s``. Never raises."""
        if self._limit.key and left_s > 0:
            with suppress(HoldfastError):
                patience_s = min(left_s, _PATIENCE_S)
                with TimedStore(open_store(self._run()), timeout_s=patience_s) as storage:
                    self._limit.withdraw(storage)
