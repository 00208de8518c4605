"""The progress of a transfer in bytes, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable


class Meter:
    """The bytes done of a transfer, and their `total`, which is None while it is not known.

    The transfer gives the meter a function that reads its own count, and the display calls that function now and then.
    So the meter costs the transfer nothing per byte.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self._look: Callable[[], int] = lambda: 0

    @property
    def done(self) -> int:
        """Bytes done so far."""
        return self._look()

    def follow(self, total: int, look: Callable[[], int]) -> None:
        """Use `look` to count the bytes done of `total`. A `total` of 0 counts as not known."""
        self._look = look
        self.total = total or None
