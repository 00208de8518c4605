"""The time at which the next piece of a copy may be sent, and its size. Pure: callers give the time and the load.

A message of training that finds a piece on the link waits for its end. So one piece is on a link at a time, and takes
`DELAY_S`. Pieces fill the idle spans of training one after another (GEMINI, SOSP'23): a piece is sent only if it ends
before a share of the span is over. Where the spans cannot be foretold, pieces are sent while the link is idle, so that
training waits for one piece at most, and none follows.

Copies never starve: after `GRACE_S` without enough idle time, they get a small share of the link.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from holdfast.keeper.idle_spans import IdleSpans

#: The time that a piece takes on the link, and limits for its size.
DELAY_S: Final = 0.002
MIN_PIECE_NBYTES: Final = 64 << 10
MAX_PIECE_NBYTES: Final = 64 << 20
#: The share of the link that copies get whatever training does, its least, and the time that they wait for idle spans
#: first. Peers end a transfer of a MiB that takes a minute, and eight may take turns.
GUARANTEED_SHARE: Final = 0.05
MIN_BYTES_PER_S: Final = 256 << 10
GRACE_S: Final = 5.0

#: The share of the time since training's last message that a piece may take, if it is more than `DELAY_S`.
_IDLE_SHARE: Final = 0.04
#: The share of a foretold idle span in which pieces are sent; and the time over its length after which the span is
#: another one, of which nothing was foretold.
_SAFETY: Final = 0.9
_OVERDUE: Final = 1.5
#: The time that a piece takes beyond that of its bytes.
_PIECE_COST_S: Final = 0.0005
#: Training is at work when it sends this share of what the link can carry beside a piece, and more than a packet. What
#: looks like training may also be a share of the piece: headers and acknowledgements.
_BUSY_SHARE: Final = 0.1
_PIECE_SHARE: Final = 0.03
_PACKET_NBYTES: Final = 2048
#: The time on the link of the pieces that say its speed, more than a bucket of tokens that is full lasts.
_SPEED_S: Final = 0.05
_MAX_GROWTH: Final = 2.0
#: A piece that takes longer than so many times what was expected says no more than that: a process may have lost its
#: processor for long.
_MAX_SLOWING: Final = 4.0
#: The growth of the supposed speed after a piece that did not show it; and its least, in bytes per second.
_GROWTH: Final = 1.05
_MIN_SPEED: Final = 1000.0
#: The longest interval that says when training was idle.
_MAX_INTERVAL_S: Final = 0.1


class PieceOnLink:
    """A piece of `nbytes` that is on the link since `start_s`, as looks at it show it."""

    def __init__(self, nbytes: int, start_s: float) -> None:
        self.nbytes = nbytes
        self.start_s = self.seen_s = start_s
        #: The bytes that were on the way at the last look that found some, and the number of such looks.
        self.left_nbytes = nbytes
        self.num_looks = 0

    def look(self, now_s: float, left_nbytes: int) -> None:
        """Note that so many bytes have not arrived yet."""
        self.seen_s, self.left_nbytes = now_s, left_nbytes
        self.num_looks += 1


class LinkSpeed:
    """The bytes that a link carries in a second, as pieces show it.

    A thread may look late, above all one of a process that gives way to training. So a piece that had arrived at the
    first look says only that the link is not slower. A look at a piece that is still on the way says how slow it is.
    """

    def __init__(self) -> None:
        self.bytes_per_s = MIN_PIECE_NBYTES / DELAY_S
        self._pieces: deque[tuple[float, float]] = deque()

    @property
    def piece_nbytes(self) -> int:
        """The bytes that the link carries in `DELAY_S`, within the limits."""
        return self.carried_nbytes(DELAY_S)

    def carried_nbytes(self, seconds: float) -> int:
        """The bytes that the link carries in so many seconds, within the limits of a piece."""
        return min(max(int(self.bytes_per_s * seconds), MIN_PIECE_NBYTES), MAX_PIECE_NBYTES)

    def note(self, piece: PieceOnLink, stop_s: float, carried_nbytes: float) -> None:
        """Note that `piece` has arrived, and that the link carried so many bytes meanwhile."""
        duration_s = max(stop_s - piece.start_s, 1e-6)
        was_seen = piece.num_looks > 1 or 0 < piece.left_nbytes <= piece.nbytes // 2
        if was_seen:
            duration_s = min(duration_s, piece.seen_s - piece.start_s + piece.left_nbytes / self.bytes_per_s)
        elif carried_nbytes / duration_s < self.bytes_per_s:
            self.bytes_per_s *= _GROWTH
            return
        carried_nbytes = max(carried_nbytes, piece.nbytes / 2)  # whatever the counters say, no more of it is left
        duration_s = min(duration_s, _MAX_SLOWING * carried_nbytes / self.bytes_per_s)
        self._pieces.append((carried_nbytes, duration_s))
        total_s = sum(each_s for _, each_s in self._pieces)
        while total_s - self._pieces[0][1] > _SPEED_S:
            total_s -= self._pieces.popleft()[1]
        speed = sum(nbytes for nbytes, _ in self._pieces) / total_s
        self.bytes_per_s = max(min(speed, _MAX_GROWTH * self.bytes_per_s), _MIN_SPEED)


class PiecePacer:
    """The pace on one link, from the time `now_s` on."""

    def __init__(self, now_s: float) -> None:
        self.speed = LinkSpeed()
        self.spans = IdleSpans()
        #: Whether copies have only the guaranteed share.
        self.is_starved = False
        #: The guaranteed share up to this time was sent.
        self._served_until_s = self._watched_until_s = now_s

    def watch(self, start_s: float, stop_s: float, nbytes: int, *, own_nbytes: int = 0) -> None:
        """Note that the link carried `nbytes` of training within an interval, and `own_nbytes` of a piece."""
        if start_s != self._watched_until_s or stop_s - start_s > _MAX_INTERVAL_S:
            self.spans.lose_sight()
        else:
            beside = max(self.speed.bytes_per_s * (stop_s - start_s) - own_nbytes, 0.0)
            limit = _BUSY_SHARE * beside + _PIECE_SHARE * own_nbytes + _PACKET_NBYTES
            self.spans.note(start_s, stop_s, is_busy=nbytes > limit)
        self._watched_until_s = stop_s

    def begin(self, now_s: float) -> None:
        """Note that a copy begins to wait: none waited before."""
        self._served_until_s = now_s

    def next_nbytes(self, now_s: float, left_nbytes: int) -> int:
        """The bytes to send now, of `left_nbytes`; 0: none. Say `sent` at their end."""
        most = min(left_nbytes, self.speed.carried_nbytes(max(DELAY_S, _IDLE_SHARE * self.spans.idle_s)))
        self.is_starved = now_s - self._served_until_s > GRACE_S
        if self.is_starved:
            return most
        if not self.spans.is_idle:
            return 0
        left_s = self._left_s(now_s) - _PIECE_COST_S
        if most <= left_s * self.speed.bytes_per_s:
            return most
        fitting = max(int(left_s * self.speed.bytes_per_s), 0)
        return fitting if fitting >= MIN_PIECE_NBYTES // 2 else 0

    def sent(self, piece: PieceOnLink, stop_s: float, *, carried_nbytes: int) -> None:
        """Note that `piece` has arrived, and that the link carried so many bytes meanwhile, training's too."""
        self.speed.note(piece, stop_s, carried_nbytes)
        guaranteed = max(GUARANTEED_SHARE * self.speed.bytes_per_s, MIN_BYTES_PER_S)
        self._served_until_s = min(self._served_until_s + piece.nbytes / guaranteed, stop_s)

    def _left_s(self, now_s: float) -> float:
        """The time in which pieces may still be sent in the present idle span."""
        expected_s, begun_s = self.spans.expected_s, self.spans.busy_until_s
        if expected_s is None or begun_s is None or now_s - begun_s > _OVERDUE * expected_s:
            return math.inf
        return max(begun_s + _SAFETY * expected_s - now_s, 0.0)
