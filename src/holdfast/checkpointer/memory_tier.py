"""The memory tier of one rank: the slots of a run in the memory of its node, and whether saves go there at all.

A rank has one set of slots per run, so all `Checkpointer`s of a process on one run share one tier.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn
from weakref import WeakSet

from holdfast.checkpointer.background import Background
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.messages import MemoryStatus, SnapshotRoom
from holdfast.checkpointer.restoring import Restored, await_commit, drop_parts
from holdfast.checkpointer.save_errors import is_unusable, too_slow
from holdfast.checkpointer.staging import Stager
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import ErrorWire, FencedError, HoldfastError, NotFoundError, from_wire, to_wire
from holdfast.format.records import Place
from holdfast.phases import attempt
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: How often it is looked at whether slots have become free, and when in its time a save gives up, so that all ranks
#: still hear of it.
_LOOK_S: Final = 0.01
_LATE: Final = 0.1
#: After so long it is said what a save waits for.
_PATIENCE_S: Final = 5.0
#: At the end of a job, ranks that may have ended are waited for no longer than this.
LEAVING_S: Final = 5.0

_log = logging.getLogger(__name__)


class _Key(NamedTuple):
    pid: int
    run: Location
    node_dir: Path
    rank: int


#: All tiers of this process. One registry for the process, because the slots of a rank belong to its process.
_tiers: Final[dict[_Key, MemoryTier]] = {}


def tier_for(user: object, run: Location, node_dir: Path, *, rank: int, num_slots: int) -> MemoryTier:
    """The memory tier of this process for `rank` in `run`, made where there is none, which `user` shares from now on
    until it leaves or is no more. The tier has as many slots as the user that wants most."""
    key = _Key(os.getpid(), run, node_dir, rank)
    tier = _tiers.get(key)
    if tier is None:
        tier = _tiers[key] = MemoryTier(key, num_slots=num_slots)
    tier.stager.num_slots = max(tier.stager.num_slots, num_slots)
    tier.users.add(user)
    return tier


@atexit.register
def _leave_all() -> None:
    """Finish copying, and close all tiers that are still open.

    The interpreter stops its threads for good when it ends, even one that holds a lock. A thread that waits for such a
    lock later would wait for ever, so this has to happen before.
    """
    for key, tier in tuple(_tiers.items()):
        if key.pid == os.getpid() and tier.join(LEAVING_S):
            del _tiers[key]
            tier.stager.close()


class MemoryTier:
    """Used by one thread at a time (see `holdfast.checkpointer.turn`), which makes the same calls on all ranks."""

    def __init__(self, key: _Key, *, num_slots: int) -> None:
        self._key = key
        self._run = key.run
        self._node_dir = key.node_dir
        self.stager = Stager(key.run, key.node_dir, rank=key.rank, num_slots=num_slots)
        self.users: WeakSet[object] = WeakSet()
        #: Saves that may still be going on.
        self._backgrounds: list[Background] = []
        #: Whether what is in memory was looked at.
        self._has_looked = False
        self._backoff = Backoff()
        #: Why memory could not be used the last time.
        self._trouble: ErrorWire | None = None
        #: What was restored from memory before it was committed.
        self._uncommitted: Place | None = None
        #: The newest checkpoint that memory held whole when this job looked at it.
        self._whole: Place | None = None

    @property
    def is_put_off(self) -> bool:
        """Whether the next save leaves memory alone, after earlier trouble."""
        return self._backoff.num_put_off > 0

    def begin(self, background: Background) -> int:
        """Start a save in the background; the number of its thread in the kernel."""
        self._backgrounds.append(background)
        self.stager.watch()
        return background.start()

    def settle(self) -> None:
        """Wait until all ranks have agreed on what was saved last. Raises `FencedError` when it was for nothing: this
        job must stop."""
        for background in tuple(self._backgrounds):
            background.wait()
            error = background.error
            if isinstance(error, FencedError):
                raise error
            if isinstance(error, HoldfastError) and is_unusable(error):
                self.fall_back(error)
            elif background.is_over:
                self._backgrounds.remove(background)

    def join(self, patience_s: float | None = None) -> bool:
        """Wait until nothing is being copied; for ranks that do not answer, no longer than `patience_s`. Whether that
        is so."""
        for background in tuple(self._backgrounds):
            is_over = background.join(patience_s)
            if not is_over and not (background.is_settled and background.join()):
                return False
        self._backgrounds.clear()
        return True

    def leave(self, user: object) -> None:
        """Have `user` share it no more. The last one closes what is open; what is staged stays. Nothing is being copied
        any more."""
        self.users.discard(user)
        if not self.users:
            _tiers.pop(self._key, None)
            self.stager.close()

    def fall_back(self, why: HoldfastError) -> None:
        """Give memory back: saves go to storage until it is tried again. On all ranks at the same save."""
        if not self._backoff.num_put_off:
            _log.warning("saves go to storage, and training waits for them: %s", why)
        self._backoff, self._trouble = self._backoff.after_fall_back(), to_wire(why)
        self.join()  # a save may still copy what was saved before
        self.stager.retire()

    def note_used(self) -> None:
        """Note that a save went to memory."""
        if self._backoff.has_begun:
            self._backoff = Backoff()
            _log.warning("saves go to memory again")

    def note_restored(self, restored: Restored) -> None:
        """Note what this job goes on from."""
        self._has_looked = True
        self._uncommitted, self._whole = restored.uncommitted, restored.whole

    def await_restored(self, *, timeout_s: float) -> None:
        """Wait until what was restored from memory is committed: only then something can follow it."""
        if self._uncommitted is not None:
            await_commit(self._run, self._uncommitted, node_dir=self._node_dir, timeout_s=timeout_s)
            self._uncommitted = None

    def put_off(self, channel: Channel, deadline: Deadline) -> NoReturn:
        """Tell all ranks that this one leaves memory alone, and raise why. Those that would use it hear that, too.
        Collective."""
        self.room(channel, deadline, is_as_before=False, when_full="skip", may_begin_anew=True)
        raise AssertionError("a rank that leaves memory alone has told why")

    def room(
        self,
        channel: Channel,
        deadline: Deadline,
        *,
        is_as_before: bool,
        when_full: Literal["wait", "skip"],
        may_begin_anew: bool,
    ) -> SnapshotRoom:
        """Room for another snapshot on all ranks; waits for it, unless saves are skipped then. Raises an error that
        `is_unusable` on all ranks where some rank cannot use its memory, or puts that off, and ``config`` errors where
        this job restored nothing and must not begin the run anew. Collective."""

        def look(standings: Sequence[MemoryStatus]) -> SnapshotRoom:
            found = SnapshotRoom.of(standings, self.stager.run_id or self._run_id(deadline))
            is_late = deadline.remaining_s() < _LATE * deadline.timeout_s
            if found.full and found.trouble is None and when_full == "wait" and is_late:
                raise too_slow(found, deadline.timeout_s)
            return found

        told_at = time.monotonic() + _PATIENCE_S
        while True:
            found = self._found(channel, deadline, look, is_as_before=is_as_before)
            if not found.all_looked:
                # This job did not restore: what is in memory in part only is given up, since whoever had the rest is
                # gone.
                self._whole = drop_parts(self._run, self._node_dir, channel, deadline, may_begin_anew=may_begin_anew)
                self._has_looked = True
                continue
            if self.stager.run_id != found.run_id:
                self.stager.belong_to(found.run_id)
                continue  # there is more room now
            if not found.full or when_full == "skip":
                return found
            if time.monotonic() > told_at:
                told_at = math.inf
                names = ", ".join(map(str, found.full[:8]))
                _log.warning("%s waits for memory: the snapshots of rank %s are not durable yet", channel.label, names)
            time.sleep(_LOOK_S)

    def _found(
        self,
        channel: Channel,
        deadline: Deadline,
        look: Callable[[list[MemoryStatus]], SnapshotRoom],
        *,
        is_as_before: bool,
    ) -> SnapshotRoom:
        """What all ranks find when they look at their memory once."""

        def stand() -> MemoryStatus:
            return self.stager.standing(
                is_as_before=is_as_before,
                has_looked=self._has_looked,
                whole=self._whole,
                backoff=self._backoff,
                put_off=self._trouble if self.is_put_off else None,
            )

        found = channel.exchange("memory", attempt(stand), look, deadline, takes=MemoryStatus, gives=SnapshotRoom)
        self.stager.give_up(found.given_up)
        self.stager.give_up_beyond(found.reached)
        if found.trouble is not None:
            self._backoff = found.backoff
            raise from_wire(found.trouble)
        return found

    def _run_id(self, deadline: Deadline) -> str:
        """The id of the run in storage; "" where there is none."""
        with TimedStore(open_store(self._run), timeout_s=deadline.timeout_s) as storage:
            try:
                return Run.open(storage).run_id
            except NotFoundError:
                return ""
