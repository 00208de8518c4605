"""The report of a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.reports import LoadReport, ReadSource
from holdfast.wording import count

#: The tier that a checkpoint was read from, or that a save writes to.
Tier = Literal["node memory", "peer memory", "node disk", "storage"]


@dataclass(frozen=True)
class RejectedSource:
    """A checkpoint at `place`, or one copy of a file of it, in a `tier` that the restore did not use, and the `reason`.
    `place` is None where the whole tier could not be used."""

    tier: Tier
    place: str | None
    reason: str


@dataclass(frozen=True, repr=False)
class RestoreReport:
    """The restored checkpoint: its `step`, its `place` (both None: the run had no checkpoint yet), and the `tier` that
    it was read from: "node memory"; "peer memory", where some of its files were read from the copies of lost nodes on
    others; "node disk", where some were read from disks of nodes; or "storage".
    The first job of a run that forks another one has the step of that run's checkpoint, and no place.

    The loop continues at ``next_step``. `load` is the report of the load itself; where the run had no checkpoint yet,
    that of the `initial` checkpoint of another run, or None. `earlier_resumes` is the number of jobs that resumed the
    same checkpoint before, without a newer one having been committed since; a job that ended in an orderly way does not
    count.

    `rejected` are the nearer or newer sources that the restore found and did not use, in the order in which it looked
    at them: newer checkpoints of which the nodes have only a part, damaged ones, and damaged copies of single files.
    It is the same on all ranks.
    """

    step: int | None
    place: str | None
    tier: Tier | None
    load: LoadReport | None
    earlier_resumes: int = 0
    rejected: tuple[RejectedSource, ...] = ()

    @property
    def sources(self) -> tuple[ReadSource, ...]:
        """The sources of the bytes that this rank needed: by tier, and by the rank that alone could read them."""
        return () if self.load is None else self.load.sources

    @property
    def next_step(self) -> int:
        """The step after the restored one; 0 if there was no checkpoint."""
        return 0 if self.step is None else self.step + 1

    def __repr__(self) -> str:
        if self.load is None:
            return "<RestoreReport: there was nothing to restore; the next step is 0>"
        if self.step is None:
            return f"<RestoreReport of a new run, which begins with {self.load!r}; the next step is 0>"
        if self.place is None:
            return f"<RestoreReport of a new run, which is a fork: {self.load!r}>"
        again = f", which {count(self.earlier_resumes, 'earlier job')} resumed in vain" if self.earlier_resumes else ""
        return f"<RestoreReport from {self.tier}{again}: {self.load!r}>"
