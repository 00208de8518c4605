"""The log lines about saves and restores."""

from __future__ import annotations

import logging

from holdfast.checkpointer.events import (
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveEvent,
    SaveFailed,
    SaveSkipped,
    SaveUnprotected,
    StateRestored,
)
from holdfast.checkpointer.handle import Handle
from holdfast.errors import HoldfastError
from holdfast.phases import LOG
from holdfast.run.resumes import WARNED_FROM

_log = logging.getLogger(__name__)


class SaveLog:
    """Logs the events of one save: on the first rank, that it is durable; on each rank, the errors of that rank."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        #: Whether to log the commit. For a save to storage, `holdfast.save` logs it.
        self._tells_commit = False
        self._told = set[str]()
        self._is_in_memory_only = False

    def hear(self, event: SaveEvent) -> None:
        """Log `event` if it deserves a line."""
        handle = self._handle
        match event:
            case SaveBegun():
                self._tells_commit = event.tier == "node memory" and event.is_first_rank
                self._is_in_memory_only = event.memory_only
            case SaveCommitted() if self._tells_commit:
                LOG.info(
                    "saved step %d at %s: blocked for %.3f s%s, durable after %.2f s",
                    event.step,
                    handle.place,
                    handle.blocked_s,
                    f" ({handle.memory_wait_s:.3f} s of it for memory)" if handle.memory_wait_s else "",
                    handle.durable.seconds,
                )
            case SaveDelayed() if event.trouble not in self._told:
                self._told.add(event.trouble)
                _log.warning("step %d is not durable yet; the keeper tries again: %s", event.step, event.trouble)
            case SaveUnprotected() if self._tells_commit and event.error.code == "storage.unprotected":
                _log.warning("%s", event.error)  # no rank's save is protected where one is not
            case SaveSkipped():
                _log.log(logging.DEBUG if self._is_in_memory_only else logging.WARNING, "%s", event.error)
            case SaveFailed() if event.cause is not None:
                _log.error("step %d is not saved", event.step, exc_info=event.cause)
            case SaveFailed() if not event.is_raised:
                what = "durable" if handle.staged.is_done else "saved"
                _log.error("step %d is not %s: %s", event.step, what, event.error)


def log_restored(event: StateRestored) -> None:
    """Log a restore on the first rank, and what it did not use. A read from storage `holdfast.load` logs."""
    report = event.report
    if not event.is_first_rank:
        return
    if report.step is None:
        state = "" if report.load is None else f" with the state of {report.load.path}"
        LOG.info("there is nothing to restore in '%s' yet: training begins at step 0%s", event.run, state)
    elif report.place is None and report.load is not None:
        what = "there is nothing to restore in '%s' yet: it is a fork of %s, and training goes on at step %d"
        LOG.info(what, event.run, report.load.path, report.next_step)
    elif report.tier != "storage" and report.load is not None:
        LOG.info("restored from %s: %s", report.tier, report.load.summary)
    for each in report.rejected:
        what = "the memory of the nodes" if each.place is None else f"checkpoint {each.place} in {each.tier}"
        LOG.info("the restore did not use %s: %s", what, each.reason)
    if report.earlier_resumes >= WARNED_FROM:
        _log.warning(
            "%d jobs have resumed step %s (place %s) of '%s' before this one, and none has committed a newer "
            "checkpoint. If something in it, or in the data after it, ends them: their logs say what. "
            "restore(at='step=...') goes back to an older one, and max_resumes limits such restarts.",
            report.earlier_resumes,
            report.step,
            report.place,
            event.run,
        )


def warn_of_loss(error: HoldfastError) -> None:
    """Warn that saves are not durable before the machine is taken away; `error` says which."""
    _log.warning(
        "the machine is taken away, and not all saves are durable: %s The keeper goes on as long as it can; if its "
        "memory is lost, the next job goes on from an older step.",
        " ".join((error.message, *error.details)),
    )


def warn_of_undurable(kept: tuple[str, ...]) -> None:
    """Warn that an exception ended training before all saves were durable; `kept` says where they are safe."""
    _log.warning("an exception ended training before all saves were durable. %s", " ".join(kept))
