"""`Checkpointer`: saves that training does not wait for, and that survive the death of the training processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, SupportsFloat

from torch.distributed import ProcessGroup

from holdfast.agreement.planning import PlanCache
from holdfast.checkpointer.background import Background
from holdfast.checkpointer.background_save import BackgroundSave, SavingJob, capture
from holdfast.checkpointer.events import StateRestored
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.memory_tier import LEAVING_S, MemoryTier, tier_for
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.checkpointer.restoring import restore
from holdfast.checkpointer.save_errors import is_unusable, skipped
from holdfast.checkpointer.save_log import SaveLog, log_restored
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.turn import turn_in
from holdfast.control.deadline import Deadline, check_timeout
from holdfast.control.torch_store import default_channel, global_rank, group_ranks
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.format.patterns import Globs
from holdfast.format.records import Place
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR
from holdfast.run.session import JOB
from holdfast.saving import numbers_of, run_location, save, whole
from holdfast.snapshot.capture import Snapshot
from holdfast.snapshot.guard import Guard, changing
from holdfast.state.flatten import check_root
from holdfast.state.identity import parts_of
from holdfast.store.base import Location
from holdfast.store.urls import absolute


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
        self._known = PlanCache()
        #: The memory tier of this process, which it shares with others of this run; None before it is needed.
        self._tier: MemoryTier | None = None
        self._is_closed = False
        self._turn = turn_in(self._run)
        self._handles: list[Handle] = []
        #: Of saves to storage; memory has a guard of its own.
        self._guard = Guard()

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
        handle = Handle(whole(step))
        machine = SaveMachine(handle.step, handle.hear, SaveLog(handle).hear)
        with self._turn.taken("save"):
            begun_s = time.perf_counter()
            self._save(machine, metrics)
            handle.blocked_s = time.perf_counter() - begun_s
            if not handle.skipped:
                self._handles.append(handle)
            return handle

    def _save(self, machine: SaveMachine, metrics: Mapping[str, SupportsFloat] | None) -> None:
        numbers = numbers_of(metrics or {})
        self._forget_ended()
        try:
            if not self._is_in_memory(machine, numbers):
                self._save_through(machine, metrics)
        except HoldfastError as error:
            machine.fail(error, is_raised=True)
            raise

    def restore(self, *, verify: bool = True, fallback: bool = False) -> RestoreReport:
        """Fill the state from the newest checkpoint on the run's lineage: from the memory of the nodes, if it is there,
        else from storage. In a run without any, nothing is changed, and ``report.next_step`` is 0. What is damaged in
        memory is left for what is in storage; what is damaged there is passed over with `fallback`, as in
        `holdfast.load`: the next save then goes on from the older one.

        Raises what `holdfast.load` raises; after `close` `ConfigurationError`, code ``config.closed``.
        """
        self._require_open("restore")
        with self._turn.taken("restore"):
            tier = self._shared_tier()
            if tier is not None:
                tier.join()
            restored = restore(
                self._run,
                self._state,
                node_dir=None if self._memory is None else self._memory.node_dir,
                select=self._select,
                group=self._group,
                verify=verify,
                fallback=fallback,
                timeout_s=self._timeout_s,
            )
            if tier is not None:
                tier.note_restored(restored)
            report = restored.report
            log_restored(StateRestored(self._run, report, self._is_first_rank))
            return report

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A ``with`` block that is entered when nothing of the state is being copied, and during which no save of
        another thread begins: for changes that no step of an optimizer in the state makes. For any thread. Not
        collective. After `close` nothing is being copied."""
        tier = self._tier
        with changing([self._guard] if tier is None else [self._guard, tier.stager.guard]):
            yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all that was saved is durable; what was skipped was not. Raises why something is not, after
        `close` too."""
        for handle in self._handles:
            handle.durable.wait(self._timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Wait until all that was saved is durable, and let go of the memory, which stays. Raises why something is not
        durable. May be called again. Afterwards `save` and `restore` raise ``config.closed``. In a forked process
        nothing is waited for: the saves are the parent's; nor while the interpreter ends, which stops all threads:
        what is staged becomes durable."""
        self._is_closed = True
        if self._turn.is_of_parent or sys.is_finalizing():
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
        if self._turn.is_of_parent or sys.is_finalizing():
            return
        self._forget_ended()
        self._let_go(patience_s=LEAVING_S)

    def _require_open(self, verb: str) -> None:
        if self._is_closed or sys.is_finalizing():
            raise ConfigurationError(
                f"{verb} was called on a Checkpointer of '{self._run}' that is closed.",
                code="config.closed",
                action="Make a new Checkpointer, or close this one only when training is over.",
                path=self._run.url,
            )

    def _shared_tier(self) -> MemoryTier | None:
        """The memory tier of this process in the run; None where saves go to storage alone."""
        if self._tier is None and self._memory is not None:
            node_dir, num_slots = self._memory.node_dir, self._memory.generations
            self._tier = tier_for(self, self._run, node_dir, rank=global_rank(), num_slots=num_slots)
        return self._tier

    def _let_go(self, *, patience_s: float | None = None) -> None:
        """Close what is open. Waits for what is being copied; for ranks that do not answer, no longer than
        `patience_s`: what is open ends with the process then."""
        if self._tier is not None and self._tier.join(patience_s):
            self._tier.leave(self)
            self._tier = None

    def _forget_ended(self) -> None:
        """Forget handles of which nothing more is to be known."""
        for handle in [handle for handle in self._handles if handle.durable.is_over]:
            self._handles.remove(handle)

    def _save_through(self, machine: SaveMachine, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Save to storage, and return when that is done."""
        machine.begin("storage", is_first_rank=self._is_first_rank)
        hold = self._guard.hold(timeout_s=self._timeout_s)
        try:
            report = save(
                self._run,
                self._state,
                machine.step,
                metrics=metrics,
                select=self._select,
                group=self._group,
                takeover=self._takeover,
                timeout_s=self._timeout_s,
            )
        finally:
            hold.drop()
        machine.put(Place.parse(report.place))
        machine.stage(report.written_nbytes)
        machine.commit(report.written_nbytes)

    @property
    def _is_first_rank(self) -> bool:
        return group_ranks(self._group)[0] == global_rank()

    def _is_in_memory(self, machine: SaveMachine, metrics: dict[str, float]) -> bool:
        """Save into memory. False, and nothing saved, where the memory of some node cannot be used, or could not."""
        tier = self._shared_tier()
        if tier is None:
            return False
        tier.settle()
        tier.await_restored(timeout_s=self._timeout_s)
        try:
            self._stage(tier, machine, metrics)
        except HoldfastError as error:
            if not is_unusable(error):
                raise
            tier.fall_back(error)
            return False
        tier.note_used()
        return True

    def _stage(self, tier: MemoryTier, machine: SaveMachine, metrics: dict[str, float]) -> None:
        """Save into memory. Raises an error that `is_unusable` on all ranks where the memory of some node is."""
        deadline = Deadline(self._timeout_s)
        channel = default_channel(f"save of step {machine.step}", self._group, deadline=deadline, step=machine.step)
        if tier.is_put_off:
            tier.put_off(channel, deadline)
        machine.begin("node memory", is_first_rank=channel.rank == 0)
        stager = tier.stager
        sources = JOB.sources(lambda: parts_of(self._state))
        hold = stager.guard.hold(timeout_s=deadline.remaining_s())
        try:
            taken = capture(self._state, select=self._globs, stager=stager, channel=channel, known=self._known)
            is_as_before = isinstance(taken, Snapshot) and taken.is_as_before
            free = tier.room(
                channel,
                deadline,
                is_as_before=is_as_before,
                when_full=self._when_full,
                may_begin_anew=self._takeover,
            )
            if free.full and self._when_full == "skip":
                machine.skip(skipped(machine.step, free))
                return
            saving = BackgroundSave(
                SavingJob(run=self._run, ranks=group_ranks(self._group), known=self._known, takeover=self._takeover),
                machine,
                metrics,
                channel.in_background(),
                deadline,
                stager,
                hold,
                taken,
                sources,
                needed=free.needed,
                is_awaited=not free.as_before,
            )
            background = Background(saving)
            copier = tier.begin(background)
            if saving.is_awaited:
                background.wait()
                if background.error is not None:
                    raise background.error
            if isinstance(taken, Snapshot):
                background.wait_for(taken.instant)
            hold.pass_on(copier)
        finally:
            hold.drop()  # unless it was passed on: else nothing comes of this save
