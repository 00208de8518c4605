"""Retention: a policy of `holdfast.policy.keep`, applied to a run.

`survey` gathers the facts and decides; it changes nothing. `apply` deletes, with `holdfast.run.removal`, what the
decision says, the oldest first. A process may be killed anywhere in between: the order of a removal leaves each
checkpoint loadable or invisible, and a later `apply`, of any process, goes on with what was left.

Only checkpoints of the head's lineage are deleted. Those of abandoned futures are left alone: a rollback may go back to
them, their order among the others means nothing, and a commit may still arrive there from a job that was fenced. A
person deletes them (``holdfast rm``).

`apply` also deletes the parts of saves that were cut off: saves of an older epoch than the newest that lack data files.
Their jobs are dead or fenced, so these parts never become a checkpoint. One whose files are all there stays: the doctor
can commit it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, IncompatibleError, NotFoundError
from holdfast.format.records import Commit, Place
from holdfast.policy.keep import CheckpointFacts, KeepDecision, KeepPolicy, decide
from holdfast.run.history import Run
from holdfast.run.holds import Holds, delete_ended, is_held
from holdfast.run.leases import want_leases
from holdfast.run.quarantine import in_quarantine
from holdfast.run.reference_names import references_of
from holdfast.run.references import ended_references, needed_folders
from holdfast.run.remains import delete_remnant, remnant, remnants
from holdfast.run.removal import remove_place
from holdfast.run.uncommitted import RunRecords


@dataclass(frozen=True)
class Remains:
    """Folders without a checkpoint: `half_removed` are those in which an older deletion has left files, because it was
    interrupted or a reader used them; `cut_off` those with the parts of a save that was cut off; `kept` those in which
    an older deletion has left the still files that other checkpoints refer to."""

    half_removed: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


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
    needed them meanwhile, with the error that says so; the folders in which an older deletion was finished; and those
    that had the parts of a save that was cut off.

    `is_overtaken`: a newer epoch was opened meanwhile, so the deletion ended there."""

    deleted: list[CheckpointFacts] = field(default_factory=list)
    held: list[tuple[CheckpointFacts, HoldfastError]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    is_overtaken: bool = False


class Retention:
    """A policy and a run. It remembers records that never change, so that a later survey reads only new ones."""

    def __init__(self, policy: KeepPolicy) -> None:
        self._policy = policy
        self._commits: dict[Place, Commit] = {}
        self._verified: set[Place] = set()
        #: Folders in which something may be left, and the newest epoch at the last look for them (-1: there was none).
        self._left = Remains()
        self._looked_in = -1

    def survey(self, run: Run) -> RetentionSurvey:
        """Decide what to delete. A few requests, and one for each checkpoint that is not known yet.

        Raises `CorruptError` where a record of the lineage is damaged or lost: then nothing can be decided.
        """
        # The epoch first: if another one is opened during the survey, `apply` sees that.
        epoch = run.newest_epoch() or 0
        lineage = list(self._lineage(run))
        holds, shut = Holds.of(run.storage), in_quarantine(run.storage)
        shared = _SharedFiles(run, lineage)
        facts = [
            facts_of(
                commit,
                holds.reasons(commit.place),
                is_quarantined=commit.place in shut,
                refers=commit.checkpoint in shared.referring,
                kept_nbytes=shared.kept_nbytes.get(commit.checkpoint, 0),
            )
            for commit in lineage
        ]
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
        self._finish(run, survey, done)
        for facts in survey.decision.deleted:
            # A newer epoch has another lineage, and perhaps another policy.
            if (run.newest_epoch() or 0) != survey.epoch:
                done.is_overtaken = True
                break
            folder = self._commits[facts.place].checkpoint
            self._left.half_removed.append(folder)
            try:
                is_gone = remove_place(run, facts.place, folder)
            except ConfigurationError as error:
                if not is_held(error):
                    raise
                done.held.append((facts, error))
                continue
            self._left.half_removed.remove(folder)
            self._left.kept.extend([] if is_gone else [folder])
            done.deleted.append(facts)
            told(facts)
        if done.deleted and self._left.kept and not done.is_overtaken:
            self._finish(run, survey, done)  # perhaps nobody needs these still files any more
        return done

    def remains(self, run: Run, survey: RetentionSurvey) -> Remains:
        """Find the folders that unfinished deletions and saves have left."""
        found = Remains()
        lists = {"half_removed": found.half_removed, "cut_off": found.cut_off, "needed": found.kept}
        for each in remnants(run, epoch=survey.epoch):
            lists.get(each.fate, []).append(each.folder)
        return found

    def _finish(self, run: Run, survey: RetentionSurvey, done: RetentionOutcome) -> None:
        """Go on with older deletions, and delete the parts of saves that were cut off. Only the first look in an epoch
        searches the whole run: this process knows what it left itself."""
        if self._looked_in != survey.epoch:
            self._left, self._looked_in = self.remains(run, survey), survey.epoch
            for key in ended_references(run):
                run.storage.delete(key)
        if self._left.kept:
            self._let_go_of_kept(needed_folders(run))
        if not (self._left.half_removed or self._left.cut_off):
            return
        known = RunRecords.of(run)
        for folder in tuple(self._left.half_removed):
            there = remnant(run, known, folder, epoch=survey.epoch)
            if there is not None and there.fate == "half_removed":
                is_gone = delete_remnant(run, there)
                if is_gone is None:
                    continue
                (done.finished if is_gone else self._left.kept).append(folder)
            self._left.half_removed.remove(folder)
        for folder in tuple(self._left.cut_off):
            there = remnant(run, known, folder, epoch=survey.epoch)
            # Somebody may have completed it since: then it stays.
            if there is not None and there.fate == "cut_off" and delete_remnant(run, there):
                done.cut_off.append(folder)
            self._left.cut_off.remove(folder)

    def _let_go_of_kept(self, needed: Collection[str]) -> None:
        """Have the folders deleted to whose still files no checkpoint refers any more."""
        self._left.half_removed.extend(folder for folder in self._left.kept if folder not in needed)
        self._left.kept[:] = [folder for folder in self._left.kept if folder in needed]

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
        return not run.locate(commit).lacking()
    except (CorruptError, NotFoundError, IncompatibleError):
        return False


class _SharedFiles:
    """The files that checkpoints of a lineage have in common, as the records in ``references/`` tell: the folders that
    are `referring` to others, and for each folder that others refer to, the most bytes that a deletion leaves there."""

    def __init__(self, run: Run, lineage: Iterable[Commit]) -> None:
        references = references_of(run.storage)
        sizes = {commit.checkpoint: commit.num_referenced_bytes for commit in lineage}
        self.referring = frozenset(each.checkpoint for each in references)
        self.kept_nbytes: dict[str, int] = {}
        for each in references:
            most = max(self.kept_nbytes.get(each.holder, 0), sizes.get(each.checkpoint, 0))
            self.kept_nbytes[each.holder] = most


def facts_of(
    commit: Commit,
    held: tuple[str, ...] = (),
    *,
    is_quarantined: bool = False,
    refers: bool = True,
    kept_nbytes: int = 0,
) -> CheckpointFacts:
    """The facts about a committed checkpoint, for a policy; `held` are the reasons why it stays. `refers` says whether
    it still refers to files of earlier ones, if its save did. `kept_nbytes` is as for `CheckpointFacts`."""
    metrics = {name: float(value) for name, value in commit.metrics.items()}
    save_nbytes = commit.nbytes - commit.num_referenced_bytes
    nbytes = save_nbytes if refers else commit.nbytes
    return CheckpointFacts(
        commit.place,
        commit.step,
        commit.created,
        nbytes,
        metrics,
        held,
        is_quarantined,
        min(kept_nbytes, nbytes),
        save_nbytes,
    )
