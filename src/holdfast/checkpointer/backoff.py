"""The number of saves that go to storage before a job tries memory again that it could not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

#: Limit of the number of saves from one try to the next, which doubles each time.
_NUM_SAVES_AT_MOST: Final = 16


class Backoff(msgspec.Struct, frozen=True, array_like=True):
    """The schedule for trying memory again that could not be used: the next save tries it, then the second after that,
    the fourth, and so on. The next `num_put_off` saves do not use memory.

    Before each save, the ranks exchange their backoffs, and all continue with the `merged` one. Otherwise a rank that
    did not hear of the trouble (its answer came too late, say) would try at other saves than the others for ever.
    """

    num_put_off: int = 0
    interval: int = 1

    @property
    def has_begun(self) -> bool:
        """Whether memory could not be used the last time."""
        return self.interval > 1

    @staticmethod
    def merged(all_ranks: Sequence[Backoff]) -> Backoff:
        """The backoff of all ranks together: no rank tries before the rank that waits longest."""
        return Backoff(max(each.num_put_off for each in all_ranks), max(each.interval for each in all_ranks))

    def after_fall_back(self) -> Backoff:
        """The backoff after a save that did not use memory, because its try was put off or failed."""
        if self.num_put_off:
            return Backoff(self.num_put_off - 1, self.interval)
        return Backoff(self.interval - 1, min(2 * self.interval, _NUM_SAVES_AT_MOST))
