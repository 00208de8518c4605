"""The observer of the policy `Auto`: it measures steps and saves, and wishes for a save when the interval is over."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from holdfast.checkpointer.events import (
    SaveBegun,
    SaveCommitted,
    SaveEvent,
    SaveFailed,
    SaveReturned,
    SaveSkipped,
    SaveUnwatched,
)
from holdfast.checkpointer.rounds import Rounds
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.goodput.failures import PRESETS, learned_mttf_s
from holdfast.phases import LOG
from holdfast.policy.pace import PROFILED_S, Choice, Pace, SaveMeter
from holdfast.policy.triggers import Metrics
from holdfast.policy.when import Auto
from holdfast.run.ended_jobs import EndedJobs, ended_jobs
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store
from holdfast.wording import count, duration

_log = logging.getLogger(__name__)

#: Time limit for reading the history of the run.
_HISTORY_S: Final = 60.0
#: Ranks of a node where nobody says how many there are.
_RANKS_PER_NODE: Final = 8


@dataclass
class _OnWay:
    """The save that is measured: when it began, and how long it held training up (None: it still does)."""

    step: int
    begun_s: float
    blocked_s: float | None = None


class AutoTrigger:
    """Observes an `Auto`, on the first rank. `hear` is for any thread, the rest for the thread that trains."""

    def __init__(self, policy: Auto, run: Location, *, world_size: int, now_s: float) -> None:
        self._policy = policy
        self._num_nodes = num_nodes(world_size)
        self._begun_s = self._last_s = now_s
        expected_s = PRESETS[policy.failures].mttf_s(self._num_nodes) if policy.mttf_s is None else policy.mttf_s
        self._expected_s = expected_s
        self._meter = SaveMeter()
        self._pace = Pace(max_overhead=policy.max_overhead)
        self._step_begun_s: float | None = None
        self._on_way: _OnWay | None = None
        self._has_saved = False
        #: The ends of saves: the step, and the time if the checkpoint is durable.
        self._ends: SimpleQueue[tuple[int, float | None]] = SimpleQueue()
        self._past = _Past(run)
        self._rounds = Rounds(self._past.look, name="holdfast-history") if policy.mttf_s is None else None

    @property
    def choice(self) -> Choice | None:
        """The present choice; None before the first one."""
        return self._pace.choice

    def wish(self, metrics: Metrics | None, now_s: float) -> str | None:
        """As `Trigger.wish`."""
        if self._step_begun_s is not None:
            self._meter.note_step(now_s - self._step_begun_s, is_saving=self._on_way is not None)
        self._step_begun_s = now_s
        self._note_ends(now_s)
        if self._on_way is not None:
            return None
        choice, since_s = self._pace.choice, now_s - self._last_s
        if choice is not None:
            return f"every {duration(choice.interval_s)}, as Auto has chosen" if since_s >= choice.interval_s else None
        if since_s >= PROFILED_S or (self._meter.is_profiled and not self._has_saved):
            return "Auto measures a save"
        return None

    def saved(self, now_s: float) -> None:
        """As `Trigger.saved`."""
        self._last_s = now_s
        self._has_saved = True
        if self._step_begun_s is not None:
            self._step_begun_s = now_s  # the call of `save` is no part of a step

    def hear(self, event: SaveEvent) -> None:
        """Hear an event of a save. A save begins and returns in the thread that trains."""
        match event:
            case SaveBegun() if self._on_way is None:
                self._on_way = _OnWay(event.step, event.at.clock_s)
            case SaveReturned() if self._on_way is not None and event.step == self._on_way.step:
                self._on_way.blocked_s = event.blocked_s
            case SaveCommitted():
                self._ends.put((event.step, event.at.clock_s))
            case SaveSkipped() | SaveFailed() | SaveUnwatched():
                self._ends.put((event.step, None))

    def close(self) -> None:
        """Stop observing."""
        if self._rounds is not None:
            self._rounds.close()

    def _note_ends(self, now_s: float) -> None:
        """Learn from the save on its way, if it has ended."""
        while True:
            try:
                step, complete_s = self._ends.get_nowait()
            except Empty:
                return
            saving = self._on_way
            if saving is None or step != saving.step:
                continue
            self._on_way = None
            if complete_s is None or saving.blocked_s is None:
                self._meter.note_end()
                continue
            self._meter.note_save(blocked_s=saving.blocked_s, latency_s=complete_s - saving.begun_s)
            meter = self._meter
            is_gain = self._pace.choose(
                meter.cost, step_s=meter.step_s, mttf_s=self._mttf_s(now_s), is_settled=meter.is_settled
            )
            if is_gain:
                assert self._pace.choice is not None
                LOG.info("%s", self._explained(self._pace.choice))

    def _mttf_s(self, now_s: float) -> float:
        """The mean time to a failure, as the jobs before this one tell."""
        past = self._past.found
        if self._policy.mttf_s is not None or past is None:
            return self._expected_s
        observed_s = past.trained_s + now_s - self._begun_s
        return learned_mttf_s(self._expected_s, num_failures=past.num_jobs, observed_s=observed_s)

    def _explained(self, choice: Choice) -> str:
        cost, past = choice.cost, self._past.found
        source = "as given"
        if self._policy.mttf_s is None:
            source = f"from {count(self._num_nodes, 'node')} as in {self._policy.failures}"
            source += f" and {count(past.num_jobs, 'job')} before this one" if past is not None else ""
        return (
            f"Auto saves every {duration(choice.interval_s)} from now on: a save holds training up for "
            f"{duration(cost.blocked_s)}, slows it down by {duration(cost.slowed_s)}, and is durable after "
            f"{duration(cost.latency_s)}; a failure is expected every {duration(choice.mttf_s)} ({source}). Saves and "
            f"work done again take {choice.wasted:.2%} of the time."
        )


class _Past:
    """The jobs before this one, read in the background. `found` is None until they are known."""

    def __init__(self, run: Location) -> None:
        self._run = run
        self._begun = time.time()
        self.found: EndedJobs | None = None

    def look(self) -> None:
        """Read them."""
        try:
            with TimedStore(open_store(self._run), timeout_s=_HISTORY_S) as store:
                self.found = ended_jobs(Run.open(store), before=self._begun)
        except NotFoundError:
            self.found = EndedJobs(0, 0.0)
        except HoldfastError as error:
            _log.warning("the policy Auto does not know how often this run was started again: %s", error)


def num_nodes(world_size: int) -> int:
    """The number of nodes of a job, as its launcher says or, if it does not, for nodes of 8 ranks."""
    per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    return -(-world_size // (int(per_node) if per_node.isdecimal() and int(per_node) else _RANKS_PER_NODE))
