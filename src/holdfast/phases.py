"""Small helpers of collective operations: work that may fail on one rank, the duration of phases, the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

#: The logger to which the first rank writes one line of INFO for each save and each load.
LOG: Final = logging.getLogger("holdfast")

T = TypeVar("T")
M = TypeVar("M")


def attempt(work: Callable[[], T]) -> T | Exception:
    """Return the result of `work`, or the exception that it raises.

    The exception is not raised here, because the other ranks must hear of the failure first.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised after the exchange
        return error


def told(outcome: T | Exception, message: Callable[[T], M]) -> M | Exception:
    """The message to the other ranks about an attempt: `message(outcome)`, or the exception that ended the attempt."""
    if isinstance(outcome, Exception):
        return outcome
    return attempt(lambda: message(outcome))


def done(outcome: T | Exception) -> T:
    """The result of an attempt whose outcome the ranks have exchanged; the exchange would have raised a failure."""
    assert not isinstance(outcome, Exception), "an exchange raises what failed"
    return outcome


class Stopwatch:
    """A stopwatch that adds up the seconds of each named phase."""

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
