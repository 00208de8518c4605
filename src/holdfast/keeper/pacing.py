"""The pace at which this node sends copies, and what peers make parity of, through its links, so that training does not
feel them.

All threads that send through a link take turns, a piece each. Only the one whose turn it is looks at the counters of
the interface, so a keeper that sends nothing costs nothing. What they count beyond the pieces is training's.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Final, NamedTuple

from holdfast.keeper.link_counters import LOOPBACK, interface_to, sent_nbytes
from holdfast.keeper.piece_pacer import PieceOnLink, PiecePacer
from holdfast.node_memory.peering import PacingRules
from holdfast.peers.transport import PutPace, PutPiece, tail_nbytes
from holdfast.store.rate_limit import RateLimits, RequestPace

#: Interval of looks at the counters while a piece waits; and the share of a core that they may take.
_LOOK_S: Final = 0.001
_LOOK_SHARE: Final = 0.1
#: The least interval of looks whether a piece has arrived.
_MIN_LOOK_S: Final = 0.0001
#: Bytes on the link for each byte of a piece, because of headers.
_OVERHEAD: Final = 1.06
#: With "auto", nothing is held back after training sent less than a share of what the link can carry between two
#: copies, for which there was `_MIN_REST_S` at least.
_REST_SHARE: Final = 0.02
_MIN_REST_S: Final = 1.0
#: Nor after the link was watched for so long during copies and training sent nothing: if it never did, and if it did
#: before. That lasts for `_OPEN_S`, then the link is watched for `_PROBE_S`.
_NEVER_BUSY_S: Final = 3.0
_BUSY_BEFORE_S: Final = 60.0
_OPEN_S: Final = 2.0
_PROBE_S: Final = 0.1
#: Time without a piece after which the next one is the first of other copies.
_PAUSE_S: Final = 0.1

_log = logging.getLogger(__name__)


class _CountedBytes(NamedTuple):
    """The bytes that the interface had sent at a time."""

    at_s: float = -math.inf
    nbytes: int = 0


class LinkPaces:
    """The paces of the links of this node by the same `rules`. Safe for several threads."""

    def __init__(self, rules: PacingRules) -> None:
        self._rules = rules
        self._lock = Lock()
        self._by_interface: dict[str | None, LinkPace | None] = {}

    def to(self, address: str) -> PutPace | None:
        """The pace of the link to the peer at `address`; None where nothing is to be held back."""
        interface = interface_to(address.rpartition(":")[0])
        with self._lock:
            if interface not in self._by_interface:
                self._by_interface[interface] = self._pace(interface)
            return self._by_interface[interface]

    def release(self) -> None:
        """Hold nothing back any more."""
        with self._lock:
            paces = list(self._by_interface.values())
        for pace in paces:
            if pace is not None:
                pace.release()

    def _pace(self, interface: str | None) -> LinkPace | None:
        is_idle_paced = self._rules.mode != "none" and interface != LOOPBACK
        if is_idle_paced and interface is None:
            _log.warning("copies are not kept out of the way of training: no interface leads to another node")
            is_idle_paced = False
        if not is_idle_paced and self._rules.bytes_per_s is None:
            return None
        return LinkPace(interface, self._rules, is_idle_paced=is_idle_paced)


class LinkPace:
    """The `PutPace` of all copies that go through `interface`; with None, through one that nobody knows. With
    `is_idle_paced`, they go while training leaves the link idle. `count` returns the bytes that it has sent."""

    def __init__(
        self,
        interface: str | None,
        rules: PacingRules,
        *,
        is_idle_paced: bool,
        count: Callable[[str], int] = sent_nbytes,
    ) -> None:
        self.interface = interface
        self._watched = interface if is_idle_paced else None
        self._count = count
        limit = math.inf if rules.bytes_per_s is None else rules.bytes_per_s
        self._limit = RequestPace(interface or "", RateLimits(bytes_per_s=limit))
        self._may_open = rules.mode == "auto" and rules.bytes_per_s is None
        self._line = _WaitingLine()
        self._released = False
        #: Guards the number of pieces that are sent out of turn, while the link is open, and the end of the last piece.
        self._lock = Lock()
        self._num_open = 0
        self._ended = _CountedBytes()
        self._open_until_s = -math.inf
        #: The attributes below belong to the thread whose turn it is.
        self._pacer = PiecePacer(time.monotonic())
        self._looked_at = _CountedBytes()
        self._ahead_nbytes = 0.0
        self._rest_nbytes = 0
        self._look_s = _LOOK_S
        self._is_told = False

    @contextmanager
    def turn(self, nbytes: int, end_s: float) -> Iterator[PutPiece]:
        """As `PutPace.turn`."""
        while True:
            if self._is_open():
                with self._out_of_turn():
                    yield PutPiece(nbytes)
                return
            with self._line.place(end_s):
                granted = self._await(nbytes, end_s)
                if granted:
                    on_link = PieceOnLink(granted, time.monotonic())

                    def left(nbytes: int, on_link: PieceOnLink = on_link) -> float:
                        on_link.look(time.monotonic(), nbytes)
                        return max((nbytes - tail_nbytes(on_link.nbytes)) / self._pacer.speed.bytes_per_s, _MIN_LOOK_S)

                    yield PutPiece(granted, left)
                    self._end(on_link)
                    return

    def release(self) -> None:
        """Hold nothing back any more."""
        self._released = True

    def _is_open(self) -> bool:
        return self._released or time.monotonic() < self._open_until_s

    @contextmanager
    def _out_of_turn(self) -> Iterator[None]:
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                self._ended = self._mark()

    def _await(self, left_nbytes: int, end_s: float) -> int:
        """Wait until a piece of what is left may be sent. Returns its bytes; 0 when the link has become open."""
        if time.monotonic() - self._ended.at_s > _PAUSE_S:
            self._begin()
        while True:
            self._look()
            if self._is_open() or self._opens():
                return 0
            nbytes = self._next_nbytes(left_nbytes)
            wait_s = self._limit.delay_s(nbytes=nbytes, most_s=0.0) if nbytes else self._look_s
            if nbytes and not wait_s:
                return nbytes
            if self._looked_at.at_s + wait_s > end_s:
                raise TimeoutError("the deadline is over")
            time.sleep(wait_s if self._watched is None else min(wait_s, self._look_s))

    def _begin(self) -> None:
        """Begin with other copies: what the link has carried since the last ones was training's."""
        now, rest = self._mark(), self._ended
        self._pacer.begin(now.at_s)
        if now.at_s - rest.at_s >= _MIN_REST_S and rest.at_s > -math.inf:
            limit = _REST_SHARE * self._pacer.speed.bytes_per_s * (now.at_s - rest.at_s)
            is_busy = now.nbytes - rest.nbytes > limit
            self._pacer.spans.was_busy = is_busy
            self._pacer.spans.quiet_s = 0.0 if is_busy else _NEVER_BUSY_S

    def _next_nbytes(self, left_nbytes: int) -> int:
        if self._watched is None:
            return min(left_nbytes, self._pacer.speed.piece_nbytes)
        nbytes = self._pacer.next_nbytes(self._looked_at.at_s, left_nbytes)
        if self._pacer.is_starved and not self._is_told:
            self._is_told = True
            _log.warning(
                "training leaves the network interface %s too little idle time for copies: they go at a small share "
                "of its speed, so that they come to an end. Save less often, or allow more with protect_pace='none'.",
                self._watched,
            )
        return nbytes

    def _end(self, piece: PieceOnLink) -> None:
        rest_nbytes = min(piece.left_nbytes, tail_nbytes(piece.nbytes)) if piece.num_looks else 0
        carried = self._look(piece.nbytes, rest_nbytes)
        self._pacer.sent(piece, self._looked_at.at_s, carried_nbytes=carried)
        with self._lock:
            self._ended = self._looked_at

    def _mark(self) -> _CountedBytes:
        return _CountedBytes(time.monotonic(), 0 if self._watched is None else self._count(self._watched))

    def _look(self, own_nbytes: int = 0, rest_nbytes: int = 0) -> int:
        """Look at what the link has carried since the last look, of which `own_nbytes` were those of a piece, but for
        a rest that may still be on the way. Returns the bytes."""
        last, self._looked_at = self._looked_at, self._mark()
        if self._watched is None:
            return own_nbytes
        now_s = self._looked_at.at_s
        self._look_s = max(_LOOK_S, (time.monotonic() - now_s) / _LOOK_SHARE)
        carried = self._looked_at.nbytes - last.nbytes
        with self._lock:
            is_mixed = self._num_open > 0
        if not is_mixed:
            training = carried - _OVERHEAD * own_nbytes - self._ahead_nbytes
            self._pacer.watch(last.at_s, now_s, max(round(training), 0), own_nbytes=own_nbytes)
            # Another connection sends the next piece, so rests of two pieces may be on the way.
            self._ahead_nbytes = min(max(-training, 0.0), _OVERHEAD * (rest_nbytes + self._rest_nbytes))
            self._rest_nbytes = rest_nbytes
        return carried

    def _opens(self) -> bool:
        """Whether nothing needs to be held back for a while, because training does not use the link."""
        spans = self._pacer.spans
        enough_s = _BUSY_BEFORE_S if spans.was_busy else _NEVER_BUSY_S
        if not self._may_open or spans.quiet_s < enough_s:
            return False
        spans.quiet_s = enough_s - _PROBE_S
        self._open_until_s = self._looked_at.at_s + _OPEN_S
        return True


class _WaitingLine:
    """Threads that wait for their turns, in the order in which they came."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._places: deque[object] = deque()

    @contextmanager
    def place(self, end_s: float) -> Iterator[None]:
        """Wait until this thread is the first, and stay it within the block.

        Raises:
            TimeoutError: that is not so at `end_s`.
        """
        place = object()
        with self._changed:
            self._places.append(place)
        try:
            with self._changed:
                left_s = max(end_s - time.monotonic(), 0.0)
                if not self._changed.wait_for(lambda: self._places[0] is place, left_s):
                    raise TimeoutError("the deadline is over")
            yield
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()
