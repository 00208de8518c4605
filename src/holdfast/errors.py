"""The error tree.

One root, subclasses by what a caller can do about it::

    HoldfastError
    +-- ConfigurationError   fix the call or the set-up and try again
    +-- StateError           this state cannot be saved truthfully: change the state
    +-- NotFoundError        nothing is there: check the path
    +-- IncompatibleError    checkpoint and target differ: change one, or select, map, cast
    +-- CorruptError         bytes were lost or altered: use another copy or an older checkpoint
    +-- StorageError         the store failed: retry when ``retryable``, else repair the store
    +-- DeadlineError        ranks did not answer in time: look at the ranks in ``absent``
    +-- FencedError          another job owns the run now: stop

Every error carries a stable ``code`` and ends with the next action. Errors are picklable and
cross ranks as plain values (`to_wire`, `from_wire`), never as pickles.
"""

from __future__ import annotations

import msgspec


def printable(text: str) -> str:
    """`text` with every unprintable character escaped: control characters would act on a terminal or reorder text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class ErrorWire(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels between ranks."""

    kind: str
    message: str
    code: str
    action: str
    path: str | None = None
    tensor: str | None = None
    rank: int | None = None
    step: int | None = None
    tier: str | None = None
    retryable: bool = False
    absent: tuple[int, ...] = ()
    details: tuple[str, ...] = ()


class HoldfastError(Exception):
    """Root of all errors that holdfast raises for causes outside its own code.

    ``code`` is stable across releases. ``action`` tells the user what to do next. ``path``, ``tensor``, ``rank``,
    ``step`` and ``tier`` say where it happened, as far as known. ``details`` are further lines that are printed below
    the message, such as one per name that differs.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        action: str,
        path: str | None = None,
        tensor: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        tier: str | None = None,
        retryable: bool = False,
        absent: tuple[int, ...] = (),
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.action = action
        self.path = path
        self.tensor = tensor
        self.rank = rank
        self.step = step
        self.tier = tier
        self.retryable = retryable
        self.absent = absent
        self.details = details

    def __str__(self) -> str:
        # Anybody may have written the files that names and paths come from, so nothing in them may act on a terminal.
        head = printable(f"[{self.code}] {self.message}")
        if not self.details:
            return f"{head} {printable(self.action)}"
        return "\n".join([head, *(f"  {printable(detail)}" for detail in self.details), printable(self.action)])

    def __reduce__(self) -> tuple[object, tuple[ErrorWire]]:
        return (from_wire, (to_wire(self),))


class ConfigurationError(HoldfastError):
    """The call or the set-up is wrong."""


class StateError(HoldfastError):
    """The state cannot be saved truthfully."""


class NotFoundError(HoldfastError):
    """The run, checkpoint, file or tensor does not exist."""


class IncompatibleError(HoldfastError):
    """Checkpoint and target, or checkpoint and this reader, do not fit together."""


class CorruptError(HoldfastError):
    """Stored bytes are not the bytes that were written."""


class StorageError(HoldfastError):
    """The store refused or failed an operation."""


class DeadlineError(HoldfastError):
    """Ranks named in ``absent`` did not answer in time."""


class FencedError(HoldfastError):
    """A newer epoch of the run exists: another job owns it."""


_KINDS: dict[str, type[HoldfastError]] = {
    kind.__name__: kind
    for kind in (
        HoldfastError,
        ConfigurationError,
        StateError,
        NotFoundError,
        IncompatibleError,
        CorruptError,
        StorageError,
        DeadlineError,
        FencedError,
    )
}


def to_wire(error: HoldfastError) -> ErrorWire:
    """`error` as a value that can be encoded for another rank."""
    return ErrorWire(
        kind=type(error).__name__,
        message=error.message,
        code=error.code,
        action=error.action,
        path=error.path,
        tensor=error.tensor,
        rank=error.rank,
        step=error.step,
        tier=error.tier,
        retryable=error.retryable,
        absent=error.absent,
        details=error.details,
    )


def from_wire(wire: ErrorWire) -> HoldfastError:
    """The error that `wire` describes; an unknown kind becomes the root class."""
    kind = _KINDS.get(wire.kind, HoldfastError)
    return kind(
        wire.message,
        code=wire.code,
        action=wire.action,
        path=wire.path,
        tensor=wire.tensor,
        rank=wire.rank,
        step=wire.step,
        tier=wire.tier,
        retryable=wire.retryable,
        absent=wire.absent,
        details=wire.details,
    )
