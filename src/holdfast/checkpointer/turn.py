"""The turn to call the `Checkpointer`s of a run: one thread at a time has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_native_id
from typing import Final
from weakref import WeakValueDictionary

from holdfast.errors import ConfigurationError
from holdfast.snapshot.guard import is_alive
from holdfast.store.base import Location

_ONLY: Final = "caller"


class Turn:
    """Lets one thread at a time call, and only threads of the process that called first.

    All `Checkpointer`s of a process on one run share one turn, because they share the memory of its rank.

    A thread does not ask for a turn inside its own one: `holdfast.calls` refuses calls inside calls. This is not a
    lock, because an exception at the end of a ``with`` block would leave a lock taken for ever. A turn is over when its
    thread asks for the next one, or has ended.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._caller: dict[str, int] = {}

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that may call."""
        return self._pid not in (None, os.getpid())

    @contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Take the turn for a `call`, such as "save". Raises `ConfigurationError` if another thread has the turn (code
        ``config.threads``), or if this process was forked from the one that may call (``config.forked``)."""
        if self.is_of_parent:
            raise ConfigurationError(
                f"{call} was called in a process that was forked from the trainer.",
                code="config.forked",
                action="Save and restore in the trainer; workers of a data loader read with holdfast.open.",
            )
        self._pid, me = os.getpid(), get_native_id()
        caller = self._caller.setdefault(_ONLY, me)  # atomic
        if caller != me and is_alive(caller):
            raise ConfigurationError(
                f"{call} was called while another thread was calling a Checkpointer of the same run.",
                code="config.threads",
                action="Call it only from the thread that trains: all ranks must make the same calls in one order.",
            )
        self._caller[_ONLY] = me
        try:
            yield
        finally:
            self._caller.pop(_ONLY, None)


#: There is one registry per process, because a turn protects memory of the process.
_turns: Final[WeakValueDictionary[tuple[int, Location], Turn]] = WeakValueDictionary()


def turn_in(run: Location) -> Turn:
    """The turn of this process in `run`."""
    return _turns.setdefault((os.getpid(), run), Turn())
