"""Files that were written, read again: the digests of what is stored now."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NoReturn

import numpy as np

from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.digests import XXH3, DigestKind
from holdfast.io.buffers import pipeline_pool
from holdfast.io.digest import digest_blocks
from holdfast.io.jobs import DataFile, Extent, ReadJob
from holdfast.io.reader import read_files
from holdfast.store.base import Bytes, Store


def stored_digests(
    storage: Store,
    key: str,
    *,
    data_start: int,
    data_nbytes: int,
    blanks: Sequence[Extent] = (),
    kind: DigestKind = XXH3,
) -> tuple[bytes, bytes]:
    """The digest table of a stored file's data section, and the bytes in `blanks`, which count as zeros in the table.

    Blocking; reads the section once, in 6 MiB of buffers. `blanks` ascend. Raises `CorruptError` for a file that is too
    short, and `StorageError` as the store does.
    """
    digests: dict[int, bytes] = {}
    held = [np.zeros(blank.stop - blank.start, np.uint8) for blank in blanks]
    lock = Lock()

    def take(_: int, offset: int, data: Bytes) -> None:
        # Requests for one extent begin at multiples of the buffer's size, so they hold whole blocks.
        assert offset % BLOCK_NBYTES == 0
        met = [(at, max(b.start, offset), min(b.stop, offset + len(data))) for at, b in enumerate(blanks)]
        met = [(at, low, high) for at, low, high in met if low < high]
        if met:
            data = data.copy()  # it may be the memory of the store itself
        for at, low, high in met:
            start = blanks[at].start
            held[at][low - start : high - start] = data[low - offset : high - offset]
            data[low - offset : high - offset] = 0
        table = digest_blocks(data, kind)
        with lock:
            digests[offset] = table

    if data_nbytes:

        def opened() -> DataFile:
            return DataFile(storage.reader(key), storage.path(key), data_start, data_nbytes, None)

        job = ReadJob(data_nbytes, opened, [Extent(0, data_nbytes)], take, verify=False)
        with pipeline_pool() as pool:
            request_nbytes = storage.capabilities.request_nbytes
            read_files([job], pool=pool, on_corrupt=_not_compared, request_nbytes=request_nbytes)
    return b"".join(digests[offset] for offset in sorted(digests)), b"".join(part.tobytes() for part in held)


def _not_compared(file: DataFile, block: int) -> NoReturn:
    raise AssertionError(f"block {block} of {file.path} was compared, though it has no digest here")
