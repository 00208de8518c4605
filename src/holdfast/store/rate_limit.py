"""Limits for what one process asks of one place in a bucket: requests and bytes for each second.

A virtual clock for each of the two says when the place is free again (the generic cell rate algorithm of ATM networks,
ITU-T I.371, without bursts): what is asked for takes its share of time, and the next request begins after it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from holdfast.errors import StorageError

T = TypeVar("T")


class RateLimits(NamedTuple):
    """The most bytes and requests for each second; infinite where the user sets no limit."""

    bytes_per_s: float = math.inf
    requests_per_s: float = math.inf


class RequestPace:
    """The requests of this process to the place `url`, within `limits`. Threads share it."""

    def __init__(self, url: str, limits: RateLimits, *, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._limits = limits
        self._now = now
        self._lock = threading.Lock()
        self._bytes_free_s = self._requests_free_s = -math.inf

    def delay_s(self, *, nbytes: int = 0, requests: float = 1.0, most_s: float = math.inf) -> float:
        """The seconds to wait before `requests` with `nbytes` bytes are made. Counts them, unless that is more than
        ``most_s``."""
        with self._lock:
            now = self._now()
            bytes_begin_s, requests_begin_s = max(now, self._bytes_free_s), max(now, self._requests_free_s)
            delay_s = max(bytes_begin_s if nbytes else now, requests_begin_s) - now
            if delay_s <= most_s:
                self._bytes_free_s = bytes_begin_s + nbytes / self._limits.bytes_per_s
                self._requests_free_s = requests_begin_s + requests / self._limits.requests_per_s
            return delay_s

    def wait(self, left_s: Callable[[], float], *, nbytes: int = 0) -> None:
        """Wait until one request with `nbytes` bytes may be made. Raises `StorageError`, code ``storage.timeout``, at
        once where that is later than in ``left_s``, the time that the caller has left."""
        most_s = max(left_s(), 0.0)
        delay_s = self.delay_s(nbytes=nbytes, most_s=most_s)
        if delay_s > most_s:
            raise StorageError(
                f"the limits in the URL of '{self._url}' leave no time for a request: the next one may begin in "
                f"{delay_s:.1f} s, and its caller has {most_s:.1f} s.",
                code="storage.timeout",
                action="Raise max_bytes_per_s and max_requests_per_s in that URL, or the time limit (timeout_s).",
                path=self._url,
                retryable=True,
            )
        if delay_s:
            time.sleep(delay_s)

    def paced(self, request: Callable[[], T], left_s: Callable[[], float]) -> Callable[[], T]:
        """`request`, which waits as `wait` does each time that it is made."""

        def make() -> T:
            self.wait(left_s)
            return request()

        return make


_paces: Final[dict[tuple[str, RateLimits], RequestPace]] = {}


def pace_of(url: str, limits: RateLimits) -> RequestPace:
    """The pace of this process at `url`. All stores that name the place and the limits alike share it."""
    return _paces.setdefault((url, limits), RequestPace(url, limits))
