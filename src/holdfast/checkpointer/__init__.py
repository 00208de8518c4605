"""`Checkpointer`: saves that training does not wait for, and that survive the death of the training processes."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Literal, Self, SupportsFloat, TypeVar

from torch.distributed import ProcessGroup

from holdfast.agreement.planning import StoredPlanCache
from holdfast.calls import (
    ALL,
    CHECKPOINTER_CLOSE,
    CHECKPOINTER_RESTORE,
    CHECKPOINTER_SAVE,
    enclosing,
    outer,
    refuse_nested,
)
from holdfast.checkpointer.background_save import SavingJob
from holdfast.checkpointer.disk_room import once_it_fits
from holdfast.checkpointer.early_memory import prepare_saves
from holdfast.checkpointer.events import EventListener, StateRestored
from holdfast.checkpointer.failed_saves import FailedSaves
from holdfast.checkpointer.first_save import check_first_step
from holdfast.checkpointer.found_run import FoundRun
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.loaded_before import loaded_before
from holdfast.checkpointer.loop import Loop
from holdfast.checkpointer.loop_rules import suspect
from holdfast.checkpointer.memory_option import Memory, NodeDirs, own_node_dir
from holdfast.checkpointer.memory_save import save_into_memory
from holdfast.checkpointer.memory_tier import LEAVING_S, MemoryTier, tier_for
from holdfast.checkpointer.observers import Observers
from holdfast.checkpointer.option_checks import check_options, checked_disk
from holdfast.checkpointer.own_resume import OwnResume
from holdfast.checkpointer.pruning import CLOSING_S, Pruning
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.checkpointer.restoring import restore, with_load
from holdfast.checkpointer.save_errors import closed, interrupted, is_unusable, no_memory, no_policy, without_memory
from holdfast.checkpointer.save_log import SaveLog, log_restored
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.saves_under_way import SavesUnderWay
from holdfast.checkpointer.signals import LEAVING_SIGNALS_S, note_signals
from holdfast.checkpointer.state_advice import advise_on_randomness, warn_of_copies
from holdfast.checkpointer.storage_save import save_through
from holdfast.checkpointer.turn import turn_in
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import check_group, global_rank, group_ranks
from holdfast.errors import DeadlineError, HoldfastError, IncompatibleError
from holdfast.format.patterns import Globs
from holdfast.options import check_flag, check_timeout, checked_number
from holdfast.phases import LOG
from holdfast.policy.keep import KeepPolicy
from holdfast.policy.stop import StopAfter
from holdfast.policy.when import SavePolicy
from holdfast.run.paths import parse, selected
from holdfast.run.session import JOB
from holdfast.saving import RoomMaker, checked_metrics, numbers_of, run_location, whole
from holdfast.snapshot.guard import Guard, changing
from holdfast.state.flatten import check_root
from holdfast.store.base import Location

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints of one training loop: `save` returns in milliseconds, and `restore` fills the state from the
    newest checkpoint.

    A save copies the state into memory of the node that outlives this process. Tensors that only steps of the
    optimizers in `state` change are copied while training goes on, and the next step waits for that copy; everything
    else is copied at once. A keeper, a separate process per node and run, makes the copy durable and commits it. If a
    node has too little memory, a save writes to storage, and returns when the checkpoint is committed. With
    ``memory=None`` every save does so.

    All methods except `guard` are collective over `group` (default: all ranks of the job). Call them from one thread;
    one plain process may call them too. Every save walks `state` again. If the run has a history, this job must have
    restored or loaded from it, unless ``takeover=True``; a takeover happens once, at the first save, or with "always"
    whenever other jobs have saved since, as jobs with one live state do in turn. If storage is slower than saves come,
    ``when_full`` says whether a save then waits for a slot of memory, or all ranks skip it. A save that fails because
    of the store, after an earlier call has worked, is in the log and in its handle, and training goes on;
    ``on_failed_save=StopAfter(...)`` says when it ends instead. `keep` says which checkpoints stay, such as
    ``KeepLast(3) | KeepEvery(10_000)``: after each commit the first rank deletes, in the background, the other ones on
    the head's lineage (default: all stay). `initial` is the path of the checkpoint that a run without checkpoints
    begins with, at step 0, or at the step after it (`fork`). `max_resumes` is the limit for jobs in a row that resume
    one checkpoint and commit no newer one (default: none). `select` are globs of names: only the names that they match
    are saved and restored. `local` is a folder on a disk of each node: the keeper makes a save durable there before it
    brings it to the run, so a slow or absent store does not stop saves, and a restore on the same nodes finds it there.
    The `listeners` hear the events of saves, restores and steps on this rank (`holdfast.observing` has some); training
    does not wait for them.

    Use it as a context manager: at its end it waits until all saves are durable.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Location,
        state: Mapping[str, object],
        *,
        memory: Memory | None = Memory(),  # noqa: B008 - a frozen value
        local: str | os.PathLike[str] | None = None,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        initial: str | os.PathLike[str] | Location | None = None,
        fork: bool = False,
        max_resumes: int | None = None,
        select: str | Sequence[str] | None = None,
        group: ProcessGroup | None = None,
        takeover: bool | Literal["always"] = False,
        when_full: Literal["wait", "skip"] = "wait",
        on_failed_save: Literal["warn"] | StopAfter = "warn",
        listeners: Sequence[EventListener] = (),
        timeout_s: float = 600.0,
    ) -> None:
        check_options(
            memory=memory,
            save=save,
            keep=keep,
            initial=initial,
            fork=fork,
            max_resumes=max_resumes,
            takeover=takeover,
            when_full=when_full,
            on_failed_save=on_failed_save,
            timeout_s=timeout_s,
        )
        check_group(group)
        self._found = FoundRun(run_location(run))
        check_root(state)
        self._state = state
        self._select = select
        self._globs = None if select is None else Globs(select)
        self._memory = memory
        self._disk = checked_disk(local, memory=memory, takeover=takeover)
        self._group = group
        self._takeover = takeover
        self._when_full = when_full
        self._timeout_s = timeout_s
        self._known = StoredPlanCache()
        #: The memory tier that this object shares with the other `Checkpointer`s of this process and run; None before
        #: it is needed.
        self._tier: MemoryTier | None = None
        self._is_closed = False
        self._turn = turn_in(self._run)
        self._handles = SavesUnderWay()
        #: The guard of saves to storage; the memory tier has its own.
        self._guard = Guard()
        self._initial = None if initial is None else parse(initial)
        self._is_fork = fork
        self._observers = Observers(listeners, self._found.location, group)
        if memory is None and save is not None and any(part.needs_memory for part in save.parts()):
            raise no_memory(self._run.url)
        self._policy = save
        #: From now on, a request by signal does not end the process.
        self._signals = {} if save is None else note_signals(save.parts())
        #: The decisions on when to save; None before they are needed.
        self._loop: Loop | None = None
        self._was_preempted, self._ignores_s = False, 0.0  # the time after the end for which signals do nothing
        self._restored: RestoreReport | None = None
        self._failed = FailedSaves(on_failed_save, self._observers.hear)
        self._pruning = Pruning(keep, self._found.location)
        self._own_resume = OwnResume(self._found.location, max_resumes, takeover)
        JOB.note_trained()

    @outer(CHECKPOINTER_SAVE)
    def save(
        self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, memory_only: bool = False
    ) -> Handle:
        """Save the state as it is now. `step` is the number of the last finished step.

        Returns when everything is copied that may change before the next step of an optimizer in the state. In the
        background all ranks agree on a plan and a place, and copy the rest. (The first save returns when they have
        agreed, and all have memory for it.) The handle tells how the save goes on and ends. If it fails in the
        background, the log says so once, and training goes on.

        With `memory_only`, the snapshot stays in the memory of the nodes until a newer one is there too. It survives
        the processes of the job, and not the loss of a node, and costs storage nothing. A `restore` takes it, and if
        the job ends before a newer save, the keeper makes it durable. Where no slot is free at once, as while storage
        is written, the save is skipped.

        Raises:
            StateError: the state cannot be saved.
            ConfigurationError, StorageError: as `holdfast.save`, at the first save; a later save stores them in its
                handle.
            FencedError: this job must stop, because another one has taken over the run. A save that finds this out in
                the background stores it in its handle, and the next save raises it.
            DeadlineError: ranks did not answer, or the first save found no free slot.
            StorageError: code ``storage.stopped``: `on_failed_save` ends training, on all ranks at the same step.
            ConfigurationError: code ``config.closed``, after `close`; ``config.no_memory``, if it has `memory_only` and
                this object has ``memory=None``; ``config.nested``, where the handler of a signal,
                ``__del__`` or a callback calls it while its thread is inside a call of the library. That outer call is
                not affected.

        If another kind of exception ends the call (Ctrl-C, say), this save makes no checkpoint, and the next one is not
        affected.
        """
        refuse_nested(CHECKPOINTER_SAVE)
        self._require_open("save")
        check_flag("memory_only", memory_only)
        if memory_only and self._memory is None:
            raise no_memory(self._run.url)
        self._find_run()
        handle = Handle(whole(step), memory_only=memory_only)
        self._pruning.note_metrics(checked_metrics(metrics), self._group)
        self._observers.tell_steps()
        heard_by = self._observers.listeners if self._loop is None else (self._loop.hear, *self._observers.listeners)
        heard_by = (self._pruning.listener(), self._own_resume.hear, *heard_by, self._failed.hear)
        machine = SaveMachine(handle.step, handle.hear, SaveLog(handle).hear, *heard_by, memory_only=memory_only)
        with self._turn.taken("save"):
            begun_s = time.monotonic()
            has_failed = self._save(machine, metrics)
            machine.give_back(time.monotonic() - begun_s)
            if not handle.skipped:
                self._handles.add(handle, self._tier)
            # A skipped save to memory alone is not tried again at once: there will be a next one.
            if self._loop is not None and (memory_only or not handle.skipped):
                self._loop.saved(begun_s, memory_only=memory_only)
            self._failed.settle(handle, has_failed=has_failed, group=self._group, timeout_s=self._limit_s)
            return handle

    def _save(self, machine: SaveMachine, metrics: Mapping[str, SupportsFloat] | None) -> bool:
        """Save, or end the save with an error, on all ranks alike. Returns whether it ended so."""
        save = partial(self._save_once, machine, numbers_of(metrics))
        self._handles.forget_ended()
        try:
            once_it_fits(save, self._pruning, step=machine.step, group=self._group, timeout_s=self._limit_s)
        except HoldfastError as error:
            goes_on = self._failed.tolerates(error, machine)
            machine.fail(error, is_raised=not goes_on)
            if not goes_on:
                raise
            return True
        except BaseException:  # Ctrl-C, say: whoever follows the save hears that it has ended
            machine.fail(interrupted(machine.step), is_raised=True)
            raise
        return False

    def _save_once(self, machine: SaveMachine, numbers: dict[str, float], room: RoomMaker) -> None:
        if self._is_in_memory(machine, numbers):
            return
        if machine.memory_only:
            machine.skip(without_memory(machine.step))
            return
        save_through(
            machine,
            self._guard,
            self._run,
            self._state,
            metrics=numbers,
            select=self._select,
            group=self._group,
            takeover=self._takeover,
            room=room,
            timeout_s=self._limit_s,
        )
        if self._tier is not None:
            self._tier.stager.release_held()

    @outer(CHECKPOINTER_RESTORE)
    def restore(self, *, at: str | None = None, verify: bool = True, fallback: bool = False) -> RestoreReport:
        """Fill the state from the newest checkpoint on the run's lineage: from the memory of the nodes if it is there,
        else from storage. If the run has no checkpoint, this changes nothing, or loads the `initial` checkpoint, and
        ``report.next_step`` is 0 (or that of the fork); but a path that cannot become a run, and a state that cannot be
        saved, are errors already now.

        With `at`, such as ``"step=700"`` or the place ``"3.12"``, fill it from that checkpoint in storage. The next
        save continues from there, which makes it a rollback: later checkpoints stay, but the head does not descend
        from them any more.

        If a rank finds the copy in memory damaged, all ranks take the next older checkpoint that memory holds whole and
        that is not older than the head in storage, else storage; ``report.load.skipped`` says why. With `fallback`, it
        passes over a damaged checkpoint in storage, as `holdfast.load` does, and the next save continues from the older
        one that it loaded.

        ``report.earlier_resumes`` counts the jobs that resumed the same checkpoint before, if none has committed a
        newer one since; a job that ends in an orderly way (`close`) does not count. The log warns from the third job
        on. A checkpoint that `max_resumes` jobs have resumed is refused, or passed over with `fallback`; one that `at`
        names never is.

        Raises what `holdfast.load` raises; where there is nothing to restore, the `ConfigurationError`, `StorageError`
        or `StateError` that the first save would raise; and `ConfigurationError`: code ``config.closed``, after
        `close`; ``config.nested``, as `save`; ``config.path``, where `at` selects nothing; ``config.restart_loop``,
        where the limit `max_resumes` is reached.
        """
        refuse_nested(CHECKPOINTER_RESTORE)
        self._require_open("restore")
        check_flag("verify", verify)
        check_flag("fallback", fallback)
        self._find_run()
        with self._turn.taken("restore"), self._observers.restoring():
            tier = self._shared_tier()
            if tier is not None:
                tier.join()
            deadline = Deadline(self._timeout_s)
            try:
                restored = restore(
                    self._run,
                    self._state,
                    node=None if tier is None else tier.node,
                    select=self._select,
                    group=self._group,
                    verify=verify,
                    fallback=fallback,
                    timeout_s=self._timeout_s,
                    resumes=self._own_resume.begin(is_chosen=at is not None),
                    at=None if at is None else selected(self._run, at),
                    initial=self._initial,
                    is_fork=self._is_fork,
                )
            except HoldfastError as error:
                self._own_resume.fail(error)
                if isinstance(error, IncompatibleError):
                    error.action = with_load(error.action, self._run)
                raise
            report = self._restored = restored.report
            self._failed.note_restored(report)
            if self._loop is not None and report.load is not None:
                self._loop.expect(report)
            log_restored(restoration := StateRestored(self._run, report, self._is_first_rank))
            self._observers.hear(restoration)
            if tier is not None:
                tier.note_restored(restored)
                prepare_saves(tier, restored, self._state, select=self._select, group=self._group, deadline=deadline)
            return report

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of `total`, for the loop that trains. Restores the state first, unless
        `restore` did, or a later `holdfast.load` of a checkpoint of the run. A second loop goes on where
        the first one ended. Each step must end with a call of `step`. The last one is followed by a save, whatever the
        policy says. On a preemption (`OnPreemption`) it ends early, on all ranks after the same step.

        Raises what `restore` and `step` raise, and `ConfigurationError`: ``config.step_order``, if `step` was called
        before anything was restored; ``config.unlike_loops``, if the ranks have other totals or intervals.
        """
        total = checked_number("total", total, least=0, reason="a loop has no negative number of steps")
        loop = self._policy_loop("steps")
        if self._restored is None:
            loop.check_restorable()
        loaded = loaded_before(self._run, self._state, loop.rules(total), group=self._group, timeout_s=self._limit_s)
        self._restored = loaded or self._restored or self.restore()
        self._pruning.begin_training(is_first_rank=self._is_first_rank)
        step = loop.begin(self._restored.next_step, last=total - 1, anew=loaded is not None)
        while step < total and not loop.is_over:
            yield step
            step = loop.next_after(step)

    def step(self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None) -> Handle | None:
        """Record that `step` has ended, and save if the policy (the option `save`) says so, or if `Parity` protects
        memory and this is the first step after a restore from peers. Returns the handle of that save, or None.
        Collective: every rank calls this after each step. It sends messages only if a rank wants a save that the others
        do not know of.

        The `metrics` are for policies, and for the checkpoint if there is one. Numbers on a device stay there unless
        they are needed.

        Raises what `save` raises, and `ConfigurationError`: ``config.no_policy``: the option `save` is missing;
        ``config.step_order``: steps do not follow each other, or do not follow the restored checkpoint;
        ``config.two_loops``: another `Checkpointer` of this process decides when to save into the run;
        ``config.unloaded_history``, at the first step: the run has checkpoints, and this job has restored none;
        ``config.unlike_loops``, at the first step where nothing was restored: the ranks have other intervals of steps.
        """
        loop = self._loop or self._policy_loop("step")
        step = whole(step)
        self._observers.step_ends(step)
        self._pruning.note_metrics(metrics := loop.metrics.sound(metrics), self._group)
        try:
            due = loop.due(step, metrics)
            self._observers.note_choice(loop.choice)
            if due is None:
                return None
            if self._is_first_rank and not due.memory_only:
                LOG.info("step %d is being saved: %s", step, due.reason)
            return self.save(step, metrics=metrics, memory_only=due.memory_only)
        except DeadlineError as error:
            if error.code != "timeout.preempted" and loop.preemption.left_s >= self._timeout_s:
                suspect(error)
                raise
            _log.warning("step %d is not saved, because the machine is taken away before: %s", step, error.message)
            return None
        finally:
            self._observers.step_begins(is_saving=self._handles.any_goes_on)

    @property
    def preempted(self) -> bool:
        """Whether the loop has to end, because a rank was told that its machine is taken away (`OnPreemption`). It
        changes in `step`, on all ranks in the same one, whose state is being saved; or in `interruptible`, which it
        broke off: the next `step` then saves. After the last step of `steps`, nothing is left, and it stays False."""
        return self._was_preempted or (self._loop is not None and self._loop.is_preempted)

    @property
    def exit_code(self) -> int:
        """The exit code of the script: 75 (EX_TEMPFAIL, try again later) if the loop was `preempted`, else 0."""
        return os.EX_TEMPFAIL if self.preempted else 0

    def interruptible(self, parts: Iterable[T]) -> Iterator[T]:
        """The `parts` of an evaluation, or of other work between two steps, which a preemption breaks off: on all ranks
        after the same part. The next call of `step` then saves and ends the loop.

        Collective: all ranks go through the same number of parts. Raises `ConfigurationError`: ``config.no_policy``,
        as `step`.
        """
        loop = self._policy_loop("interruptible")
        loop.begin_evaluation()
        for part in parts:
            yield part
            if loop.breaks_off():
                return

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A ``with`` block for changes to the state that no step of an optimizer in the state makes. It is entered when
        no save is copying the state, and no save of another thread begins while it lasts. Any thread may use it. Not
        collective. After `close` no save is copying, so it does not wait. Raises `ConfigurationError`, code
        ``config.nested``, if the calling thread is inside a `save` of a `Checkpointer`."""
        refuse_nested("Checkpointer.guard", allowed=ALL - {CHECKPOINTER_SAVE})
        tier = self._tier
        with changing([self._guard] if tier is None else [self._guard, tier.stager.guard]):
            yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all saves are durable, except for skipped ones and those that stay in memory, and exported where
        an `ExportHub` exports them. Raises the error of a save or export that failed. May be called after `close` too.
        `timeout_s` (default: the constructor's) is the limit for each save, and for all exports."""
        refuse_nested("Checkpointer.wait")
        if timeout_s is not None:
            check_timeout(timeout_s)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._handles.wait(limit_s, may_be_fenced=self._takeover == "always")
        self._observers.finish(limit_s)

    @outer(CHECKPOINTER_CLOSE)
    def close(self) -> None:
        """Wait until all saves are durable, and close the memory, whose contents stay. Raises the error of a save that
        failed. May be called again. Afterwards `save` and `restore` raise ``config.closed``. Raises
        `ConfigurationError`, code ``config.nested``, as `save`; it is not closed then.
        It waits for nothing in a forked process, because the saves are the parent's; nor while the interpreter ends,
        which stops all threads: the keeper still makes staged snapshots durable."""
        if self._turn.is_of_parent or sys.is_finalizing():
            self._is_closed = True
            return
        refuse_nested(CHECKPOINTER_CLOSE)
        self._is_closed = True
        self._observers.training_ends()
        begun_s, left_s = time.monotonic(), math.inf if self._loop is None else self._loop.preemption.left_s
        self._end_loop()
        try:
            may_be_fenced = self._takeover == "always"
            if left_s < self._timeout_s:
                self._handles.wait_before_the_end(left_s, may_be_fenced=may_be_fenced)
            else:
                self._handles.wait(self._timeout_s, may_be_fenced=may_be_fenced)
                self._observers.finish(self._timeout_s, is_last=True)
            self._own_resume.end(left_s - (time.monotonic() - begun_s))
        finally:
            self._forget_signals()
            self._let_go(patience_s=LEAVING_S if left_s < self._timeout_s else None)
            self._pruning.close(0 if left_s < self._timeout_s else CLOSING_S)
            self._observers.close(is_early=self._was_preempted)

    def __enter__(self) -> Self:
        self._require_open("a with block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # An exception ended training: no other error may hide it, and it must not wait for storage. The keeper goes on.
        self._is_closed = True
        if not (self._turn.is_of_parent or sys.is_finalizing() or enclosing() is not None):
            self._give_up()

    @outer(CHECKPOINTER_CLOSE)
    def _give_up(self) -> None:
        """Leave the memory tier, and wait for no save."""
        if self._loop is not None and self._loop.preemption.is_missed:
            _log.warning(
                "an exception ended the loop after a notice of a preemption (%s), so the last step is not saved. If it "
                "came from a DataLoader whose workers got the signal too: worker_init_fn=holdfast.data.outlive_signals",
                self._loop.preemption.reason,
            )
        self._observers.training_ends()
        self._end_loop()
        self._forget_signals()
        self._handles.give_up()
        self._pruning.close(0)
        self._let_go(patience_s=LEAVING_S)
        self._observers.close(is_early=True)

    @property
    def _run(self) -> Location:
        return self._found.location()

    def _require_open(self, verb: str) -> None:
        if self._is_closed or sys.is_finalizing():
            raise closed(verb, self._run)

    def _policy_loop(self, verb: str) -> Loop:
        """The decisions on when to save."""
        if self._loop is None:
            refuse_nested(f"Checkpointer.{verb}")
            self._require_open(verb)
            if self._policy is None:
                raise no_policy(verb, self._run.url)
            self._find_run()
            if verb == "step" and self._restored is None:
                continued = None if self._takeover else self._run
                check_first_step(continued, self._policy, group=self._group, timeout_s=self._timeout_s)
            self._loop = Loop(self._policy, self._run, self._signals, group=self._group, memory=self._memory)
            self._loop.preemption.patience_s = self._timeout_s
            if self._is_first_rank:
                advise_on_randomness(self._state)
            if self._restored is not None and self._restored.load is not None:
                self._loop.expect(self._restored)
        return self._loop

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._was_preempted = self._loop.is_preempted
            self._ignores_s = LEAVING_SIGNALS_S if self._loop.preemption.has_ended else 0.0
            self._loop.close()
            self._loop = None

    def _forget_signals(self) -> None:
        for note in self._signals.values():
            note.remove(ignores_s=self._ignores_s)

    def _find_run(self) -> None:
        """Resolve the links in the run's path, once. Raises `StorageError` where the file system does not answer."""
        if self._turn.is_of_parent or not self._found.find(timeout_s=self._timeout_s):
            return
        self._turn = turn_in(self._run)
        self._observers.open()
        if self._is_first_rank:
            warn_of_copies(self._state)

    def _shared_tier(self) -> MemoryTier | None:
        """The memory tier of this process in the run; None if all saves go to storage."""
        if self._tier is None and self._memory is not None:
            node = NodeDirs(own_node_dir(self._memory, self._run, self._takeover), self._disk)
            self._tier = tier_for(self, self._run, node, global_rank(), self._memory)
        return self._tier

    def _let_go(self, *, patience_s: float | None = None) -> None:
        """Leave the memory tier, after running copies have ended. Waits for ranks that do not answer no longer than
        `patience_s`; the tier then stays open until this process ends."""
        if self._tier is not None and self._tier.join(patience_s):
            self._tier.leave(self)
            self._tier = None

    @property
    def _limit_s(self) -> float:
        """The limit for the waits of a save: no longer than the machine exists, as far as this rank knows."""
        return self._timeout_s if self._loop is None else min(self._timeout_s, self._loop.preemption.left_s)

    @property
    def _is_first_rank(self) -> bool:
        return group_ranks(self._group)[0] == global_rank()

    def _is_in_memory(self, machine: SaveMachine, metrics: dict[str, float]) -> bool:
        """Save into memory, or skip the save. Returns False, and saves nothing, if the memory of a node cannot be used,
        or if this save still leaves memory alone after earlier trouble."""
        tier = self._shared_tier()
        if tier is None:
            return False
        tier.settle()
        try:
            save_into_memory(
                tier,
                machine,
                metrics,
                self._state,
                SavingJob(run=self._run, ranks=group_ranks(self._group), known=self._known, takeover=self._takeover),
                select=self._globs,
                group=self._group,
                when_full=self._when_full,
                timeout_s=self._limit_s,
                left_s=lambda: math.inf if self._loop is None else self._loop.preemption.known_left_s,
                check=partial(self._failed.check, machine.step),
            )
        except HoldfastError as error:
            if not is_unusable(error):
                raise
            tier.fall_back(error)
            return False
        tier.note_used()
        return True
