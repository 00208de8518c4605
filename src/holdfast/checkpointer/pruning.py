"""The deletion of checkpoints that the policy of a `Checkpointer` does not keep, in the background of its training.

The first rank of a job deletes, after each commit that it hears of. Its thread makes one small request at a time and
rests after each (`holdfast.store.paced`). The process may die at whatever point: what it leaves is what
`holdfast.run.removal` promises, and the first round of the next job goes on with it.

A round deletes nothing unless the newest epoch of the run is this job's own: the policy of a job that another one has
replaced counts no longer. Trouble never reaches training: a warning tells each cause once, and the next commit tries
again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.checkpointer.events import Listener, SaveBegun, SaveCommitted, SaveEvent
from holdfast.control.torch_store import global_rank, group_ranks
from holdfast.errors import HoldfastError
from holdfast.latch import Latch
from holdfast.phases import LOG
from holdfast.policy.keep import KeepBest, KeepPolicy, parts_of
from holdfast.policy.metric_names import MetricWatch
from holdfast.run.history import Run
from holdfast.run.retention import Retention
from holdfast.run.session import JOB
from holdfast.store.base import Location
from holdfast.store.paced import PacedStore, PacingStoppedError
from holdfast.store.urls import open_store
from holdfast.wording import count

#: The time that `close` gives the rounds that are due. What is left goes at the next commit.
CLOSING_S: Final = 2.0
#: A thread without work ends after this time.
_IDLE_S: Final = 1.0
#: Most steps of deleted checkpoints that a line of the log names.
_MAX_TOLD: Final = 8

_log = logging.getLogger(__name__)


class Pruning:
    """Deletes, after commits, the checkpoints of a run that a policy does not keep. `run` says where the run is.

    Any thread may tell it of a commit. It has no lock: an exception in a thread that tells it of a commit (Ctrl-C, say)
    leaves nothing taken.
    """

    def __init__(self, policy: KeepPolicy | None, run: Callable[[], Location]) -> None:
        self._retention = None if policy is None else Retention(policy)
        self._run = run
        self._pid = os.getpid()
        #: An entry for each round that is due. False ends the thread.
        self._due: SimpleQueue[bool] = SimpleQueue()
        #: The thread that works, by the pid of this process; empty while none works.
        self._threads: dict[int, Thread] = {}
        self._hurry = Latch()
        self._stop = Latch()
        best = [] if policy is None else [part for part in parts_of(policy) if isinstance(part, KeepBest)]
        self._watches = [(part, MetricWatch(part.metric)) for part in best]
        #: The causes of trouble that a warning has told.
        self._told = set[str]()

    def listener(self) -> Listener:
        """A listener of one save. It is quick, and never raises."""
        is_first_rank = False

        def hear(event: SaveEvent) -> None:
            nonlocal is_first_rank
            if isinstance(event, SaveBegun):
                is_first_rank = event.is_first_rank
            elif isinstance(event, SaveCommitted) and is_first_rank:
                self.begin_round()

        return hear

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

    def begin_round(self) -> None:
        """Have a round begin, or follow the present one."""
        if self._retention is None or self._is_forked or self._stop.is_set:
            return
        self._due.put(True)
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

    def _work(self, retention: Retention) -> None:
        while self._is_due():
            try:
                self._round(retention)
            except PacingStoppedError:
                return
            except HoldfastError as error:
                self._warn_idle(error.code, f"{error.message} {error.action}")
            except Exception as error:  # noqa: BLE001 - a defect of ours must not end training
                self._warn_idle(type(error).__name__, f"{type(error).__name__}: {error} This is a defect of holdfast.")

    def _is_due(self) -> bool:
        """Wait until a round is due. Returns False where the thread is to end."""
        is_due = False
        with suppress(Empty):
            while self._due.get(timeout=_IDLE_S):
                is_due = True
                if self._due.empty():
                    return True
            if is_due:
                self._due.put(False)  # after this round
            return is_due
        # Another commit either finds no thread from here on, or left its entry before.
        del self._threads[self._pid]
        return not self._due.empty() and self._threads.setdefault(self._pid, current_thread()) is current_thread()

    def _round(self, retention: Retention) -> None:
        run = Run.open(PacedStore(open_store(self._run()), hurry=self._hurry, stop=self._stop))
        newest = run.newest_epoch()
        if newest is None or run.epoch(newest).incarnation != JOB.incarnation(run):
            return
        survey = retention.survey(run)
        for problem in survey.decision.problems:
            warn = self._warn_idle if problem.blocks else self._warn
            warn(problem.key, f"{problem.message}. {problem.action}")
        if survey.epoch != newest:
            return
        done = retention.apply(run, survey)
        if done.deleted:
            steps = ", ".join(str(facts.step) for facts in done.deleted[:_MAX_TOLD])
            num_more = len(done.deleted) - _MAX_TOLD
            more = f" and {num_more} more" if num_more > 0 else ""
            what = count(len(done.deleted), "checkpoint")
            LOG.info("deleted %s of '%s': steps %s%s", what, run.storage.location, steps, more)

    def _warn_idle(self, cause: str, text: str) -> None:
        self._warn(cause, f"nothing of it is deleted for now, and training goes on: {text}")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._told:
            self._told.add(cause)
            _log.warning("keep of '%s': %s", self._run(), text)
