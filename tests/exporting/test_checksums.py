"""A checksum of joined bytes follows from those of the pieces."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from holdfast.exporting.checksums import joined_checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_joined_bytes_is_that_of_all_bytes(first: bytes, second: bytes) -> None:
    assert joined_checksum(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_piece_counts_with_its_length() -> None:
    first, second = b"abc", bytes(range(256)) * 40_000
    assert joined_checksum(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
