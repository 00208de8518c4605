"""The background part of one save: the resources that it holds, and their release."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.agreement.assignment import StoredShare
from holdfast.agreement.planner import Planner
from holdfast.agreement.planning import Planning, StoredPlanCache
from holdfast.agreement.request import SaveRequest
from holdfast.checkpointer.background import Background
from holdfast.checkpointer.peer_meeting import check_policies
from holdfast.checkpointer.save_errors import interrupted, not_staged
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.snapshot_messages import ANSWERS, Agreed
from holdfast.checkpointer.staged_place import StagedPlace
from holdfast.checkpointer.staging import Stager, next_share
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import HoldfastError
from holdfast.format.patterns import Globs
from holdfast.format.records import Place, now
from holdfast.format.values import Node
from holdfast.node_memory.node_folder import memory_error
from holdfast.node_memory.slots import Slot
from holdfast.phases import Stopwatch, attempt
from holdfast.run.loads import Sources
from holdfast.run.session import Takeover
from holdfast.snapshot.capture import Snapshot
from holdfast.snapshot.device import Queued
from holdfast.snapshot.guard import Hold
from holdfast.state.flatten import FlatState
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavingJob:
    """The facts that all background saves of one `Checkpointer` share: the run, the global ranks of the job, the last
    agreed plan (`known`), and whether the job takes over the run."""

    run: Location
    ranks: Sequence[int]
    known: StoredPlanCache
    takeover: Takeover


def capture(
    state: Mapping[str, object], *, select: Globs | None, stager: Stager, channel: Channel, known: StoredPlanCache
) -> Snapshot | Exception:
    """Take a snapshot of the state as it is now, under the guard of `stager`. Returns the error if the state cannot be
    saved, because all ranks must hear of it."""
    if known.share is not None and (stager.has_to_meet or not stager.fits(known.share)):
        known.share = None  # so that rank 0 sends the next plan to all ranks, which then take memory for it, and meet
    try:
        snapshot = Snapshot(state, rank=channel.rank, world_size=channel.world_size, last=known.walk, select=select)
        stager.guard.hook(snapshot.optimizers)
    except Exception as error:  # noqa: BLE001 - any error: this rank raises it after all ranks have heard of it
        return error
    return snapshot


@dataclass
class BackgroundSave:
    """One save in the background. It holds the guard (`hold`). Once all ranks have agreed, it also holds the
    checkpoint's id (`agreed`: the other ranks count on this rank's part) and a slot. `end` releases all of that.

    `taken` is the snapshot, or the error that prevented it. `sources` are the loads that filled the state. With
    `is_awaited`, the saving thread waits until this is settled, and raises any error up to then.
    """

    job: SavingJob
    machine: SaveMachine
    metrics: dict[str, float]
    channel: Channel
    deadline: Deadline
    stager: Stager
    hold: Hold
    taken: Snapshot | Exception
    sources: Sources
    needed: Place | None
    is_awaited: bool
    agreed: Agreed | None = None
    slot: Slot | None = None
    is_settled: bool = False
    is_finished: bool = False

    def run(self, background: Background) -> None:
        """Agree with all ranks, copy the state, and hand the slot to the keeper. If this raises, `end` releases
        everything."""
        with self._queued.passed():
            agreed, share = self._copy(background)
            if not self.hold.is_passed_on(self.deadline.remaining_s()):
                raise interrupted(self.machine.step)
            # Before the listeners hear that it is staged: they rely on the memory of the clones being free again.
            self._release()
            self.stager.finish(self.machine, agreed, share, self.slot)
            self.is_finished = True

    def end(self, error: BaseException | None) -> None:
        """Release everything that this holds. If the save did not finish, tell the listeners that it failed."""
        self._release()
        self.channel.leave()
        if self.is_finished:
            return
        if self.agreed is not None:
            self.stager.fail(self.agreed.checkpoint_id, self._quiet_slot(), error)
        if not self.is_awaited or self.is_settled:
            self._tell(error)
        self.is_finished = True

    def _copy(self, background: Background) -> tuple[Agreed, StoredShare]:
        """Agree with all ranks, and copy the state into a slot."""
        agreed, share, flat, values = self._agree()
        self.slot = self.stager.slot_for(agreed, share, needed=self.needed)
        routes = None if self.slot is None else self.stager.begin(self.slot, agreed, share, values)
        self.machine.put(agreed.place)
        # This save has a place in the history, and a slot: the next save may begin.
        self.is_settled = True
        background.settle()
        if routes is not None:
            assert isinstance(self.taken, Snapshot)
            self.taken.copy(flat.tensors, routes)
        return agreed, share

    def _agree(self) -> tuple[Agreed, StoredShare, FlatState, dict[str, Node]]:
        """Agree with all ranks on the checkpoint and on this rank's share, with memory for it on all ranks. Returns
        both, and this rank's state and values."""
        job, known = self.job, self.job.known
        rank, step = job.ranks[self.channel.rank], self.machine.step
        with TimedStore(open_store(job.run), timeout_s=self.deadline.for_storage_s) as storage:
            request = SaveRequest(storage, step, self.metrics, job.takeover, now(), self.sources)
            placing = StagedPlace(request, num_ranks=len(job.ranks), memory_only=self.machine.memory_only)
            equal = partial(self.sources.made_equal, job.ranks)
            planner = Planner(placing, job.ranks, known.memory, what=f"step {step}", strict=False, equal=equal)
            planning = Planning(self.channel, self.deadline, rank, planner, known, Stopwatch(), answers=ANSWERS)
            agreed, mine = planning.agree(self._flat)
            self.agreed = agreed
        share = next_share(agreed, known.share, rank)
        if agreed.manifest:
            self._prepare(share, mine.flat)
        known.remember(share, planner.memory)
        return agreed, share, mine.flat, planning.values(mine)

    def _prepare(self, share: StoredShare, flat: FlatState) -> None:
        """Take memory for a new plan on all ranks, and have it protected. Raises on all ranks if one has too little.
        Collective."""

        def prepare() -> bytes:
            if not self.stager.fits(share):
                self.stager.prepare(share, device=self._queued.device, timeout_s=self.deadline.for_storage_s)
            return self.stager.policy.encode()

        def all_ready(policies: list[bytes]) -> bytes:
            check_policies([policy.decode() for policy in policies])
            return b""

        begun_s = time.perf_counter()
        self.channel.exchange("memory", attempt(prepare), all_ready, self.deadline)
        self.stager.meet_peers(flat, self.channel, self.deadline)
        self.machine.have_memory(time.perf_counter() - begun_s)

    def _flat(self) -> FlatState:
        """The whole state. Raises the error that prevented the snapshot."""
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken.flat()

    @property
    def _queued(self) -> Queued:
        """The work that was queued on devices at the time of the snapshot: reads of the state in the background wait
        for it."""
        return self.taken.queued if isinstance(self.taken, Snapshot) else Queued(())

    def _release(self) -> None:
        """Let training change the state again: it is copied, or this save will not copy it."""
        if isinstance(self.taken, Snapshot):
            self.taken.end()
        self.hold.release()

    def _quiet_slot(self) -> Slot | None:
        """The slot, after devices have ended their writes to it. (An error in the middle of a copy leaves queued copies
        running.) None if a device cannot tell that; such a slot is not used again."""
        try:
            self._queued.await_copies()
        except RuntimeError:
            _log.exception(
                "a slot cannot be used again: the device may still be copying step %d to it", self.machine.step
            )
            return None
        return self.slot

    def _tell(self, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            error = memory_error(self.stager.node_dir, error)
        if error is None:  # an exception hit the thread's own note of what ended it
            error = interrupted(self.machine.step)
        if isinstance(error, HoldfastError):
            self.machine.fail(error)
        else:
            self.machine.fail(not_staged(self.machine.step, error), cause=error)
