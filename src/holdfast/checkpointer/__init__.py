"""`Checkpointer`: saves that training does not wait for, and that survive the death of the training processes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, SupportsFloat

import msgspec
from torch.distributed import ProcessGroup

from holdfast.agreement.assignment import Share
from holdfast.agreement.coordinator import Request
from holdfast.agreement.planning import Known
from holdfast.checkpointer.background import Background
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.handle import Handle, last_try
from holdfast.checkpointer.job import Job, interrupted
from holdfast.checkpointer.messages import Agreed, Answer, Room
from holdfast.checkpointer.planner import StagePlanner, StagePlanning, room
from holdfast.checkpointer.restoring import RestoreReport, await_commit, drop_parts, restore
from holdfast.checkpointer.staging import Stager, is_unusable, next_share
from holdfast.checkpointer.turn import Turn
from holdfast.control.channel import Channel, Deadline, check_timeout
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.decoding import decode_msgpack
from holdfast.errors import (
    ConfigurationError,
    DeadlineError,
    ErrorWire,
    FencedError,
    HoldfastError,
    NotFoundError,
    from_wire,
    to_wire,
)
from holdfast.format.patterns import Globs
from holdfast.format.records import Place, now
from holdfast.format.values import Node
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR
from holdfast.phases import Stopwatch, attempt
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.saving import numbers_of, run_location, save
from holdfast.snapshot.capture import Snapshot
from holdfast.state.flatten import FlatState, check_root
from holdfast.state.identity import parts_of
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import absolute, open_store

#: How often it is looked at whether slots have become free, and when in its time a save gives up, so that all ranks
#: still hear of it.
_LOOK_S: Final = 0.01
_LATE: Final = 0.1
#: After so long it is said what a save waits for; and, after an error of the training, ranks that may have ended are
#: waited for no longer.
_PATIENCE_S: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How the memory of a node is used: `generations` snapshots per rank, at least 2 (one is whole while the next is
    copied), in `node_dir`, a file system in memory (its path, as text too)."""

    generations: int = 2
    node_dir: Path = DEFAULT_NODE_DIR

    def __post_init__(self) -> None:
        if self.generations < 2:
            raise ValueError(f"generations is {self.generations}: one must be whole while the next is copied")
        object.__setattr__(self, "node_dir", Path(absolute(str(self.node_dir))))


class Checkpointer:
    """The checkpoints of one training loop: `save` returns in milliseconds, `restore` goes on from the newest.

    A save copies the state into memory of the node that outlives this process: what only steps of the optimizers in
    `state` change is copied while training goes on, and the next step waits for it; everything else at once. A keeper,
    a process of its own per node and run, makes the copy durable and commits it. Where there is not enough memory, a
    save writes to storage, and returns when that is done; so it does with ``memory=None``.

    All methods but `guard` are collective over `group` (default: all ranks of the job), and for one thread; one plain
    process is fine too. `state` is walked anew at every save. A run that has a history must have been restored or
    loaded from by this job, unless ``takeover=True``. ``when_full`` says what a save does while no slot of memory is
    free, because storage is slower than saves come: wait, or skip that save, on all ranks together. A takeover happens
    once, at the first save. `select` are globs of names, as in `holdfast.save` and `holdfast.load`: only what they
    match is saved and restored.

    Use as a context manager: its end waits until all that was saved is durable.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Location,
        state: Mapping[str, object],
        *,
        memory: Memory | None = Memory(),
        select: str | Sequence[str] | None = None,
        group: ProcessGroup | None = None,
        takeover: bool = False,
        when_full: Literal["wait", "skip"] = "wait",
        timeout_s: float = 600.0,
    ) -> None:
        if when_full not in ("wait", "skip"):
            raise ValueError(f"when_full is 'wait' or 'skip', not {when_full!r}")
        if not isinstance(memory, Memory | None):
            raise TypeError(f"memory is a holdfast.Memory, or None for saves to storage alone, not {memory!r}")
        check_timeout(timeout_s)
        self._run = run_location(run)
        check_root(state)
        self._state = state
        self._select = select
        self._globs = None if select is None else Globs(select)
        self._memory = memory
        self._group = group
        self._takeover = takeover
        self._when_full = when_full
        self._timeout_s = timeout_s
        self._known = Known()
        self._stager: Stager | None = None
        self._is_closed = False
        self._turn = Turn()
        #: Saves that may still be going on.
        self._backgrounds: list[Background] = []
        #: Whether what is in memory was looked at.
        self._goes_on = False
        self._backoff = Backoff()
        #: Why memory could not be used the last time.
        self._trouble: ErrorWire | None = None
        #: What was restored from memory before it was committed.
        self._uncommitted: Place | None = None
        #: The newest checkpoint that memory held whole when this job looked at it.
        self._whole: Place | None = None
        self._handles: list[Handle] = []

    def save(self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None) -> Handle:
        """Save the state as of now; see the class for what is done when. `step` is the number of the step that was
        finished last.

        Returns when everything is set aside that may change before the next step of an optimizer in the state; in the
        background all ranks agree on a plan and a place, and the rest is copied. (The first save of all returns when
        they have agreed, and there is memory.) What becomes of it stands in the handle. That an earlier save failed is
        logged, once; training goes on.

        Raises:
            StateError: the state cannot be saved.
            ConfigurationError, StorageError: the first save, as `holdfast.save`; of later ones it stands in the handle.
            FencedError: this job must stop: another one has taken over the run. For a save that finds this out in the
                background it stands in the handle, and the next one raises it.
            DeadlineError: ranks did not answer, or no slot became free.
            ConfigurationError: code ``config.closed``, after `close`.

        Where an exception of another kind ends the call (Ctrl-C, say), nothing comes of this save, and the next one is
        not affected.
        """
        self._require_open("save")
        if type(step) is not int or step < 0:
            raise ValueError(f"step is a whole number from 0 on, not {step!r}")
        with self._turn.taken("save"):
            return self._save(Handle(step), metrics)

    def _save(self, handle: Handle, metrics: Mapping[str, SupportsFloat] | None) -> Handle:
        begun_s = time.perf_counter()
        numbers = numbers_of(metrics or {})
        self._report()
        try:
            self._settle()
            self._await_restored()
            if not self._is_in_memory(handle, numbers):
                self._save_through(handle, metrics)
        except HoldfastError as error:
            handle.fail(error)
            raise
        handle.blocked_s = time.perf_counter() - begun_s
        if handle.skipped:
            _log.warning("%s", handle.durable.error)
        else:
            self._handles.append(handle)
        return handle

    def restore(self, *, verify: bool = True) -> RestoreReport:
        """Fill the state from the newest checkpoint on the run's lineage: from the memory of the nodes, if it is there,
        else from storage. In a run without any, nothing is changed, and ``report.next_step`` is 0.

        Raises what `holdfast.load` raises; after `close` `ConfigurationError`, code ``config.closed``.
        """
        self._require_open("restore")
        with self._turn.taken("restore"):
            for background in self._backgrounds:
                background.join()
            self._goes_on = True
            report, self._uncommitted, self._whole = restore(
                self._run,
                self._state,
                node_dir=None if self._memory is None else self._memory.node_dir,
                select=self._select,
                group=self._group,
                verify=verify,
                timeout_s=self._timeout_s,
            )
            return report

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A ``with`` block that is entered when nothing of the state is being copied: for changes that no step of an
        optimizer in the state makes. Not collective. After `close` nothing is being copied."""
        if self._stager is not None:
            self._stager.guard.wait()
        yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all that was saved is durable; what was skipped was not. Raises why something is not, after
        `close` too."""
        for handle in self._handles:
            handle.durable.wait(self._timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Wait until all that was saved is durable, and let go of the memory, which stays. Raises why something is not
        durable. May be called again. Afterwards `save` and `restore` raise ``config.closed``. In a forked process
        nothing is waited for: the saves are the parent's."""
        self._is_closed = True
        if self._turn.is_of_parent:
            return
        try:
            self.wait()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        self._require_open("a with block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # What ended training must not be hidden, nor wait for storage: the keeper goes on.
        self._is_closed = True
        if self._turn.is_of_parent:
            return
        self._report()
        self._let_go(patience_s=_PATIENCE_S)

    def _require_open(self, verb: str) -> None:
        if self._is_closed:
            raise ConfigurationError(
                f"{verb} was called on a Checkpointer of '{self._run}' that is closed.",
                code="config.closed",
                action="Make a new Checkpointer, or close this one only when training is over.",
                path=self._run.url,
            )

    def _let_go(self, *, patience_s: float | None = None) -> None:
        """Close what is open. Waits for what is being copied; for ranks that do not answer, no longer than
        `patience_s`."""
        for background in self._backgrounds:
            is_over = background.join(patience_s)
            if not is_over and not (background.is_settled and background.join()):
                return  # it ends with the process
        self._backgrounds.clear()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _fall_back(self, why: HoldfastError) -> None:
        """Give memory back: saves go to storage until it is tried again. On all ranks at the same save."""
        if not self._backoff.num_put_off:
            _log.warning("saves go to storage, and training waits for them: %s", why)
        self._backoff, self._trouble = self._backoff.after_fall_back(), to_wire(why)
        for background in self._backgrounds:
            background.join()  # it may still copy what was saved before
        self._backgrounds.clear()
        if self._stager is not None:
            self._stager.retire()
        self._known.share = None  # so that the next plan is made known to all, who take memory for it

    def _settle(self) -> None:
        """Wait until all ranks have agreed on what was saved last. Raises `FencedError` when it was for nothing: this
        job must stop."""
        for background in tuple(self._backgrounds):
            background.wait()
            error = background.error
            if isinstance(error, FencedError):
                raise error
            if isinstance(error, HoldfastError) and is_unusable(error):
                self._fall_back(error)
            elif background.is_over:
                self._backgrounds.remove(background)

    def _report(self) -> None:
        """Log what failed since the last call, and forget handles of which nothing more is to be known."""
        for handle in [handle for handle in self._handles if handle.durable.is_over]:
            self._handles.remove(handle)
            if handle.durable.error is not None:
                _log.error("step %d is not durable: %s", handle.step, handle.durable.error)

    def _await_restored(self) -> None:
        """Wait until what was restored from memory is committed: only then something can follow it."""
        if self._uncommitted is not None:
            assert self._memory is not None
            await_commit(self._run, self._uncommitted, node_dir=self._memory.node_dir, timeout_s=self._timeout_s)
            self._uncommitted = None

    def _save_through(self, handle: Handle, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Save to storage, and return when that is done."""
        report = save(
            self._run,
            self._state,
            handle.step,
            metrics=metrics,
            select=self._select,
            group=self._group,
            takeover=self._takeover,
            timeout_s=self._timeout_s,
        )
        handle.place = Place.parse(report.place)
        handle.staged.end(nbytes=report.written_nbytes)
        handle.durable.end(nbytes=report.written_nbytes)

    def _is_in_memory(self, handle: Handle, metrics: dict[str, float]) -> bool:
        """Save into memory. False, and nothing saved, where the memory of some node cannot be used, or could not."""
        if self._memory is None:
            return False
        try:
            if self._backoff.num_put_off:
                self._put_off(handle)
            self._stage(handle, metrics)
        except HoldfastError as error:
            if not is_unusable(error):
                raise
            self._fall_back(error)
            return False
        if self._backoff.has_begun:
            self._backoff = Backoff()
            _log.warning("saves go to memory again")
        return True

    def _put_off(self, handle: Handle) -> None:
        """Tell all ranks that this one leaves memory alone, and raise why. Those that would use it hear that, too."""
        deadline = Deadline(self._timeout_s)
        channel = default_channel(f"save of step {handle.step}", self._group, deadline=deadline, step=handle.step)
        stager = self._opened(group_ranks(self._group)[channel.rank])
        self._room(channel, stager, deadline, is_as_before=False)

    def _stage(self, handle: Handle, metrics: dict[str, float]) -> None:
        """Save into memory. Raises an error that `is_unusable` on all ranks where the memory of some node is."""
        deadline = Deadline(self._timeout_s)
        channel = default_channel(f"save of step {handle.step}", self._group, deadline=deadline, step=handle.step)
        handle.is_told = channel.rank == 0
        stager = self._opened(group_ranks(self._group)[channel.rank])
        sources = JOB.sources(lambda: parts_of(self._state))
        hold = stager.guard.hold()
        try:
            taken = self._taken(stager, channel)
            free = self._room(
                channel, stager, deadline, is_as_before=isinstance(taken, Snapshot) and taken.is_as_before
            )
            if free.full and self._when_full == "skip":
                handle.skip(free.full, free.held_up)
                return
            is_awaited = not free.as_before
            later = channel.in_background()
            job = Job(
                handle, metrics, later, deadline, stager, hold, taken, sources, free.needed, is_awaited, self._go_on
            )
            background = Background(job)
            self._backgrounds.append(background)
            copier = background.start()
            if is_awaited:
                background.wait()
                if background.error is not None:
                    raise background.error
            if isinstance(taken, Snapshot):
                background.wait_for(taken.instant)
            hold.pass_on(copier)
        finally:
            hold.drop()  # unless it was passed on: else nothing comes of this save

    def _drop_parts(self, channel: Channel, deadline: Deadline) -> None:
        """Where this job did not restore, give up what is in memory in part only; whoever had the rest is gone."""
        assert self._memory is not None
        self._whole = drop_parts(self._run, self._memory.node_dir, channel, deadline)
        self._goes_on = True

    def _taken(self, stager: Stager, channel: Channel) -> Snapshot | Exception:
        """The state as of now, under the guard; or why it cannot be saved, of which all ranks must hear."""
        try:
            number, world_size, walk = channel.rank, channel.world_size, self._known.walk
            taken = Snapshot(self._state, rank=number, world_size=world_size, last=walk, select=self._globs)
            stager.guard.hook(taken.optimizers)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised when all have heard of it
            return error
        return taken

    def _go_on(self, job: Job, background: Background) -> None:
        """Agree with all ranks, copy, and hand over to the keeper. In the background; whatever is raised, `job` gives
        back what it holds."""
        with job.queued.passed():
            agreed, share = self._copy(job, background)
            if not job.hold.is_passed_on(job.deadline.remaining_s()):
                raise interrupted(job.handle.step)
            # First: who hears that it is staged counts on the memory of what was set aside.
            job.release()
            job.stager.finish(job.handle, agreed, share, job.slot)
            job.is_finished = True

    def _copy(self, job: Job, background: Background) -> tuple[Agreed, Share]:
        """Agree with all ranks, and copy the state into a slot."""
        agreed, share, flat, values = self._agree(job)
        job.slot = job.stager.slot_for(agreed, share, needed=job.needed)
        routes = None if job.slot is None else job.stager.begin(job.slot, agreed, share, values)
        job.handle.place = agreed.place
        job.settle(background)
        if routes is not None:
            job.copy(flat, routes)
        return agreed, share

    def _agree(self, job: Job) -> tuple[Agreed, Share, FlatState, dict[str, Node]]:
        """What all ranks agree on, with memory for it, and what this one has to save."""
        ranks = group_ranks(self._group)
        rank = ranks[job.channel.rank]
        with TimedStore(open_store(self._run), timeout_s=job.deadline.for_storage_s) as storage:
            takeover = self._takeover
            request = Request(storage, job.handle.step, job.metrics, takeover, now(), False, job.sources)
            planner = StagePlanner(request, ranks, self._known.memory)
            planning = StagePlanning(job.channel, job.deadline, rank, planner, self._known, Stopwatch(), answers=Answer)
            agreed, mine = planning.agree(job.flat)
            job.agreed = agreed
        share = next_share(agreed, self._known.share, rank)
        if agreed.manifest:
            self._prepare(job, share)
        planning.remember(share)
        return agreed, share, mine.flat, planning.values(mine)

    def _room(self, channel: Channel, stager: Stager, deadline: Deadline, *, is_as_before: bool) -> Room:
        """Room for another snapshot on all ranks; waits for it, unless saves are skipped then. Raises an error that
        `is_unusable` on all ranks where some rank cannot use its memory, or puts that off."""

        def look(payloads: Sequence[bytes]) -> bytes:
            found = room(payloads, stager.run_id or self._run_id())
            is_late = deadline.remaining_s() < _LATE * self._timeout_s
            if found.full and found.trouble is None and self._when_full == "wait" and is_late:
                raise _too_slow(found, self._timeout_s)
            return msgspec.msgpack.encode(found)

        told_at = time.monotonic() + _PATIENCE_S
        while True:
            standing = attempt(
                lambda: msgspec.msgpack.encode(
                    stager.standing(
                        is_as_before=is_as_before,
                        has_looked=self._goes_on,
                        whole=self._whole,
                        backoff=self._backoff,
                        put_off=self._trouble if self._backoff.num_put_off else None,
                    )
                )
            )
            answer = channel.exchange("memory", standing, look, deadline)
            found = decode_msgpack(answer, Room)
            stager.give_up(found.given_up)
            stager.give_up_beyond(found.reached)
            if found.trouble is not None:
                self._backoff = found.backoff
                raise from_wire(found.trouble)
            if not found.all_looked:
                self._drop_parts(channel, deadline)
                continue
            if stager.run_id != found.run_id:
                stager.belong_to(found.run_id)
                continue  # there is more room now
            if not found.full or self._when_full == "skip":
                return found
            if time.monotonic() > told_at:
                told_at = math.inf
                names = ", ".join(map(str, found.full[:8]))
                _log.warning("%s waits for memory: the snapshots of rank %s are not durable yet", channel.label, names)
            time.sleep(_LOOK_S)

    def _run_id(self) -> str:
        """The id of the run in storage; "" where there is none."""
        with TimedStore(open_store(self._run), timeout_s=self._timeout_s) as storage:
            try:
                return Run.open(storage).run_id
            except NotFoundError:
                return ""

    def _opened(self, rank: int) -> Stager:
        if self._stager is None:
            assert self._memory is not None
            node_dir, num_slots = self._memory.node_dir, self._memory.generations
            self._stager = Stager(self._run, node_dir, rank=rank, num_slots=num_slots)
        self._stager.watch()
        return self._stager

    def _prepare(self, job: Job, share: Share) -> None:
        """Have memory for a new plan on all ranks. Raises on all where some rank has not enough."""

        def prepare() -> bytes:
            if not job.stager.fits(share):
                job.stager.prepare(share, device=job.queued.device, timeout_s=job.deadline.for_storage_s)
            return b""

        job.channel.collect("memory", attempt(prepare), job.deadline)


def _too_slow(found: Room, timeout_s: float) -> DeadlineError:
    names = ", ".join(map(str, found.full[:8]))
    return DeadlineError(
        f"No slot of rank {names} became free within {timeout_s:.0f} s: the snapshots in them are not durable.",
        code="timeout.slot",
        action="Save less often, keep more generations, or see the log of the keeper for what holds it up.",
        rank=found.full[0],
        details=last_try(found.held_up),
    )
