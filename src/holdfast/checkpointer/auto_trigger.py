"""The observer of the policy `Auto`: it measures steps and saves, and wishes for a save when the interval is over."""

from __future__ import annotations

import logging
import math
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
    SaveHeld,
    SaveReturned,
    SaveSkipped,
    SaveUnwatched,
)
from holdfast.checkpointer.rounds import Rounds
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.goodput.failures import PRESETS, learned_mttf_s
from holdfast.phases import LOG
from holdfast.policy.pace import PROFILED_S, PROFILED_STEPS, Choice, Pace, SaveMeter
from holdfast.policy.triggers import Metrics
from holdfast.policy.when import Auto
from holdfast.policy.wish import Wish
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
    """The save that is measured: by which meter, when it began, and how long it held training up (None: it still
    does)."""

    step: int
    meter: SaveMeter
    begun_s: float
    blocked_s: float | None = None


class AutoTrigger:
    """Observes an `Auto`, on the first rank. `hear` is for any thread, the rest for the thread that trains."""

    def __init__(self, policy: Auto, run: Location, *, world_size: int, now_s: float, has_memory: bool = False) -> None:
        self._policy = policy
        self._num_nodes = num_nodes(world_size)
        #: The times of the start, of the last save, and of the last save of any kind.
        self._begun_s = self._last_s = self._last_any_s = now_s
        expected_s = PRESETS[policy.failures].mttf_s(self._num_nodes) if policy.mttf_s is None else policy.mttf_s
        self._expected_s = expected_s
        self._meter = SaveMeter()
        #: Measures saves to memory alone; None if there are none.
        self._memory_meter = SaveMeter() if has_memory else None
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

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        if self._step_begun_s is not None:
            self._note_step(now_s - self._step_begun_s)
        self._step_begun_s = now_s
        self._note_ends(now_s)
        if self._on_way is not None:
            return None
        choice, since_s, since_any_s = self._pace.choice, now_s - self._last_s, now_s - self._last_any_s
        if choice is None:
            is_time = since_s >= PROFILED_S or (self._meter.is_profiled and not self._has_saved)
            return Wish("Auto measures a save") if is_time else None
        if since_s >= choice.interval_s:
            return Wish(f"every {duration(choice.interval_s)}, as Auto has chosen")
        if since_any_s >= choice.memory_interval_s:
            return Wish(f"every {duration(choice.memory_interval_s)} to memory, as Auto has chosen", memory_only=True)
        is_unknown = self._memory_meter is not None and not self._memory_meter.has_measured
        if is_unknown and since_any_s >= PROFILED_STEPS * self._meter.step_s:
            return Wish("Auto measures a save to memory", memory_only=True)
        return None

    def saved(self, now_s: float, *, begun_s: float, memory_only: bool) -> None:
        """As `Trigger.saved`."""
        self._last_any_s = now_s
        if not memory_only:
            self._last_s = now_s
            self._has_saved = True
        if self._step_begun_s is not None:
            self._step_begun_s = now_s  # the call of `save` is no part of a step

    def hear(self, event: SaveEvent) -> None:
        """Hear an event of a save. A save begins and returns in the thread that trains."""
        match event:
            case SaveBegun() if self._on_way is None:
                meter = self._memory_meter if event.memory_only else self._meter
                if meter is not None:
                    self._on_way = _OnWay(event.step, meter, event.at.clock_s)
                    if event.memory_only and not meter.has_measured:
                        LOG.info("step %d is being saved to memory alone: Auto measures such a save", event.step)
            case SaveReturned() if self._on_way is not None and event.step == self._on_way.step:
                self._on_way.blocked_s = event.blocked_s
            case SaveCommitted() | SaveHeld():
                self._ends.put((event.step, event.at.clock_s))
            case SaveSkipped() | SaveFailed() | SaveUnwatched():
                self._ends.put((event.step, None))

    def close(self) -> None:
        """Stop observing."""
        if self._rounds is not None:
            self._rounds.close()

    def _note_step(self, step_s: float) -> None:
        """A step has ended. While a save is on its way, it tells about such saves alone."""
        if self._on_way is not None:
            self._on_way.meter.note_step(step_s, is_saving=True)
            return
        for meter in (self._meter, self._memory_meter):
            if meter is not None:
                meter.note_step(step_s, is_saving=False)

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
                saving.meter.note_end()
                continue
            saving.meter.note_save(blocked_s=saving.blocked_s, latency_s=complete_s - saving.begun_s)
            if self._meter.has_measured:
                self._choose(now_s)

    def _choose(self, now_s: float) -> None:
        """Choose the intervals anew, and log a new choice."""
        measuring = [meter for meter in (self._meter, self._memory_meter) if meter is not None and meter.has_measured]
        is_gain = self._pace.choose(
            self._meter.cost,
            memory_cost=measuring[1].cost if len(measuring) == 2 else None,
            step_s=self._meter.step_s,
            mttf_s=self._mttf_s(now_s),
            is_settled=all(meter.is_settled for meter in measuring),
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
            f"{duration(cost.latency_s)}; a failure is expected every {duration(choice.mttf_s)} ({source}). "
            f"{_explained_memory(choice)}Saves and work done again take {choice.wasted:.2%} of the time."
        )


def _explained_memory(choice: Choice) -> str:
    cost = choice.memory_cost
    if cost is None or math.isinf(choice.memory_interval_s):
        return ""
    return (
        f"Between them it saves every {duration(choice.memory_interval_s)} to memory alone, which holds training up "
        f"for {duration(cost.blocked_s)} and slows it down by {duration(cost.slowed_s)}. "
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
