"""The speed at which this node sends copies. A restore reads from nodes by their speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final

#: The least bytes that say how fast a node sends: fewer are over before the link is full.
_MIN_NBYTES: Final = 4 << 20


@dataclass
class _ToPeer:
    """The traffic to one peer: the transfers under way, and the bytes of those that ended since the first one began."""

    num_active: int = 0
    begun_s: float = 0.0
    nbytes: int = 0
    bytes_per_s: float = 0.0


class SendMeter:
    """The speed at which this node sends to its peers. Transfers to one peer that overlap count as one. Safe for
    several threads."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = Lock()
        self._peers: dict[int, _ToPeer] = {}

    @property
    def bytes_per_s(self) -> float:
        """The speed of the last transfers to the peer that took them fastest, since a slow peer says nothing of this
        node; 0 before there is one."""
        with self._lock:
            return max((each.bytes_per_s for each in self._peers.values()), default=0.0)

    @contextmanager
    def sending(self, peer: int, nbytes: int) -> Iterator[None]:
        """Count a transfer to `peer`, which the ``with`` block makes. One that fails does not count."""
        with self._lock:
            to = self._peers.setdefault(peer, _ToPeer())
            if not to.num_active:
                to.begun_s, to.nbytes = self._now_s(), 0
            to.num_active += 1
        sent = 0
        try:
            yield
            sent = nbytes
        finally:
            with self._lock:
                to.num_active -= 1
                to.nbytes += sent
                took_s = self._now_s() - to.begun_s
                if not to.num_active and to.nbytes >= _MIN_NBYTES and took_s > 0:
                    to.bytes_per_s = to.nbytes / took_s
