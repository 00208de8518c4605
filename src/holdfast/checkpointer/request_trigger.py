"""Requests for a save from outside the training loop: a signal, a file, or a record in the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.checkpointer.rounds import Rounds
from holdfast.checkpointer.signals import SignalNote
from holdfast.errors import HoldfastError
from holdfast.policy.triggers import Metrics
from holdfast.policy.when import OnRequest
from holdfast.policy.wish import Wish
from holdfast.run.save_requests import delete_requests, pending_requests
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

_log = logging.getLogger(__name__)

#: Time limit for one look at the run.
_LOOK_S: Final = 30.0


class RequestTrigger:
    """Observes an `OnRequest` on this rank: the signal on every rank, the rest on the first rank alone."""

    def __init__(
        self, policy: OnRequest, run: Location, signals: Mapping[int, SignalNote], *, is_first_rank: bool
    ) -> None:
        self._signal = None if policy.signum is None else signals[policy.signum]
        self._inbox = Inbox(run, policy.file, poll_s=policy.poll_s) if is_first_rank else None

    def wish(self, metrics: Metrics | None, now_s: float) -> Wish | None:
        """As `Trigger.wish`."""
        if self._signal is not None and self._signal.noted_s is not None:
            return Wish(f"requested by {self._signal.name}")
        reason = None if self._inbox is None else self._inbox.reason
        return None if reason is None else Wish(reason)

    def saved(self, now_s: float, *, begun_s: float, memory_only: bool) -> None:
        """As `Trigger.saved`."""
        if memory_only:
            return
        if self._signal is not None:
            self._signal.forget(begun_s)
        if self._inbox is not None:
            self._inbox.grant(begun_s)

    def close(self) -> None:
        """Stop observing."""
        if self._inbox is not None:
            self._inbox.close()


class Inbox:
    """Looks in the background for requests in a run, and for a `file`; deletes those that a save has granted."""

    def __init__(self, run: Location, file: Path | None, *, poll_s: float) -> None:
        self._mail = _Mail(run, file, poll_s)
        self._rounds = Rounds(self._mail.look, name="holdfast-requests", last=self._mail.tidy)

    @property
    def reason(self) -> str | None:
        """The reason for a save, which names the asker; None if nobody asks."""
        return self._mail.reason

    def grant(self, begun_s: float) -> None:
        """A save has begun at the time `begun_s`: the requests that were seen before are granted."""
        if self._mail.grant(begun_s):
            self._rounds.hurry()

    def close(self) -> None:
        """Delete what was granted, and stop looking."""
        self._rounds.close()


class _Seen(NamedTuple):
    """A request that was seen. `who` asks; the first look at it ended at `seen_s` of `time.monotonic`. A file was last
    touched at `touched_ns`."""

    who: str
    seen_s: float
    touched_ns: int = 0


class _Mail:
    """The requests that were seen, and those that are granted and have to be deleted. `look` and `tidy` are for the
    background thread, the rest for the thread that trains."""

    def __init__(self, run: Location, file: Path | None, poll_s: float) -> None:
        self._run = run
        self._file = file
        self._poll_s = poll_s
        #: The kinds of trouble that a warning has told.
        self._told = set[str]()
        #: The requests by name. Each change makes a new dict.
        self._seen: dict[str, _Seen] = {}
        #: A dict for its order and its atomic changes of one key.
        self._granted: dict[str, None] = {}

    @property
    def reason(self) -> str | None:
        waiting = [each.who for name, each in self._seen.items() if name not in self._granted]
        return f"requested by {waiting[0]}" if waiting else None

    def grant(self, begun_s: float) -> bool:
        """Grant all requests that were seen before the time `begun_s`. Returns whether there are any to delete."""
        self._granted.update(dict.fromkeys(name for name, each in self._seen.items() if each.seen_s <= begun_s))
        return bool(self._granted)

    def look(self) -> float:
        """Delete granted requests, and look for new ones. Returns the pause until the next look."""
        self.tidy()
        self._try("cannot look for requests to save", self._find)
        return self._poll_s

    def tidy(self) -> None:
        """Delete the requests that are granted."""
        self._try("cannot delete requests to save that are granted", self._delete)

    def _find(self) -> None:
        with TimedStore(open_store(self._run), timeout_s=_LOOK_S) as store:
            asked = {name: (who, 0) for name, who in pending_requests(store).items()}
        touched_ns = self._touched_ns()
        if touched_ns is not None:
            asked[str(self._file)] = f"the file {self._file}", touched_ns
        now_s = time.monotonic()
        found = {name: _Seen(who, now_s, touched_ns) for name, (who, touched_ns) in asked.items()}
        known = {name: each for name, each in self._seen.items() if name in found}
        self._seen = found | {name: each for name, each in known.items() if each.touched_ns == found[name].touched_ns}

    def _touched_ns(self) -> int | None:
        """The time at which the file was last touched; None where there is none."""
        if self._file is None:
            return None
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _delete(self) -> None:
        granted = tuple(self._granted)
        if not granted:
            return
        with TimedStore(open_store(self._run), timeout_s=_LOOK_S) as store:
            delete_requests(store, [name for name in granted if name != str(self._file)])
        if self._file is not None and str(self._file) in granted:
            seen = self._seen.get(str(self._file))
            if seen is not None and seen.touched_ns == self._touched_ns():  # else somebody asks again
                self._file.unlink(missing_ok=True)
        self._seen = {name: who for name, who in self._seen.items() if name not in granted}
        for name in granted:
            self._granted.pop(name, None)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Do `act`, which is tried again later; say once if it fails."""
        try:
            act()
        except (HoldfastError, OSError) as error:
            if what not in self._told:
                self._told.add(what)
                _log.warning("%s; trying again: %s", what, error)
