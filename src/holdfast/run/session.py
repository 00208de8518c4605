"""What one process remembers of the runs it has loaded from and saved to, and the right to save that follows.

A place that was given out is never given out again, whether its checkpoint was committed or not: a number is used
up when a save begins. So an aborted save leaves a gap, and a late commit of it cannot meet another checkpoint.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.format.records import Epoch, Place, Why
from holdfast.run.history import Run
from holdfast.run.paths import canonical


@dataclass(slots=True)
class _Memory:
    """One run: the last place given out in the epoch that this process owns, and what it loaded since, which was when
    epoch `seen` was the newest; and whether this process `took_over`, which it may do once."""

    run_id: str
    last: Place | None = None
    loaded: Place | None = None
    seen: int | None = None
    took_over: bool = False
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))


class Session:
    """The runs of one job, by canonical root. Safe for use by several threads."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}
        self._lock = Lock()

    def note_loaded(self, root: str, run_id: str, place: Place, *, seen: int) -> None:
        """Remember that the state of this process is now that of `place` in the run at `root`, which was looked up when
        epoch `seen` was the newest."""
        with self._lock:
            memory = self._memory(root, run_id)
            memory.loaded, memory.seen = place, seen

    def begin(self, run: Run, *, takeover: bool, world_size: int) -> Place:
        """The place of the next save into `run`; opens an epoch, durably, where this process owns none that fits.

        Called by the coordinator alone, once per save; the place is used up even when the save fails. After a load
        the next save goes on from what was loaded, in a new epoch unless that is the last place that this process
        began. `takeover` lets a process that loaded nothing go on from the head of a run it does not own. It counts at
        the first save that says so, and not again: another job that takes over later must be able to stop this one.

        `ConfigurationError`, code ``config.unloaded_history``: the run has commits and nothing was loaded from it.
        `FencedError`: another job opened a newer epoch than this one owns, or than there was when it loaded; a
        rollback of the run is one too.
        """
        with self._lock:
            memory = self._memory(run.storage.uri, run.run_id)
            newest = run.newest_epoch()
            takeover = takeover and not memory.took_over
            place = _next_in_own_epoch(run, memory, newest, takeover=takeover)
            if place is None:
                epoch = _open_epoch(run, memory, newest or 0, takeover=takeover, world_size=world_size)
                place = Place(epoch.epoch, 1)
            memory.last, memory.loaded = place, None
            memory.took_over |= takeover
            return place

    def _memory(self, root: str, run_id: str) -> _Memory:
        memory = self._memories.get(canonical(root))
        if memory is None or memory.run_id != run_id:
            # Another run under a known path was deleted and made anew: nothing remembered of the old one holds.
            memory = self._memories[canonical(root)] = _Memory(run_id)
        return memory


def _next_in_own_epoch(run: Run, memory: _Memory, newest: int | None, *, takeover: bool) -> Place | None:
    """The next place of the epoch this process owns, or None where another epoch is to be opened."""
    last, loaded = memory.last, memory.loaded
    if not takeover:
        # Only a load after a newer epoch was opened gives a right to go on from there: neither an earlier load nor an
        # epoch of its own must let a zombie take the run back, or a job undo a rollback that it does not know of.
        known = memory.seen if loaded is not None or last is None else last.epoch
        if known is not None and newest != known and not _is_own(run, memory, newest):
            run.check_fence(known)
    if last is None or newest != last.epoch:
        return None
    if loaded not in (None, last):
        # Also a load of the newest commit, when a later place was begun here: that one is still under way or was
        # aborted, may yet be committed, and would then stand between the loaded state and its successor.
        return None
    return Place(last.epoch, last.seq + 1)


def _is_own(run: Run, memory: _Memory, newest: int | None) -> bool:
    """Whether this process opened epoch `newest`, though the store told it that it failed."""
    return newest is not None and run.epoch(newest).incarnation == memory.incarnation


def _open_epoch(run: Run, memory: _Memory, newest: int, *, takeover: bool, world_size: int) -> Epoch:
    """Open the epoch after `newest`, from where this process's state comes from."""
    head = run.head()
    at = head.place if head is not None else None
    origin: Place | None
    why: Why
    if memory.loaded is not None:
        origin, why = memory.loaded, "resume" if memory.loaded == at else "rollback"
    elif takeover and newest:
        origin, why = at, "takeover"
    elif head is None:
        # Nothing to load, so nothing to lose: earlier epochs, if any, ended before their first commit.
        origin, why = None, "start"
    else:
        raise ConfigurationError(
            f"run '{run.storage.uri}' has a history (its head is step {head.step} at {head.place}), "
            "and this job has loaded nothing from it.",
            code="config.unloaded_history",
            action="Load the run first to go on from it, save into another folder, or pass takeover=True.",
            path=run.storage.uri,
        )
    return run.open_epoch(
        after=newest, opened_from=origin, why=why, world_size=world_size, incarnation=memory.incarnation
    )


#: What this process remembers; `save` and `load` share it.
JOB: Final = Session()
