"""The run of one `Checkpointer`, whose path loses its links at the first call."""

from __future__ import annotations

from holdfast.store.base import Location
from holdfast.store.urls import canonical


class FoundRun:
    """Says where the run is. It refers to no `Checkpointer`, so a thread that asks it keeps none alive."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._is_found = False

    def location(self) -> Location:
        """The run. After `find`, without links in its path, by which memory and turns know it."""
        return self._location

    def find(self, *, timeout_s: float) -> bool:
        """Resolve the links in the path, once; whether this call has done so. Raises `StorageError` where the file
        system does not answer."""
        if self._is_found:
            return False
        self._location = canonical(self._location, timeout_s=timeout_s)
        self._is_found = True
        return True
