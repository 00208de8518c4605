"""Names of slots that threads of a keeper read for peers. The keeper does not free a slot that is being read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class SlotReaders:
    """The slots that threads are reading, by name. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._readers: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        """The names of the slots that are being read."""
        with self._lock:
            return set(self._readers)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """The keeper does not free the slot inside the ``with`` block."""
        with self._lock:
            self._readers[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[name] -= 1
                self._readers += Counter()  # drops those that nobody reads
