"""The spans in which training leaves a link idle, as they were seen, and the length of the present one. Pure.

Training sends in bursts, and leaves the same gaps in each of its steps. (In GEMINI's profiles their lengths vary by
less than 10 %.) So the gaps of the last steps foretell the next one. Where they do not, as with messages of chance,
nothing is foretold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

#: A link is idle when training has sent nothing for so long. Shorter gaps are pauses of a message.
QUIET_S: Final = 0.005

#: The periods that count, and the most idle spans of one.
_NUM_PERIODS: Final = 20
_MAX_NUM_SPANS: Final = 8
#: Spans that are shorter than this share of the longer ones are pauses too: nothing is foretold of them.
_PAUSE_SHARE: Final = 0.25
_LONGER_QUANTILE: Final = 0.8
#: A period has been found when this share of spans is like those of the period before: they differ by `_LIKE` at most.
_LIKE: Final = 0.25
_LIKE_SHARE: Final = 0.75
_MIN_NUM_PAIRS: Final = 5
#: The span that is foretold is one of the shorter of its kind.
_SHORT_QUANTILE: Final = 0.2


class IdleSpans:
    """The idle spans of one link, as intervals show them that follow each other."""

    def __init__(self) -> None:
        #: Watched time since training has sent something.
        self.quiet_s = 0.0
        #: Whether training has ever sent something.
        self.was_busy = False
        #: The time at which training sent something last; None if that was not watched.
        self.busy_until_s: float | None = None
        #: The length of the present span, as the last ones foretell it; None where they do not.
        self.expected_s: float | None = None
        self._lengths: deque[float] = deque(maxlen=_NUM_PERIODS * _MAX_NUM_SPANS)
        #: Watched time of the present span.
        self.idle_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether the link has been idle for `QUIET_S` at the end of the last interval."""
        return self.idle_s >= QUIET_S

    def note(self, start_s: float, stop_s: float, *, is_busy: bool) -> None:
        """Note an interval that begins where the last one ended, and whether training sent something in it."""
        if not is_busy:
            self.idle_s += stop_s - start_s
            self.quiet_s += stop_s - start_s
            return
        if self.busy_until_s is not None and self.is_idle:
            self._lengths.append(start_s - self.busy_until_s)
            self.expected_s = expected_span_s(self._lengths)
        self.was_busy = True
        self.busy_until_s = stop_s
        self.idle_s = self.quiet_s = 0.0

    def lose_sight(self) -> None:
        """Note that the link was not watched since the last interval."""
        self.busy_until_s, self.idle_s = None, 0.0


def expected_span_s(lengths: Sequence[float]) -> float | None:
    """The length of the idle span that follows spans of these `lengths`; None if they have no period."""
    if not lengths:
        return None
    least_s = _PAUSE_SHARE * _quantile(lengths, _LONGER_QUANTILE)
    spans = [each for each in lengths if each >= least_s]
    for lag in range(1, _MAX_NUM_SPANS + 1):
        recent = spans[-(_NUM_PERIODS + 1) * lag :]
        pairs = list(zip(recent[lag:], recent, strict=False))
        if len(pairs) < max(_MIN_NUM_PAIRS, 2 * lag):
            return None
        num_like = sum(abs(later - earlier) <= _LIKE * max(later, earlier) for later, earlier in pairs)
        if num_like >= _LIKE_SHARE * len(pairs):
            return _quantile(recent[::-1][lag - 1 :: lag], _SHORT_QUANTILE)
    return None


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
