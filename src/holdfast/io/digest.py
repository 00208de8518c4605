"""Digests of data sections: one of each 1 MiB block, concatenated. Those of kind XXH3 detect accidents, not attacks."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format.container import BLOCK_NBYTES, num_blocks
from holdfast.format.digests import XXH3, DigestKind
from holdfast.store.base import Bytes


def table_nbytes(data_nbytes: int, kind: DigestKind = XXH3) -> int:
    """Size of the digest table of a data section of `data_nbytes`."""
    return num_blocks(data_nbytes) * kind.nbytes


def digest_blocks(data: Bytes, kind: DigestKind = XXH3) -> bytes:
    """The digest table of the blocks in `data`. `data` must begin at the start of a block; the last may be short."""
    starts = range(0, len(data), BLOCK_NBYTES)
    return b"".join(kind.of(data[start : start + BLOCK_NBYTES].data) for start in starts)


def digest_pieces(pieces: Sequence[Bytes], kind: DigestKind = XXH3) -> bytes:
    """As `digest_blocks`, of data in several arrays, one after the other."""
    digests: list[bytes] = []
    block, num_filled = kind.begin(), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + BLOCK_NBYTES - num_filled]
            at += len(part)
            if len(part) == BLOCK_NBYTES:
                digests.append(kind.of(part.data))
                continue
            block.update(part.data)
            num_filled += len(part)
            if num_filled == BLOCK_NBYTES:
                digests.append(block.digest())
                block, num_filled = kind.begin(), 0
    return b"".join((*digests, *([block.digest()] if num_filled else [])))


def bad_blocks(data: Bytes, table: bytes, *, first: int, kind: DigestKind) -> list[int]:
    """The numbers of the blocks whose digests differ from `table`, ascending. `data` holds blocks from `first` on."""
    digests = digest_blocks(data, kind)
    expected = table[first * kind.nbytes : first * kind.nbytes + len(digests)]
    if digests == expected:
        return []
    size = kind.nbytes
    starts = range(0, len(digests), size)
    return [first + at // size for at in starts if digests[at : at + size] != expected[at : at + size]]
