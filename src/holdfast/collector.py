"""Python's garbage collector, paused where it could only find objects that are still needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """A ``with`` block, or a decorator, in which no garbage is collected; afterwards the collector is as it was.

    The match of thousands of names makes tens of thousands of objects, and keeps them. So the collector starts again
    and again, and one of its full passes over all objects that torch made takes as long as a whole restore.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
