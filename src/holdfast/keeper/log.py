"""The log of a keeper, which takes memory of the node and so has a limit."""

from __future__ import annotations

import logging
import os
import stat
from typing import Final, TextIO

#: Size at which a log is cut, and the size of its last part, which stays.
LIMIT_NBYTES: Final = 1 << 20
_KEPT_NBYTES: Final = LIMIT_NBYTES // 4


class BoundedLog(logging.StreamHandler[TextIO]):
    """Writes to standard error. With `is_bounded`, which is for a file of the keeper's own that is opened for
    appending, keeps only the last part of that file when it grows beyond `LIMIT_NBYTES`."""

    def __init__(self, *, is_bounded: bool) -> None:
        super().__init__()
        self._is_bounded = is_bounded

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`."""
        super().emit(record)
        if self._is_bounded:
            try:
                _cut(self.stream.fileno())
            except OSError:
                self.handleError(record)


def _cut(fd: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= LIMIT_NBYTES:
        return
    last = os.pread(fd, _KEPT_NBYTES, status.st_size - _KEPT_NBYTES)
    os.ftruncate(fd, 0)
    os.write(fd, b"(older lines were removed)\n" + last[last.find(b"\n") + 1 :])
