"""Small helpers of collective operations: outcomes to report instead of exceptions, seconds per phase, the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.control.channel import Outcome

#: Where each save and each load is one line of INFO, on the first rank.
LOG: Final = logging.getLogger("holdfast")


def attempt(work: Callable[[], bytes]) -> Outcome:
    """What `work` returns, or what it raises: the other ranks must hear of a failure before it is raised here."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised after the exchange
        return error


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
