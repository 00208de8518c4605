"""Calls of the library that one thread must not nest.

Python runs the handler of a signal, and ``__del__``, between any two steps of a thread: so also in the middle of a call
of this library. A call from there finds the outer call half done, and a lock that the outer call holds would never
become free. So each call first looks whether the same thread is inside another one.

A thread is inside a call as long as the call's frame is on its stack. Therefore no exception can leave a thread
"inside" for ever, as it could with a note that the end of the call has to remove.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Final, ParamSpec, TypeVar

from holdfast.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")

SAVE: Final = "holdfast.save"
LOAD: Final = "holdfast.load"
TRANSFER: Final = "holdfast.transfer"
CHECKPOINTER_SAVE: Final = "Checkpointer.save"
CHECKPOINTER_RESTORE: Final = "Checkpointer.restore"
CHECKPOINTER_CLOSE: Final = "Checkpointer.close"
#: The steps of calls that hold the lock on the notes of the process about its runs.
NOTES: Final = "the notes of another call about its run"
#: The functions of the user that threads of the library call, while the thread that trains is elsewhere.
LISTENER: Final = "EventListener.hear"
NOTICE: Final = "the notice of OnPreemption"
CALLBACKS: Final = frozenset((LISTENER, NOTICE))
#: The calls that share nothing half done while they last, but for their `NOTES`. They may be made inside each other: an
#: object's ``load_state_dict`` may load from another run, and a listener from the run that it hears of.
PLAIN: Final = frozenset((SAVE, LOAD, TRANSFER, *CALLBACKS))
ALL: Final = frozenset((*PLAIN, CHECKPOINTER_SAVE, CHECKPOINTER_RESTORE, CHECKPOINTER_CLOSE, NOTES))

#: The name of each call, by the code of its function. The library fills it when it is imported.
_names: Final[dict[CodeType, str]] = {}


def outer(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function inside which other calls of its thread may be refused (see `refuse_nested`). Returns the
    function itself. `name` is the name of the call in errors."""

    def note(function: Callable[P, T]) -> Callable[P, T]:
        _names[function.__code__] = name
        return function

    return note


def refuse_nested(name: str, *, allowed: Collection[str] = ()) -> None:
    """Raise `ConfigurationError`, code ``config.nested``, if the function that calls this, which makes the call `name`,
    was itself called inside another call, except for those that are `allowed`."""
    inside = enclosing(allowed, depth=3)
    if inside is not None:
        raise ConfigurationError(
            f"{name} was called inside {inside}, by the same thread: from the handler of a signal, __del__ or a "
            "callback.",
            code="config.nested",
            action="In a signal handler or a callback, only set a flag, and save at the end of the step.",
        )


def enclosing(allowed: Collection[str] = (), *, depth: int = 2) -> str | None:
    """The innermost call that the calling thread is inside, not counting those that are `allowed`, nor the frames of
    the innermost `depth` functions; None if it is inside none."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only quick way to the stack
    while frame is not None:
        name = _names.get(frame.f_code) if depth <= 0 else None
        if name is not None and name not in allowed:
            return name
        frame, depth = frame.f_back, depth - 1
    return None
