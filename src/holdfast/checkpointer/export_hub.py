"""`ExportHub`: a listener that also writes some checkpoints of a training loop as other systems read them.

The first rank exports each chosen checkpoint once it is committed, from its files, in a thread of its own: neither a
save nor a step waits. What an interrupted export left is finished by the next job. Trouble never reaches training: the
log tells it, and the calls that wait for the work raise it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock, Thread
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.checkpointer.events import (
    Event,
    EventSource,
    ExportFailed,
    ExportFinished,
    SaveBegun,
    SaveCommitted,
    SavePlaced,
    StateRestored,
)
from holdfast.errors import ConfigurationError, DeadlineError, HoldfastError, NotFoundError, StorageError
from holdfast.exporting import write_export
from holdfast.exporting.export_series import ExportDraft, ExportSeries
from holdfast.exporting.planned_export import SHARD_NBYTES, PlannedExport, export_settings, planned
from holdfast.format.records import Place
from holdfast.latch import Latch
from holdfast.mapping import Rule
from holdfast.options import check_flag, checked_number
from holdfast.phases import LOG
from holdfast.reports import ExportReport
from holdfast.run.leases import ReadLease
from holdfast.run.paths import selected
from holdfast.store.base import Location
from holdfast.store.urls import location_of, open_store
from holdfast.workers import on_executor

#: Longest wait for the lease on a checkpoint. Other listeners hear later events after it.
_LEASE_S: Final = 5.0

_log = logging.getLogger(__name__)


class _ExportTask(NamedTuple):
    """A checkpoint to export. A `lease` keeps it from being deleted while it waits. With `is_check`, the export is only
    planned, so that wrong options are found at the first commit."""

    run: Location
    draft: ExportDraft
    lease: ReadLease | None = None
    is_check: bool = False


class _Sweep(NamedTuple):
    """Interrupted exports of earlier jobs, to be finished."""

    run: Location


_Work: TypeAlias = _ExportTask | _Sweep | Latch


class ExportHub:
    """A listener of a `Checkpointer` that also writes checkpoints into folders that `from_pretrained` reads, or, with
    ``to="peft"``, into those of an adapter: ``<folder>/step-0000000700``.

    Does not block training: after a commit, a thread of the first rank reads the checkpoint's files, as
    `holdfast.export` does with the same options. With `every`, it exports the first checkpoint at or after each
    multiple of so many steps; with `last`, also the newest one when the `Checkpointer` is closed in an orderly way. If
    exports take longer than the steps between them, the newest one that waits is next, and older ones are given up with
    an error in the log.

    A folder appears under its name when it is whole and durable, in the place of an older export of the step. If the
    job dies before, the next job on the run finishes it, or removes it where its checkpoint is gone. With `keep`, only
    so many exports stay, those that were finished last; while the next one is written, the disk needs room for that,
    too. Give each run a folder of its own. It is a path, and no URL.
    A folder, file or link with the name of a step that no `ExportHub` wrote stays as it is: the export of that step
    fails (code ``config.destination``), and others go on.

    Wrong options are found at the first commit, before anything is written. A failed export is logged, and
    `Checkpointer.wait` and `close`, which wait for exports, raise its error unless a later one succeeded. A preemption
    or an exception waits for none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        last: bool = True,
        keep: int | None = None,
        to: Literal["hf", "peft"] = "hf",
        select: str | Sequence[str] | None = None,
        mapping: Sequence[Rule] | None = None,
        dtype: str | None = None,
        shard_nbytes: int = SHARD_NBYTES,
        config: str | os.PathLike[str] | None = None,
        adapter: str | None = None,
    ) -> None:
        check_flag("last", last)
        if every is None and not last:
            raise ValueError("nothing would be exported: give every, or last=True")
        self._every = (
            None
            if every is None
            else checked_number("every", every, least=1, reason="an interval has at least one step")
        )
        self._keep = None if keep is None else checked_number("keep", keep, least=1, reason="the newest export stays")
        if to not in ("hf", "peft"):
            raise ValueError(f"to is 'hf' or 'peft', not {to!r}: holdfast.export writes other formats")
        self._settings = export_settings(
            to, select=select, mapping=mapping, dtype=dtype, shard_nbytes=shard_nbytes, config=config, adapter=adapter
        )
        self._last = last
        self._series = ExportSeries(_folder(os.fspath(folder)))
        self._tell: Callable[[Event], None] = _tell_nobody
        #: The work that is due. A thread does it, and ends when nothing is left.
        self._due: deque[_Work] = deque()
        self._lock = RLock()
        self._is_working = self._was_used = False
        self._is_first_rank = False
        #: The step of the first commit, by whose checkpoint the options are checked.
        self._checked_step: int | None = None
        self._places: dict[int, Place] = {}
        #: The newest commit, as the task of its export; None before the first one and once it is due.
        self._newest: _ExportTask | None = None
        #: The newest step that was due.
        self._done = 0
        #: The warnings about removals that could not be finished, each of which the log gets once.
        self._told: set[str] = set()
        #: The error of the newest export; None if it succeeded.
        self.error: HoldfastError | None = None
        #: Why the options fit no checkpoint; None as far as is known.
        self._refusal: HoldfastError | None = None

    def begin(self, tell: Callable[[Event], None]) -> None:
        """As `WorkingListener.begin`."""
        self._tell = tell

    def hear(self, event: Event, source: EventSource) -> None:
        """As `EventListener.hear`."""
        match event:
            case StateRestored():
                step = event.report.step or 0
                self._done = max((each for each in self._series.steps() if each <= step), default=0)
                self._start(event.is_first_rank, event.run)
            case SaveBegun() if not event.memory_only:
                self._start(event.is_first_rank, location_of(source.run))
            case SavePlaced():
                self._places[event.step] = event.place
            case SaveCommitted() if self._is_first_rank and event.step in self._places:
                self._committed(location_of(source.run), ExportDraft(event.step, self._places.pop(event.step)))

    def finish(self, timeout_s: float, *, is_last: bool) -> None:
        """As `WorkingListener.finish`. Raises `DeadlineError`, code ``timeout.export``, too."""
        if is_last and self._last and self._newest is not None:
            self._put(self._newest)
            self._newest = None
        if not self._was_used:
            return
        done = Latch()
        self._put(done)
        self._was_used = not is_last  # another Checkpointer may follow
        if not done.wait(timeout_s):
            raise DeadlineError(
                f"The export into '{self._series.folder}' was not finished within {timeout_s:.0f} s.",
                code="timeout.export",
                action="Wait longer (timeout_s). What is written stays, and the next job on the run finishes it.",
                path=str(self._series.folder),
            )
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        return f"<ExportHub into '{self._series.folder}'>"

    def _start(self, is_first_rank: bool, run: Location) -> None:
        if is_first_rank and not self._is_first_rank:
            self._is_first_rank = True
            if self._series.drafts():
                self._put(_Sweep(run))

    def _committed(self, run: Location, draft: ExportDraft) -> None:
        self._places = {step: place for step, place in self._places.items() if step > draft.step}
        if self._checked_step is None:
            self._checked_step = draft.step
            self._put(_ExportTask(run, draft, is_check=True))
        if self._every is None or draft.step // self._every <= self._done // self._every:
            self._newest = _ExportTask(run, draft)
            return
        self._done, self._newest = draft.step, None
        lease = ReadLease(open_store(run), draft.place, after_s=0)
        lease.await_record(_LEASE_S)
        self._put(_ExportTask(run, draft, lease))

    def _put(self, work: _Work) -> None:
        with self._lock:
            self._due.append(work)
            self._was_used = True
            if self._is_working:
                return
            self._is_working = True
        Thread(target=self._run, name="holdfast-export", daemon=True).start()

    def _run(self) -> None:
        """The thread: does what is due, in its order, but gives up exports that newer ones have overtaken."""
        while True:
            with self._lock:
                batch = list(self._due)
                self._due.clear()
                if not batch:
                    self._is_working = False
                    return
            exports = [each for each in batch if isinstance(each, _ExportTask) and not each.is_check]
            for each in batch:
                match each:
                    case Latch():
                        each.set()
                    case _Sweep():
                        self._sweep(each.run)
                    case _ExportTask() if each in exports[:-1]:
                        self._end(each, self._refusal or _overtaken(each.draft.step, exports[-1].draft.step))
                    case _ExportTask():
                        self._try(each)

    def _try(self, task: _ExportTask) -> None:
        try:
            if task.is_check:
                with planned(selected(task.run, str(task.draft.place)), self._settings):
                    return
            report = self._export(task)
        except HoldfastError as error:
            if not (task.is_check and isinstance(error, NotFoundError)):  # deleted meanwhile; nothing was asked for
                is_told = self._refusal is not None and str(self._refusal) == str(error)
                self._refusal = error if task.is_check else self._refusal
                self._end(task, error, is_told=is_told and task.draft.step == self._checked_step)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end training
            _log.exception("step %d could not be exported", task.draft.step)
            self._end(task, _unexpected(task.draft.step, error))
        else:
            LOG.info("exported %s, to %s", report.summary, report.path)
            self.error = self._refusal = None
            self._end(task, None)
            self._tell(ExportFinished(report.step, report.path, report.written_nbytes, report.seconds))

    def _end(self, task: _ExportTask, error: HoldfastError | None, *, is_told: bool = False) -> None:
        """The end of a task. With `is_told`, the log has its error already, from the check of the same step."""
        if task.lease is not None:
            task.lease.end()
        if error is not None:
            self.error = error
        if error is not None and not is_told:
            _log.error("step %d is not exported: %s", task.draft.step, error)
            self._tell(ExportFailed(task.draft.step, error))

    def _export(self, task: _ExportTask) -> ExportReport:
        began_s, series, draft = time.monotonic(), self._series, task.draft
        series.check(draft.step)
        self._clean()
        with planned(selected(task.run, str(draft.place)), self._settings) as plan:
            try:
                report = self._write(plan, draft, began_s)
            except ConfigurationError as error:  # a job with other options had begun it
                if error.code != "config.destination":
                    raise
                series.discard(draft)
                report = self._write(plan, draft, began_s)
        series.publish(draft)
        if self._keep is not None:
            series.keep_newest(self._keep)
        return replace(report, path=str(series.path(draft.step)))

    def _write(self, plan: PlannedExport, draft: ExportDraft, began_s: float) -> ExportReport:
        path = self._series.folder / draft.name
        try:
            return write_export(plan, str(path), self._settings.to, workforce=on_executor(None), began_s=began_s)
        except StorageError as error:
            if error.code == "storage.full" and path.exists():  # others, as the saves, need the space
                self._series.discard(draft)
            raise

    def _clean(self) -> None:
        """Finish interrupted removals. One that fails is no reason to export nothing more."""
        try:
            self._series.clean()
        except HoldfastError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("an export that was replaced or is not kept is not removed: %s", error)

    def _sweep(self, run: Location) -> None:
        """Finish what earlier jobs have left; remove what cannot be finished, because its checkpoint is gone. What
        fails is logged and left, and the thread goes on."""
        try:
            for draft in self._series.drafts():
                self._finish_draft(run, draft)
        except HoldfastError as error:
            _log.warning("exports that were interrupted are left in '%s': %s", self._series.folder, error)

    def _finish_draft(self, run: Location, draft: ExportDraft) -> None:
        try:
            if self._series.is_whole(draft):
                self._series.publish(draft)
            elif self._has_checkpoint(run, draft):
                self._try(_ExportTask(run, draft))
            else:
                self._series.discard(draft)
        except HoldfastError as error:
            _log.warning("the export of step %d, which was interrupted, is left: %s", draft.step, error)
        except Exception:  # noqa: BLE001 - a defect of ours must not end the thread
            _log.exception("the export of step %d, which was interrupted, is left", draft.step)

    def _has_checkpoint(self, run: Location, draft: ExportDraft) -> bool:
        try:
            with planned(selected(run, str(draft.place)), self._settings):
                return True
        except NotFoundError:
            return False


def _folder(path: str) -> Path:
    if not path.strip():
        raise ValueError("folder is the path of a folder for the exports, not an empty text")
    place = location_of(path)
    if place.folder is None:
        raise ConfigurationError(
            f"'{place}' is in no file system, where a folder gets its name when it is whole.",
            code="config.export",
            action="Name a folder by its path.",
            path=place.url,
        )
    return place.folder


def _tell_nobody(event: Event) -> None:
    """Listeners that no `Checkpointer` has tell nobody."""


def _overtaken(step: int, newer: int) -> StorageError:
    return StorageError(
        f"step {step} was given up: the export of step {newer} was due before that of step {step} began.",
        code="storage.slow",
        action="Export less often. `holdfast export` writes it while its checkpoint exists.",
        step=step,
        retryable=True,
    )


def _unexpected(step: int, error: Exception) -> StorageError:
    return StorageError(
        f"step {step} could not be exported: {error!r}.",
        code="storage.export",
        action="Read the traceback in the log. The next export tries again.",
        step=step,
    )
