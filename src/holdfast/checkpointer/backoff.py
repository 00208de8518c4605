"""For how many saves memory that could not be used is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

#: Saves from one try to the next are twice as many each time, up to this.
_NUM_SAVES_AT_MOST: Final = 16


class Backoff(msgspec.Struct, frozen=True, array_like=True):
    """When memory is tried again that could not be used: by the next save, then by the second after that, the fourth,
    and so on. The next `num_put_off` saves leave it alone.

    Ranks tell each other where they stand before each save, and all go on from what is `merged`: one that did not hear
    of the trouble, because the answer came too late, would try at other saves than the others for ever.
    """

    num_put_off: int = 0
    interval: int = 1

    @property
    def has_begun(self) -> bool:
        """Whether memory could not be used the last time."""
        return self.interval > 1

    @staticmethod
    def merged(all_ranks: Sequence[Backoff]) -> Backoff:
        """Where the ranks stand together: nobody tries before the one that tries last."""
        return Backoff(max(each.num_put_off for each in all_ranks), max(each.interval for each in all_ranks))

    def after_fall_back(self) -> Backoff:
        """The same after a save that did not use memory, because it was put off or could not be used."""
        if self.num_put_off:
            return Backoff(self.num_put_off - 1, self.interval)
        return Backoff(self.interval - 1, min(2 * self.interval, _NUM_SAVES_AT_MOST))
