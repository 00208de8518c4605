"""The deletion of checkpoints that the policy of a `Checkpointer` does not keep, in the background of its training.

The first rank of a job deletes: when it begins to train, for an earlier job may have left something; after each commit
that it hears of; and when a save finds no space. Its thread makes one small request at a time and rests after each
(`holdfast.store.paced`), except for a save that waits for space. The process may die at whatever point: what it leaves
is what `holdfast.run.removal` promises, and the first round of the next job goes on with it.

A round also deletes what killed jobs have left of saves that never became a checkpoint, and warns before the disk is
full (`SpaceForecast`). Without a policy it does nothing else.

A round that leaves something that the policy does not keep is repeated, with growing pauses: one that failed, and while
a save is under way, one that readers held up, or that came before this job had an epoch. So a save that waits for space
goes on once it can be made.

A round deletes nothing unless the newest epoch of the run is this job's own, or that of the job that it takes over from
(`_goes_on`): the policy of a job that another one has replaced counts no longer. Trouble never reaches training: a
warning tells each cause once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.checkpointer.events import (
    Listener,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveEvent,
    SaveFailed,
    SaveHeld,
    SaveSkipped,
    SaveUnwatched,
)
from holdfast.checkpointer.save_errors import FULL, by_hand
from holdfast.checkpointer.space_forecast import SpaceForecast
from holdfast.control.torch_store import global_rank, group_ranks
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.format.records import Place
from holdfast.latch import Latch
from holdfast.phases import LOG
from holdfast.policy.keep import CheckpointFacts, KeepBest, KeepPolicy, parts_of
from holdfast.policy.metric_names import MetricWatch
from holdfast.run.history import Run
from holdfast.run.retention import Retention, RetentionOutcome, RetentionSurvey, facts_of
from holdfast.run.session import JOB
from holdfast.store.base import Location
from holdfast.store.paced import PacedStore, PacingStoppedError
from holdfast.store.urls import open_store
from holdfast.wording import count

#: The time that `close` gives the rounds that are due. What is left goes when the next job begins.
CLOSING_S: Final = 2.0
#: A thread without work ends after this time.
_IDLE_S: Final = 1.0
#: The first and the longest pause before a round is repeated that left something.
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0
#: So many rounds in a row that delete nothing, while a save finds no space, are told.
_MANY_IDLE: Final = 3
#: Time between two looks of a save that waits for a round at whether the thread lives.
_LOOK_S: Final = 0.1
#: Most steps of deleted checkpoints that a line of the log names.
_MAX_TOLD: Final = 8

_log = logging.getLogger(__name__)

#: The pace of a round that a save waits for.
_AT_ONCE: Final = Latch()
_AT_ONCE.set()


class Pruning:
    """Deletes the checkpoints of a run that a policy does not keep. `run` says where the run is.

    Any thread may tell it of a save. It has no lock: an exception in a thread that tells it of a save (Ctrl-C, say)
    leaves nothing taken.
    """

    def __init__(self, policy: KeepPolicy | None, run: Callable[[], Location]) -> None:
        self._retention = None if policy is None else Retention(policy)
        self._forecast = SpaceForecast(policy, run)
        self._run = run
        self._pid = os.getpid()
        #: An entry for each round that is due: a latch where somebody waits for its end. False ends the thread.
        self._due: SimpleQueue[Latch | bool] = SimpleQueue()
        #: The thread that works, by the pid of this process; empty while none works.
        self._threads: dict[int, Thread] = {}
        self._hurry = Latch()
        self._stop = Latch()
        best = [] if policy is None else [part for part in parts_of(policy) if isinstance(part, KeepBest)]
        self._watches = [(part, MetricWatch(part.metric)) for part in best]
        #: The causes of trouble that a warning has told.
        self._told = set[str]()
        #: The saves of the first rank that are under way.
        self._under_way = set[object]()
        #: Whether this job has begun to train, and whether a save has found no space since the last commit.
        self._has_begun = self._is_full = False
        self._has_committed = False
        #: The number of checkpoints, and of saves that were cut off, whose files this has deleted.
        self.num_freed = 0
        #: The number of rounds in a row that deleted nothing while a save found no space.
        self._num_idle = 0
        #: A sentence that says why the last round left what it left.
        self._why = ""

    def listener(self) -> Listener:
        """A listener of one save. It is quick, and never raises."""
        save = object()

        def hear(event: SaveEvent) -> None:
            match event:
                case SaveBegun() if event.is_first_rank:
                    self._under_way.add(save)
                    self.begin_training(is_first_rank=True)
                case SaveDelayed() if save in self._under_way and FULL in event.trouble:
                    self._note_full()
                case SaveFailed() if save in self._under_way:
                    self._under_way.discard(save)
                    if event.error.code == FULL:
                        self._note_full()
                case SaveCommitted() if save in self._under_way:
                    self._under_way.discard(save)
                    self._is_full, self._has_committed = False, True
                    self.begin_round()
                case SaveHeld() | SaveSkipped() | SaveUnwatched():
                    self._under_way.discard(save)

        return hear

    @property
    def run_url(self) -> str:
        """The URL of the run."""
        return self._run().url

    def begin_training(self, *, is_first_rank: bool) -> None:
        """This job is about to change the run: an earlier one may have left what the policy does not keep. Does nothing
        the second time."""
        if is_first_rank and not self._has_begun:
            self._has_begun = True
            self.begin_round()

    def make_room(self, since: int, timeout_s: float) -> str:
        """Delete at once, for a save that found no space, what the policy does not keep. Returns "" if files were
        deleted since `num_freed` was `since`, else a sentence that says why none were."""
        if self._retention is None or self._is_forked:
            return "The Checkpointer has no `keep`, so it deletes nothing."
        self._why = "The deletions that `keep` allows have not ended in time."
        done, end_s = Latch(), time.monotonic() + timeout_s
        self.begin_round(done)
        while not done.wait(_LOOK_S) and not self._stop.is_set and time.monotonic() < end_s:
            if self._pid not in self._threads:  # it has just ended
                self.begin_round(done)
        return "" if self.num_freed > since else self._why

    def _note_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            self.begin_round()

    def note_metrics(self, metrics: Iterable[str], group: ProcessGroup | None) -> None:
        """Look at the names of the metrics that the loop gives. The first rank of `group` tells a slip in the name that
        `KeepBest` has at once, and not again when the first deletions are due."""
        for part, watch in self._watches:
            near = watch.slip(metrics)
            if near is not None and group_ranks(group)[0] == global_rank():
                self._warn(
                    part.missing,
                    f"the loop gives no metric {part.metric!r}; did you mean {near!r}? While no checkpoint has it, "
                    f"{part.subject} cannot choose the best ones, and nothing is deleted",
                )

    def begin_round(self, done: Latch | None = None) -> None:
        """Have a round begin, or follow the present one. It sets `done`, and does not rest where somebody waits so."""
        if (self._retention is None and not self._forecast.is_due) or self._is_forked or self._stop.is_set:
            return
        self._due.put(True if done is None else done)
        thread = Thread(target=self._work, args=(self._retention,), name="holdfast-prune", daemon=True)
        if self._threads.setdefault(self._pid, thread) is not thread:
            return
        try:
            thread.start()
        except RuntimeError:
            # The interpreter ends, or the machine has no room for a thread: the next commit tries again.
            del self._threads[self._pid]

    def close(self, patience_s: float) -> None:
        """End after the rounds that are due, or between two requests once `patience_s` is over. A request that hangs
        is left behind. Nothing is deleted after this. Training is over, so the thread rests no more."""
        self._hurry.set()
        if not self._is_forked:
            thread = self._threads.get(self._pid)
            if thread is not None and thread.is_alive():
                self._due.put(False)
                thread.join(patience_s)
        self._stop.set()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a child process, which has a copy of this object and none of its threads."""
        return self._pid != os.getpid()

    def _work(self, retention: Retention | None) -> None:
        pause_s, before = None, 0
        while (waiting := self._await_due(pause_s)) is not None:
            is_done = False
            try:
                is_done = self._round(retention, is_urgent=bool(waiting))
            except PacingStoppedError:
                return
            except HoldfastError as error:
                self._why = f"The deletions that `keep` allows failed: {error.message}"
                self._warn_idle(error.code, f"{error.message} {error.action}")
            except Exception as error:  # noqa: BLE001 - a defect of ours must not end training
                self._why = f"The deletions that `keep` allows failed: {type(error).__name__}: {error}."
                self._warn_idle(type(error).__name__, f"{type(error).__name__}: {error} This is a defect of holdfast.")
            for latch in waiting:
                latch.set()
            if is_done:
                pause_s = None
            elif pause_s is None or self.num_freed > before:
                pause_s = _PAUSE_S
            else:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            before = self.num_freed

    def _await_due(self, pause_s: float | None) -> list[Latch] | None:
        """Wait until a round is due: one that was begun, or after `pause_s` the last one again. Returns the latches of
        those who wait for it; None where the thread is to end."""
        waiting: list[Latch] = []
        is_due = False
        try:
            while not is_due or not self._due.empty():
                entry = self._due.get(timeout=_IDLE_S if pause_s is None else pause_s)
                if entry is False:
                    if is_due:
                        self._due.put(False)  # after this round
                    return waiting if is_due else None
                is_due = True
                if isinstance(entry, Latch):
                    waiting.append(entry)
        except Empty:
            if pause_s is None:
                # Somebody who begins a round either finds no thread from here on, or left its entry before.
                del self._threads[self._pid]
                if self._due.empty() or self._threads.setdefault(self._pid, current_thread()) is not current_thread():
                    return None
                return self._await_due(None)
        return waiting

    def _round(self, retention: Retention | None, *, is_urgent: bool) -> bool:
        """Delete what the policy does not keep, and look at the free space. Returns False where the round should be
        repeated."""
        hurry = _AT_ONCE if is_urgent else self._hurry
        self._why = "The run has no checkpoint that `keep` could delete."
        has_committed = self._has_committed  # before the look
        try:
            run = Run.open(PacedStore(open_store(self._run()), hurry=hurry, stop=self._stop))
        except NotFoundError:
            if has_committed:
                raise
            return True  # the first save makes it
        free, is_saving = self._forecast.free_nbytes(), bool(self._under_way)
        if retention is None:
            self._forecast.look(free, [facts_of(commit) for commit in islice(run.lineage(), 2)], is_saving=is_saving)
            return True
        newest = run.newest_epoch()
        if newest is None:
            return True
        self._why = "Another job has opened the newest epoch of the run, so `keep` of this job deletes nothing."
        is_own = run.epoch(newest).incarnation == JOB.incarnation(run)
        base = None if is_own else JOB.base(run, newest)
        if not is_own and base is None:
            return not self._under_way
        survey = retention.survey(run)
        for problem in survey.decision.problems:
            warn = self._warn_idle if problem.blocks else self._warn
            warn(problem.key, f"{problem.message}. {problem.action}")
        if survey.epoch != newest or (base is not None and not _goes_on(survey, base)):
            return not self._under_way
        before = self.num_freed
        done = retention.apply(run, survey, told=self._note_freed)
        self.num_freed += len(done.finished) + len(done.cut_off)
        self._tell(run, survey, done)
        if free is not None and not (done.finished or done.cut_off):  # whose sizes nobody knows
            free += sum(facts.freed_nbytes for facts in done.deleted)
            self._forecast.look(free, [each.facts for each in survey.decision.kept], is_saving=is_saving)
        # Without an epoch, this job does not hear of the commits of the one before it, which its first save may await.
        may_change = not is_own or survey.holds.leases or done.held
        is_starved = self._is_starved(is_idle=self.num_freed == before)
        return not (done.is_overtaken or is_starved or (self._under_way and may_change))

    def _is_starved(self, *, is_idle: bool) -> bool:
        """Whether a save still finds no space, after a round that was idle or not. Warns where it stays so: space that
        was just freed may not have been used yet."""
        self._num_idle = self._num_idle + 1 if is_idle and self._is_full else 0
        if self._num_idle == _MANY_IDLE:
            self._warn(FULL, f"a save finds no space. {self._why} {by_hand(self.run_url)}")
        return self._is_full and bool(self._under_way)

    def _note_freed(self, _: CheckpointFacts) -> None:
        self.num_freed += 1

    def _tell(self, run: Run, survey: RetentionSurvey, done: RetentionOutcome) -> None:
        """Say what a round has deleted, and note why it left the rest."""
        if done.deleted:
            steps = ", ".join(str(facts.step) for facts in done.deleted[:_MAX_TOLD])
            num_more = len(done.deleted) - _MAX_TOLD
            more = f" and {num_more} more" if num_more > 0 else ""
            what = count(len(done.deleted), "checkpoint")
            LOG.info("deleted %s of '%s': steps %s%s", what, run.storage.location, steps, more)
        if done.cut_off:
            what = count(len(done.cut_off), "save")
            LOG.info("deleted the parts of %s of '%s' that earlier jobs had not ended", what, run.storage.location)
        num_left = len(survey.decision.kept) + len(done.held)
        why = "; readers use some" if survey.holds.leases or done.held else ""
        self._why = f"`keep` lets no other checkpoint be deleted ({num_left} left{why})."

    def _warn_idle(self, cause: str, text: str) -> None:
        self._warn(cause, f"nothing of it is deleted for now, and training goes on: {text}")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._told:
            self._told.add(cause)
            _log.warning("keep of '%s': %s", self._run(), text)


def _goes_on(survey: RetentionSurvey, base: Place) -> bool:
    """Whether a job that goes on from `base`, and has no epoch yet, may delete: `base` is the head, or newer than it.
    Its first save opens the next epoch then, which has the same lineage. Otherwise it rolls the run back: `base` may be
    among the checkpoints that its policy does not keep, and the newer ones become an abandoned future."""
    return all(base >= each.facts.place for each in survey.decision.kept)
