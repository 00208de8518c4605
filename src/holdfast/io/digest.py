"""Digests of data sections: xxh3-128 of each 1 MiB block, concatenated. They detect accidents, not attacks."""

from __future__ import annotations

import xxhash

from holdfast.format.container import BLOCK_NBYTES, num_blocks
from holdfast.store.base import Bytes

DIGEST_NBYTES = 16


def table_nbytes(data_nbytes: int) -> int:
    """Size of the digest table of a data section of `data_nbytes`."""
    return num_blocks(data_nbytes) * DIGEST_NBYTES


def digest_blocks(data: Bytes) -> bytes:
    """The digest table of the blocks in `data`. `data` must begin at the start of a block; the last may be short."""
    starts = range(0, len(data), BLOCK_NBYTES)
    return b"".join(xxhash.xxh3_128_digest(data[start : start + BLOCK_NBYTES].data) for start in starts)


def first_bad_block(data: Bytes, table: bytes, *, first: int) -> int | None:
    """The number of the first block whose digest differs from `table`, or None. `data` holds blocks from `first` on."""
    digests = digest_blocks(data)
    expected = table[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(digests)]
    if digests == expected:
        return None
    starts = range(0, len(digests), DIGEST_NBYTES)
    at = next(at for at in starts if digests[at : at + DIGEST_NBYTES] != expected[at : at + DIGEST_NBYTES])
    return first + at // DIGEST_NBYTES
