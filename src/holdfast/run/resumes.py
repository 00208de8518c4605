"""Resumes of one checkpoint by job after job, none of which commits a newer one: how they are counted and ended.

A job that resumes a checkpoint leaves a record in ``resumes/`` before it reads the first tensor. A record counts until
a commit lands in an epoch that is newer than all that its job knew: then that job, or a later one, has gone on. A job
that ends in an orderly way deletes its record. So what counts are jobs that are running, and jobs that died.

The epoch's own record cannot carry the count: a job opens its epoch at its first save, and the jobs that matter die
before that. To open the epoch in `restore` would stop the training whenever an evaluation restores from its run.

Trouble with these records never keeps a job from resuming: a run that cannot be written is restored without them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError, StorageError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.format.resume_records import RESUMES, Resume, parse_resume_name, resume_key
from holdfast.run.history import Run
from holdfast.run.holds import holder
from holdfast.run.paths import Selection
from holdfast.store.base import Store
from holdfast.wording import count

#: So many jobs must have resumed a checkpoint before the log warns of it.
WARNED_FROM: Final = 2


class ResumeCounts(NamedTuple):
    """The records in ``resumes/``, as of one listing: how many count for each place, and the keys of the others."""

    counted: Mapping[Place, int]
    ended: tuple[str, ...]

    @staticmethod
    def of(run: Run) -> ResumeCounts:
        """The resumes of `run` that count now. Two requests; one where there is none."""
        names = {name: resume for name in run.storage.list(RESUMES) if (resume := parse_resume_name(name)) is not None}
        committed = (run.history().newest_epoch() or 0) if names else 0
        counted = Counter(each.place for each in names.values() if each.newest_epoch >= committed)
        ended = tuple(f"{RESUMES}/{name}" for name, each in names.items() if each.newest_epoch < committed)
        return ResumeCounts(counted, ended)


class ResumeLimit:
    """The resumes that a restore of this job makes, one after the other while it falls back. The first rank counts the
    earlier ones and leaves the record; all ranks know `earlier`, the number of earlier jobs.

    With `max_resumes`, a checkpoint that so many earlier jobs have resumed is refused. `key` is that of the record that
    this process has left ("" while there is none). Unless it `counts`, it leaves none, and counts none.
    """

    def __init__(self, max_resumes: int | None = None, *, key: str = "", counts: bool = True) -> None:
        self._max = max_resumes
        self._counts = counts
        self.earlier = 0
        self.key = key

    def objection(self, run: Run, place: Place) -> str | None:
        """The reason why this job must not resume the checkpoint at `place`; None where it may. Two requests."""
        if self._max is None:
            return None
        self.withdraw(run.storage)
        num_earlier = ResumeCounts.of(run).counted.get(place, 0)
        if num_earlier < self._max:
            return None
        jobs = f"{count(num_earlier, 'job')} {'has' if num_earlier == 1 else 'have'}"
        return f"{jobs} resumed it, and none has committed a newer checkpoint (max_resumes={self._max})"

    def check(self, run: Run, place: Place) -> None:
        """Raise `ConfigurationError`, code ``config.restart_loop``, where this job must not resume `place`."""
        objection = self.objection(run, place)
        if objection is not None:
            raise restart_loop(run, f"checkpoint {place} of '{run.storage.location}' is not resumed: {objection}.")

    def begin(self, run: Run, place: Place, newest_epoch: int) -> int:
        """Record that this job resumes the checkpoint at `place`, durably. `newest_epoch` was the newest epoch before
        it was chosen. Returns how many jobs did so before. Deletes records that no longer count."""
        self.withdraw(run.storage)
        if not self._counts:
            return 0
        with suppress(StorageError):
            counts = ResumeCounts.of(run)
            resume = Resume(place=place, newest_epoch=newest_epoch, created=records.now(), holder=holder())
            key = resume_key(resume, secrets.token_hex(8))
            run.storage.create(key, records.encode(resume))
            self.key = key
            _delete(run.storage, counts.ended)
            return counts.counted.get(place, 0)
        return 0

    def withdraw(self, storage: Store) -> None:
        """Delete the record of this job, if there is one."""
        key, self.key = self.key, ""
        if key:
            _delete(storage, (key,))


def forget_resumes(storage: Store) -> None:
    """Delete the records of all resumes, since a person has decided how the run goes on."""
    _delete(storage, (f"{RESUMES}/{name}" for name in storage.list(RESUMES) if parse_resume_name(name) is not None))


def restart_loop(run: Run, message: str) -> ConfigurationError:
    """The error of a job that must not resume its checkpoint."""
    where = Selection(run.storage.location)
    return ConfigurationError(
        message,
        code="config.restart_loop",
        action="Look at the logs of these jobs for what ended them. To try an older checkpoint, call "
        "restore(at='step=700'), or restore(fallback=True), which takes the newest one below the limit. To try this "
        f"one again, raise max_resumes, or run 'holdfast rollback {where} --to' with its place.",
        path=run.storage.location.url,
    )


def _delete(storage: Store, keys: Iterator[str] | tuple[str, ...]) -> None:
    with suppress(StorageError):
        for key in keys:
            storage.delete(key)
