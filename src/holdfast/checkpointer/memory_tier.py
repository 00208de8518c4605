"""The memory tier of one rank: a run's slots in the memory of its node, and the decision whether saves use them.

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

import msgspec
import torch

from holdfast.calls import CHECKPOINTER_CLOSE, outer
from holdfast.checkpointer.background import Background
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.choosing import Clearing
from holdfast.checkpointer.commit_wait import CommitWait
from holdfast.checkpointer.memory_option import Memory, NodeDirs
from holdfast.checkpointer.restoring import Restored, drop_parts, make_room
from holdfast.checkpointer.save_errors import is_unusable, never_committed, no_time, not_committed, too_slow
from holdfast.checkpointer.snapshot_messages import MemoryStatus, SnapshotRoom
from holdfast.checkpointer.staging import Stager
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import ConfigurationError, ErrorWire, FencedError, HoldfastError, NotFoundError, from_wire, to_wire
from holdfast.format.records import Place
from holdfast.phases import attempt
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Interval at which a save checks whether slots have become free.
_LOOK_S: Final = 0.01
#: Interval of looks at what earlier jobs left in memory, by saves that find no room. In that time, a job that is being
#: killed dies, or completes its last checkpoint.
_LOOK_AGAIN_S: Final = 1.0
#: Part of its time that a save keeps: it stops waiting for a slot when no more is left, so that all ranks hear of that.
_LATE: Final = 0.1
#: A save waits for no slot when the machine of a rank exists no longer than this.
_GONE_S: Final = 0.2
#: Time after which a log line tells what a save waits for.
_PATIENCE_S: Final = 5.0
#: Time that a save waits for a slot after an earlier save has waited in vain.
_SHORT_PATIENCE_S: Final = 1.0
#: Limit of the wait for ranks that may have ended, at the end of a job.
LEAVING_S: Final = 5.0

_log = logging.getLogger(__name__)


class _Key(NamedTuple):
    pid: int
    run: Location
    node_dir: Path
    rank: int


#: All tiers of this process. There is one registry per process, because a rank's slots belong to its process.
_tiers: Final[dict[_Key, MemoryTier]] = {}


def tier_for(user: object, run: Location, node: NodeDirs, rank: int, memory: Memory) -> MemoryTier:
    """The memory tier of this process for `rank` in `run`; makes it if there is none. `user`, which has the option
    `memory`, shares it until it leaves or is garbage-collected. The tier has as many slots as the user with the most
    generations wants, and uses the disk and the protection that the last user named who named one."""
    _close_unused()
    key = _Key(os.getpid(), run, node.memory, rank)
    tier = _tiers.get(key)
    if tier is None:
        tier = _tiers[key] = MemoryTier(key, num_slots=memory.generations)
    tier.stager.num_slots = max(tier.stager.num_slots, memory.generations)
    tier.stager.disk = node.disk or tier.stager.disk
    tier.stager.protect(memory.protection)
    tier.users.add(user)
    return tier


def _close_unused() -> None:
    """Close the tiers of this process whose users were garbage-collected, and that no save has used: they hold memory
    that is reserved for nobody."""
    for key, tier in tuple(_tiers.items()):
        if key.pid == os.getpid() and not tier.users and tier.is_unused:
            del _tiers[key]
            tier.stager.close()


@atexit.register
@outer(CHECKPOINTER_CLOSE)
def _leave_all() -> None:
    """Wait for running copies, and close all tiers that are still open.

    When the interpreter ends, it stops its threads for good, even a thread that holds a lock. A thread that waits for
    such a lock later would wait for ever, so the tiers must be closed before that.
    """
    for key, tier in tuple(_tiers.items()):
        if key.pid == os.getpid() and tier.join(LEAVING_S):
            del _tiers[key]
            tier.stager.close()


class MemoryTier:
    """The memory tier of one rank. One thread at a time uses it (see `holdfast.checkpointer.turn`), with the same calls
    on all ranks."""

    def __init__(self, key: _Key, *, num_slots: int) -> None:
        self._key = key
        self._run = key.run
        self.stager = Stager(key.run, key.node_dir, rank=key.rank, num_slots=num_slots)
        self.users: WeakSet[object] = WeakSet()
        #: Background saves that may still run.
        self._backgrounds: list[Background] = []
        #: Whether this job has looked at what memory held before it.
        self._has_looked = False
        #: Whether this job has restored, or found nothing to restore.
        self._has_restored = False
        #: The time from which a save without room looks again at what earlier jobs left.
        self._looks_again_at = 0.0
        #: Whether the last save was refused in the background, for a reason that stays until the job does something, as
        #: ``config.unclear_history`` is. The next save waits, and raises it.
        self.was_refused = False
        self._backoff = Backoff()
        #: The error of the last save that could not use memory.
        self._trouble: ErrorWire | None = None
        #: The wait for the commit of the checkpoint that was restored from memory, if it was not committed then. Rank
        #: 0 looks, for all ranks.
        self._commit_wait: CommitWait | None = None
        #: The place of the newest checkpoint that memory held whole when this job looked at it.
        self._whole: Place | None = None
        #: Checkpoints of which memory has only a part, which the next save gives up.
        self._parts: tuple[str, ...] = ()
        #: Whether the last save found no slot in all the time that it had. Rank 0 knows, for all ranks.
        self._waited_in_vain = False

    @property
    def node(self) -> NodeDirs:
        """The folders of this node that saves and restores use."""
        return NodeDirs(self.stager.node_dir, self.stager.disk, self.stager.policy)

    @property
    def is_unused(self) -> bool:
        """Whether no save has used memory, or is about to."""
        return not self._backgrounds and self.stager.is_unused

    @property
    def is_put_off(self) -> bool:
        """Whether the next save does not try memory, after earlier trouble."""
        return self._backoff.num_put_off > 0

    def begin(self, background: Background) -> int:
        """Start a background save, and return the kernel number of its thread."""
        self._backgrounds.append(background)
        self.stager.watch()
        return background.start()

    def settle(self) -> None:
        """Wait until all ranks have agreed on the last save. Raises `FencedError` if that save found that another job
        has taken over the run: this job must stop."""
        for background in tuple(self._backgrounds):
            background.wait()
            error = background.error
            if isinstance(error, FencedError):
                raise error
            if isinstance(error, HoldfastError) and is_unusable(error):
                self.fall_back(error)
            elif background.is_over:
                self.was_refused = isinstance(error, ConfigurationError)
                self._backgrounds.remove(background)

    def join(self, patience_s: float | None = None) -> bool:
        """Wait until no background save is copying, but for ranks that do not answer no longer than `patience_s`.
        Returns whether no save is copying now."""
        for background in tuple(self._backgrounds):
            is_over = background.join(patience_s)
            if not is_over and not (background.is_settled and background.join()):
                return False
        self._backgrounds.clear()
        return True

    def leave(self, user: object) -> None:
        """Remove `user` from the users of the tier. After the last one, the memory is closed; staged snapshots stay
        there. Call it only when no save is copying."""
        self.users.discard(user)
        if not self.users:
            _tiers.pop(self._key, None)
            self.stager.close()

    def fall_back(self, why: HoldfastError) -> None:
        """Give memory back: saves go to storage until a save tries memory again. All ranks do this at the same save."""
        if not self._backoff.num_put_off:
            _log.warning("saves go to storage, and training waits for them, because memory cannot be used: %s", why)
        self._backoff, self._trouble = self._backoff.after_fall_back(), to_wire(why)
        self.join()  # an earlier save may still be copying
        self.stager.retire()

    def reserve(self, nbytes: int, *, device: torch.device | None) -> None:
        """As `Stager.reserve`, unless earlier trouble puts memory off."""
        if not self.is_put_off:
            self.stager.reserve(nbytes, device=device)

    def note_used(self) -> None:
        """Record that a save used memory."""
        if self._backoff.has_begun:
            self._backoff = Backoff()
            _log.warning("saves go to memory again")

    def note_restored(self, restored: Restored) -> None:
        """Record the checkpoint from which this job continues."""
        self._has_looked = self._has_restored = True
        self._looks_again_at = time.monotonic() + _LOOK_AGAIN_S
        self._commit_wait = None if restored.uncommitted is None else CommitWait(restored.uncommitted)
        self._whole, self._parts = restored.whole, restored.parts

    def put_off(self, channel: Channel, deadline: Deadline) -> NoReturn:
        """Tell all ranks that this one does not try memory now, and raise the reason. Ranks that would try hear it too.
        Collective."""
        self.room(channel, deadline, is_as_before=False, when_full="skip", may_begin_anew=True)
        raise AssertionError("a rank that does not try memory has said why")

    def room(
        self,
        channel: Channel,
        deadline: Deadline,
        *,
        is_as_before: bool,
        when_full: Literal["wait", "skip"],
        may_begin_anew: bool,
        memory_only: bool = False,
        left_s: Callable[[], float] = lambda: math.inf,
        check: Callable[[str], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> SnapshotRoom:
        """Find out whether all ranks have room for another snapshot. Waits for room if `when_full` says so. Before
        that, waits until the checkpoint that this job restored from memory is committed. It waits for nothing when
        ``left_s`` of any rank, the time until its machine is gone, is over, nor for a save to memory alone. Calls
        `tell` with the reason when it has waited for some seconds. Collective.

        Raises an error that `is_unusable`, on all ranks, if any rank cannot use its memory, or puts off trying it;
        ``config`` errors if this job restored nothing and must not begin the run anew; and `FencedError` if the
        checkpoint that it restored can never be committed, because another job has taken over the run.
        """

        begun_s = time.monotonic()

        def look(standings: Sequence[MemoryStatus]) -> SnapshotRoom:
            found = self._answer(standings, deadline, begun_s, waits=when_full == "wait" and not memory_only)
            check(found.held_up)
            return found

        told_at = begun_s + _PATIENCE_S
        if self._parts:  # the run goes on without them
            self.stager.give_up(self._parts)
            self._parts = ()
        if self._commit_wait is not None:
            self._commit_wait.begin()
        while True:
            found = self._found(channel, deadline, look, is_as_before=is_as_before, left_s=left_s)
            if not found.all_looked:
                # This job did not restore. Give up the checkpoints of which memory has only a part: the nodes or ranks
                # that had the rest are gone.
                self._whole = drop_parts(self._run, self.node, channel, deadline, may_begin_anew=may_begin_anew)
                self._has_looked = True
                self._looks_again_at = time.monotonic() + _LOOK_AGAIN_S
                continue
            if found.is_new_run:
                # A rank alone may have given its memory back, and all must look as often as it does.
                if self.stager.run_id != found.run_id:
                    self.stager.belong_to(found.run_id)
                continue  # foreign slots were freed, so look again
            if found.looks_again:
                clearing = Clearing(self.stager.first, takes_over=self._has_restored)
                make_room(self._run, self.node, channel, deadline, clearing)
                self._looks_again_at = time.monotonic() + _LOOK_AGAIN_S
            if found.has_room or memory_only or (found.full and when_full == "skip"):
                return found
            if time.monotonic() > told_at:
                told_at = math.inf
                _log.warning("%s waits for memory: %s", channel.label, found.why_full)
                tell(found.why_full)
            time.sleep(_LOOK_S)

    def _found(
        self,
        channel: Channel,
        deadline: Deadline,
        look: Callable[[list[MemoryStatus]], SnapshotRoom],
        *,
        is_as_before: bool,
        left_s: Callable[[], float],
    ) -> SnapshotRoom:
        """The answer after all ranks have looked at their memory once. Raises the trouble of any rank."""

        def stand() -> MemoryStatus:
            wait = self._commit_wait
            if wait is not None and not wait.is_asked and not self.is_put_off:
                self.stager.promote(wait.restored.checkpoint_id)
                wait.is_asked = True
            status = self.stager.standing(
                is_as_before=is_as_before,
                has_looked=self._has_looked,
                whole=self._whole,
                backoff=self._backoff,
                awaited=None if self._commit_wait is None else self._commit_wait.restored.place,
                put_off=self._trouble if self.is_put_off else None,
            )
            return msgspec.structs.replace(status, left_s=left_s(), run_id=self.stager.run_id)

        found = channel.exchange("memory", attempt(stand), look, deadline, takes=MemoryStatus, gives=SnapshotRoom)
        if self._commit_wait is not None and not found.awaits_commit and found.trouble is None:
            if self._commit_wait.restored.checkpoint_id in found.given_up:
                self._whole = None
            self._commit_wait = None
        self.stager.give_up(found.given_up)
        self.stager.give_up_beyond(found.reached)
        if found.trouble is not None:
            self._backoff = found.backoff
            raise from_wire(found.trouble)
        return found

    def _answer(
        self, standings: Sequence[MemoryStatus], deadline: Deadline, begun_s: float, *, waits: bool
    ) -> SnapshotRoom:
        """Rank 0's answer to all ranks. Raises `DeadlineError` if the save waits for room, since ``begun_s``, and may
        not wait longer: after a save that waited in vain, the next ones wait `_SHORT_PATIENCE_S`."""
        is_over = deadline.remaining_s() < _LATE * deadline.timeout_s
        found = SnapshotRoom.of(standings, self.stager.run_id or self._run_id(deadline))
        if found.trouble is not None:
            return found
        if self._commit_wait is not None:
            found = self._with_commit(found, self._commit_wait, standings, deadline, is_over=is_over)
            if found.awaits_commit:
                if found.full and waits:
                    raise not_committed(self._commit_wait.restored.place, found.held_up, self._run.url)
                return found
        waited_s = time.monotonic() - begun_s
        if found.full and waits and (is_over or (self._waited_in_vain and waited_s > _SHORT_PATIENCE_S)):
            self._waited_in_vain = True
            raise too_slow(found, waited_s)
        self._waited_in_vain &= bool(found.full)
        if found.full and waits and min(status.left_s for status in standings) < _GONE_S:
            raise no_time(found)
        has_left = any(standings[number].has_left for number in found.full)
        return msgspec.structs.replace(found, looks_again=has_left and time.monotonic() > self._looks_again_at)

    def _with_commit(
        self,
        found: SnapshotRoom,
        wait: CommitWait,
        standings: Sequence[MemoryStatus],
        deadline: Deadline,
        *,
        is_over: bool,
    ) -> SnapshotRoom:
        """`found`, with rank 0's answer whether the checkpoint that this job restored from memory is committed.

        If it can never be, all ranks give it up and go on: memory holds its state no longer, but this job has it.
        Raises `FencedError` if another job has taken over the run, or the keeper says that this is another history.
        """
        restored, fenced = wait.restored, next((each.fenced for each in standings if each.fenced), "")
        with TimedStore(open_store(self._run), timeout_s=deadline.for_storage_s) as storage:
            fate = wait.look(storage, at_once=bool(fenced))
        if fate == "committed":
            return found
        if fate == "never":
            return msgspec.structs.replace(found, given_up=(*found.given_up, restored.checkpoint_id))
        if fenced:
            raise never_committed(restored.place, fenced, self._run.url)
        full = tuple(range(len(standings))) if wait.is_late(is_over=is_over) else ()
        return msgspec.structs.replace(found, awaits_commit=True, full=full)

    def _run_id(self, deadline: Deadline) -> str:
        """The id of the run in storage; "" if storage has no run there."""
        with TimedStore(open_store(self._run), timeout_s=deadline.for_storage_s) as storage:
            try:
                return Run.open(storage).run_id
            except NotFoundError:
                return ""
