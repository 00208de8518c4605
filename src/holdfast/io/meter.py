"""How far a transfer has come, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable


class Meter:
    """Bytes that are done, and their `total`; None while that is not known.

    What moves bytes says once where they are counted; whoever shows them looks there now and then. So nothing is added
    to the way of a byte.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self._look: Callable[[], int] = lambda: 0

    @property
    def done(self) -> int:
        """Bytes that are done so far."""
        return self._look()

    def follow(self, total: int, look: Callable[[], int]) -> None:
        """Have `look` say how many bytes of `total` are done. Where there are none, nothing is counted."""
        self._look = look
        self.total = total or None
