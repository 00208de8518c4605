"""Writers that do more before they publish. One is for work that may run twice, or late: it looks again before it
publishes, and never takes a name."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import StorageError
from holdfast.store.base import Bytes, FileWriter


class WriterAround:
    """A `FileWriter` that passes all calls on to another one."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    @property
    def alignment(self) -> int:
        """As `FileWriter.alignment`."""
        return self._writer.alignment

    @property
    def in_order(self) -> bool:
        """As `FileWriter.in_order`."""
        return self._writer.in_order

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        self._writer.write_at(offset, *data)

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        self._writer.publish(nbytes)

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        self._writer.abort()


class CheckedWriter(WriterAround):
    """A `FileWriter` that calls `check` when all bytes are written, and publishes the file only if that returns."""

    def __init__(self, writer: FileWriter, check: Callable[[], None]) -> None:
        super().__init__(writer)
        self._check = check

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        self._check()
        super().publish(nbytes)


class CreateOnlyWriter(CheckedWriter):
    """A `CheckedWriter` for which a name that is taken is no error.

    `existed` says afterwards that it was: then the bytes were dropped, and the file that is there stays.
    """

    existed = False

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        try:
            super().publish(nbytes)
        except StorageError as error:
            if error.code != "storage.exists":
                raise
            self.abort()
            self.existed = True
