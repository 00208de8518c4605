"""The jobs that have ended on a run, as its history tells them."""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.run.history import Run

#: So many of the newest epochs count.
_NUM_EPOCHS: Final = 64
#: No job has trained before 2020, in unix seconds: a clock that says so is wrong.
_SANE: Final = 1_577_836_800.0


class EndedJobs(NamedTuple):
    """The number of jobs that have saved to a run and ended, and the seconds for which they surely have trained."""

    num_jobs: int
    trained_s: float


def ended_jobs(run: Run, *, before: float) -> EndedJobs:
    """Count the jobs on `run` that began before the time `before` (in unix seconds), from the newest epochs alone. A
    few small reads per epoch.

    A job that ended on purpose counts as well, since no record tells the difference. The time that a job trained is
    that from its first save to its last, which cannot be after `before`, whatever a clock has said.
    """
    numbers = run.epochs()[:_NUM_EPOCHS]
    history = run.history()
    num_jobs, trained_s = 0, 0.0
    for number in numbers:
        epoch = run.epoch(number)
        if epoch.created >= before or epoch.why == "rollback":  # no job opens an epoch of a rollback
            continue
        num_jobs += 1
        newest = next(history.places_of(number), None)
        commit = None if newest is None else run.needed_commit(newest)
        if commit is not None and epoch.created > _SANE:
            trained_s += max(min(commit.created, before) - epoch.created, 0.0)
    return EndedJobs(num_jobs, trained_s)
