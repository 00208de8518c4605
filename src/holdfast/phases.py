"""Small helpers of collective operations: work that may fail on one rank, seconds per phase, the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

#: Where each save and each load is one line of INFO, on the first rank.
LOG: Final = logging.getLogger("holdfast")

T = TypeVar("T")
M = TypeVar("M")


def attempt(work: Callable[[], T]) -> T | Exception:
    """What `work` returns, or what it raises: the other ranks must hear of a failure before it is raised here."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised after the exchange
        return error


def told(outcome: T | Exception, message: Callable[[T], M]) -> M | Exception:
    """The message to the other ranks about an attempt: `message` of what came of it, or why nothing did."""
    if isinstance(outcome, Exception):
        return outcome
    return attempt(lambda: message(outcome))


def done(outcome: T | Exception) -> T:
    """What came of an attempt that all ranks have heard of: a failure would have been raised there."""
    assert not isinstance(outcome, Exception), "an exchange raises what failed"
    return outcome


class Stopwatch:
    """Seconds per named phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to phase `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
