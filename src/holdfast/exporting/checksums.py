"""CRC-32 of bytes from the checksums of their pieces, so that several threads may compute it.

Polynomials over GF(2) of a degree below 32 are words whose highest bit is the coefficient of 1, as in zlib.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
_X8: Final = 1 << 23


def joined_checksum(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of bytes with checksum `first` and `nbytes` bytes behind them with checksum `second`."""
    return _product(_power(nbytes), first) ^ second


@lru_cache(maxsize=64)
def _power(nbytes: int) -> int:
    """x to the power of the bits of `nbytes` bytes, modulo the polynomial."""
    result, square = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(one: int, other: int) -> int:
    """The product of two polynomials, modulo the polynomial."""
    result = 0
    for position in range(31, -1, -1):
        if one >> position & 1:
            result ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result
