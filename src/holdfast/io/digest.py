"""Digests of data sections: xxh3-128 of each 1 MiB block, concatenated. They detect accidents, not attacks."""

from __future__ import annotations

from collections.abc import Sequence

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


def digest_pieces(pieces: Sequence[Bytes]) -> bytes:
    """As `digest_blocks`, of data in several arrays, one after the other."""
    digests: list[bytes] = []
    block, num_filled = xxhash.xxh3_128(), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + BLOCK_NBYTES - num_filled]
            at += len(part)
            if len(part) == BLOCK_NBYTES:
                digests.append(xxhash.xxh3_128_digest(part.data))
                continue
            block.update(part.data)
            num_filled += len(part)
            if num_filled == BLOCK_NBYTES:
                digests.append(block.digest())
                block, num_filled = xxhash.xxh3_128(), 0
    return b"".join((*digests, *([block.digest()] if num_filled else [])))


def first_bad_block(data: Bytes, table: bytes, *, first: int) -> int | None:
    """The number of the first block whose digest differs from `table`, or None. `data` holds blocks from `first` on."""
    digests = digest_blocks(data)
    expected = table[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(digests)]
    if digests == expected:
        return None
    starts = range(0, len(digests), DIGEST_NBYTES)
    at = next(at for at in starts if digests[at : at + DIGEST_NBYTES] != expected[at : at + DIGEST_NBYTES])
    return first + at // DIGEST_NBYTES
