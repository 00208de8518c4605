"""For how many saves memory that could not be used is left alone."""

from __future__ import annotations

from typing import Final

#: Saves from one try to the next are twice as many each time, up to this.
_NUM_SAVES_AT_MOST: Final = 16


class Backoff:
    """Puts off using memory: it is tried again by the next save, then by the second after that, the fourth, and so on.

    It counts saves and asks nobody. All ranks fall back at the same save, since they hear of the trouble in the same
    exchange; so they count alike, and try again at the same save.
    """

    def __init__(self) -> None:
        self._num_put_off = 0
        self._interval = 1

    @property
    def has_begun(self) -> bool:
        """Whether memory could not be used the last time."""
        return self._interval > 1

    def begin(self) -> None:
        """Note that memory could not be used by this save."""
        self._num_put_off = self._interval - 1
        self._interval = min(2 * self._interval, _NUM_SAVES_AT_MOST)

    def end(self) -> None:
        """Note that memory is used again."""
        self._num_put_off, self._interval = 0, 1

    def puts_off(self) -> bool:
        """Whether this save leaves memory alone. Call it once per save."""
        if not self._num_put_off:
            return False
        self._num_put_off -= 1
        return True
