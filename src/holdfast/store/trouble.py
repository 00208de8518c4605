"""Which errors say that a store is in trouble: it fails, or it refuses a job that it served before."""

from __future__ import annotations

from typing import Final

from holdfast.errors import HoldfastError, StorageError

#: Errors of access that come to a job that worked: its bucket was removed, its credentials were withdrawn.
_OF_ACCESS: Final = frozenset({"config.bucket", "config.credentials", "config.region"})
#: Errors of storage that are about something else: the messages of ranks, the memory of a node, an exception.
_OF_OTHERS: Final = frozenset({"storage.control", "storage.memory", "storage.memory_removed", "storage.interrupted"})


def is_store_trouble(error: HoldfastError) -> bool:
    """Whether `error` says that the store is in trouble. The same call may succeed later."""
    if isinstance(error, StorageError):
        return error.code not in _OF_OTHERS
    return error.code in _OF_ACCESS
