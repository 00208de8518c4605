"""Retention: a policy of `holdfast.policy.keep`, applied to a run.

`survey` gathers the facts and decides; it changes nothing. `apply` deletes, with `holdfast.run.removal`, what the
decision says, the oldest first. A process may be killed anywhere in between: the order of a removal leaves each
checkpoint loadable or invisible, and a later `apply`, of any process, goes on with what was left.

Only checkpoints of the head's lineage are deleted. Those of abandoned futures are left alone: a rollback may go back to
them, their order among the others means nothing, and a commit may still arrive there from a job that was fenced. A
person deletes them (``holdfast rm``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, IncompatibleError, NotFoundError
from holdfast.format.records import CHECKPOINTS, Commit, Place, parse_folder
from holdfast.policy.keep import CheckpointFacts, KeepDecision, KeepPolicy, decide
from holdfast.run.history import Run
from holdfast.run.holds import Holds, delete_ended, is_held
from holdfast.run.leases import want_leases
from holdfast.run.quarantine import in_quarantine
from holdfast.run.removal import abandon, remove_place
from holdfast.run.uncommitted import RunRecords, Uncommitted


@dataclass(frozen=True)
class RetentionSurvey:
    """A decision about a run, which counts as long as `epoch` is the newest epoch of the run. `holds` are the pins and
    leases; `num_abandoned` is the number of checkpoints off the head's lineage."""

    decision: KeepDecision
    epoch: int
    holds: Holds
    num_abandoned: int


@dataclass
class RetentionOutcome:
    """The outcome of a deletion, as far as it came: the deleted checkpoints; those that stay because somebody has
    needed them meanwhile, with the error that says so; and the folders in which an older deletion was finished.

    `is_overtaken`: a newer epoch was opened meanwhile, so the deletion ended there."""

    deleted: list[CheckpointFacts] = field(default_factory=list)
    held: list[tuple[CheckpointFacts, HoldfastError]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    is_overtaken: bool = False


class Retention:
    """A policy and a run. It remembers records that never change, so that a later survey reads only new ones."""

    def __init__(self, policy: KeepPolicy) -> None:
        self._policy = policy
        self._commits: dict[Place, Commit] = {}
        self._verified: set[Place] = set()
        #: Folders in which an older deletion may have left files; None before the first look.
        self._half_removed: list[str] | None = None

    def survey(self, run: Run) -> RetentionSurvey:
        """Decide what to delete. A few requests, and one for each checkpoint that is not known yet.

        Raises `CorruptError` where a record of the lineage is damaged or lost: then nothing can be decided.
        """
        # The epoch first: if another one is opened during the survey, `apply` sees that.
        epoch = run.newest_epoch() or 0
        lineage = list(self._lineage(run))
        holds, shut = Holds.of(run.storage), in_quarantine(run.storage)
        facts = [_facts(commit, holds, is_quarantined=commit.place in shut) for commit in lineage]
        self._commits = {commit.place: commit for commit in lineage}
        verified = self._newest_verified(run, [commit for commit in lineage if commit.place not in shut])
        decision = decide(self._policy, facts, verified=verified, now=time.time())
        return RetentionSurvey(decision, epoch, holds, max(len(run.places()) - len(lineage), 0))

    def apply(
        self, run: Run, survey: RetentionSurvey, *, told: Callable[[CheckpointFacts], None] = lambda _: None
    ) -> RetentionOutcome:
        """Delete what the decision of `survey` says, durably, and finish older deletions. `told` hears of each deleted
        checkpoint."""
        done = RetentionOutcome()
        want_leases(run.storage)
        delete_ended(run.storage, survey.holds)
        half_removed = self._finish(run, done)
        for facts in survey.decision.deleted:
            # A newer epoch has another lineage, and perhaps another policy.
            if (run.newest_epoch() or 0) != survey.epoch:
                done.is_overtaken = True
                break
            folder = self._commits[facts.place].checkpoint
            half_removed.append(folder)
            try:
                remove_place(run, facts.place, folder)
            except ConfigurationError as error:
                if not is_held(error):
                    raise
                done.held.append((facts, error))
                continue
            half_removed.remove(folder)
            done.deleted.append(facts)
            told(facts)
        return done

    def half_removed(self, run: Run) -> list[str]:
        """The folders in which an older deletion has left files, because it was interrupted or a reader used them."""
        known = RunRecords.of(run)
        return [
            folder
            for folder in run.storage.list(CHECKPOINTS)
            if parse_folder(folder) is not None
            and not known.is_committed(folder)
            and Uncommitted(run, known, folder).is_half_removed
        ]

    def _finish(self, run: Run, done: RetentionOutcome) -> list[str]:
        """Go on with older deletions, and return the folders that are left. Only the first look searches the whole run:
        this process knows what it left itself."""
        if self._half_removed is None:
            self._half_removed = self.half_removed(run)
        if not self._half_removed:
            return self._half_removed
        known = RunRecords.of(run)
        for folder in tuple(self._half_removed):
            there = Uncommitted(run, known, folder)
            if there.is_half_removed:
                place = there.place_to_hide()
                try:
                    if place is None:
                        abandon(run, folder)
                    else:
                        remove_place(run, place, folder)
                except ConfigurationError as error:
                    if not is_held(error):
                        raise
                    continue
                done.finished.append(folder)
            self._half_removed.remove(folder)
        return self._half_removed

    def _lineage(self, run: Run) -> Iterator[Commit]:
        """The commits of the lineage, newest first."""
        for place in run.lineage_places():
            commit = self._commits.get(place) or run.needed_commit(place)
            if commit is not None:
                yield commit

    def _newest_verified(self, run: Run, lineage: list[Commit]) -> Place | None:
        """The newest checkpoint of the lineage, as far as it is not in quarantine, whose files are all there."""
        for commit in lineage:
            if commit.place in self._verified or _is_whole(run, commit):
                self._verified = {commit.place}
                return commit.place
        return None


def _is_whole(run: Run, commit: Commit) -> bool:
    """Whether all files of a checkpoint exist and have their sealed sizes. One request for each file, and one. It does
    not read the manifest, which takes a job of many tensors long."""
    try:
        sealed = run.locate(commit)
    except (CorruptError, NotFoundError, IncompatibleError):
        return False
    files = (sealed.seal.manifest, *sealed.seal.files)
    return all(run.storage.nbytes(sealed.key(file.name)) == file.nbytes for file in files)


def _facts(commit: Commit, holds: Holds, *, is_quarantined: bool) -> CheckpointFacts:
    metrics = {name: float(value) for name, value in commit.metrics.items()}
    reasons = holds.reasons(commit.place)
    return CheckpointFacts(commit.place, commit.step, commit.created, commit.nbytes, metrics, reasons, is_quarantined)
