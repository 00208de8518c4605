"""The store of a folder on a disk of a node. Its errors say that the disk failed, and not the store of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.errors import HoldfastError, StorageError
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixReader, PosixStore

#: The tier of the copies on disks of nodes, in errors.
NODE_DISK: Final = "node disk"


class DiskStore(PosixStore):
    """As `PosixStore`. The errors of reads of data files name the tier `NODE_DISK`."""

    def reader(self, key: str) -> PosixReader:
        """As `PosixStore.reader`."""
        with _named():
            return _DiskReader(self.path(key))


class _DiskReader(PosixReader):
    def read_at(self, offset: int, out: Bytes) -> None:
        """As `PosixReader.read_at`."""
        with _named():
            super().read_at(offset, out)


def is_disk_failure(error: HoldfastError) -> bool:
    """Whether a disk of a node could not read a file. The file may be sound, and readable later."""
    return isinstance(error, StorageError) and error.tier == NODE_DISK


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        error.tier = NODE_DISK
        raise
