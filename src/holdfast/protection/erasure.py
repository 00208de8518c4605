"""The arithmetic of parity: XOR for one loss, P and Q of RAID-6 for two.

A *stripe* has `num_data` rows of data, numbered from 0, then the row P and, for two losses, the row Q. Shorter rows
count as if zeros followed them. With the rows D, and g = 2 in GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1,

    P = D[0] + D[1] + ...        Q = g^0 D[0] + g^1 D[1] + ...

and "+" is XOR. So each row is a sum of multiples of any `num_data` other rows: `coefficients` has the factors, and
`add_multiple` adds one multiple. Rows may be added in any order, by one process or by several in a chain.

The bits of one element of GF(2^8) do not lie in one byte. A row is cut into *strips* of `STRIP_NBYTES`, each strip into
eight *packets*, and bit number k of an element lies in packet k. Then a product with a constant is nothing but XORs of
packets, for which numpy uses the widest instructions without a table: a product costs two to four passes through the
cache, where a shift within bytes takes four passes for a factor of 2 alone. The last strip of a stripe is shorter: its
packets are an eighth of what is left, so the length of P and Q is a multiple of eight bytes (`parity_nbytes`).

numpy releases the interpreter during each XOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from holdfast.store.base import Bytes

#: Packets are so long that a call of numpy costs little, and a strip of a row and of the result lie in a core's cache.
STRIP_NBYTES: Final = 512 << 10
_NUM_PACKETS: Final = 8

#: x^8 + x^4 + x^3 + x^2 + 1. All powers of 2 are different, up to number 254.
_POLYNOMIAL: Final = 0x11D
_NUM_POWERS: Final = 255
#: The most rows of data that a stripe with P and Q can have: no two have the same factor in Q.
MAX_NUM_DATA: Final = _NUM_POWERS


def _powers() -> tuple[int, ...]:
    found = [1]
    while len(found) < _NUM_POWERS:
        double = found[-1] << 1
        found.append(double ^ _POLYNOMIAL if double > 0xFF else double)
    return tuple(found)


_POWERS: Final = _powers()
_LOGARITHMS: Final = {power: exponent for exponent, power in enumerate(_POWERS)}


def product(a: int, b: int) -> int:
    """The product of two elements of GF(2^8)."""
    return _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % _NUM_POWERS] if a and b else 0


def quotient(a: int, b: int) -> int:
    """The element whose product with `b`, which is not 0, is `a`."""
    return _POWERS[(_LOGARITHMS[a] - _LOGARITHMS[b]) % _NUM_POWERS] if a else 0


def parity_nbytes(nbytes: int) -> int:
    """The length of P and Q of a stripe whose longest row of data has `nbytes`."""
    return -(-nbytes // _NUM_PACKETS) * _NUM_PACKETS


@lru_cache(maxsize=4096)  # the stripes of all groups lose the same few combinations of rows
def coefficients(wanted: int, available: tuple[int, ...], num_data: int) -> tuple[int, ...]:
    """The factors of the `num_data` rows `available` in the sum that is row `wanted`."""
    assert len(set(available)) == len(available) == num_data <= MAX_NUM_DATA, (available, num_data)
    lost = sorted(set(range(num_data)).difference(available))
    parities = [_data_factors(row, num_data) for row in available if row >= num_data]
    target = _data_factors(wanted, num_data)
    # The factors of the parities: so that each lost row of data comes out as often as in the target.
    weights = _solution([[parity[row] for parity in parities] for row in lost], [target[row] for row in lost])
    of_parities = iter(weights)

    def factor(row: int) -> int:
        if row >= num_data:
            return next(of_parities)
        found = target[row]
        for weight, parity in zip(weights, parities, strict=True):
            found ^= product(weight, parity[row])
        return found

    return tuple(map(factor, available))


def _data_factors(row: int, num_data: int) -> Sequence[int]:
    """The factors of all rows of data in `row`."""
    if row < num_data:
        return [int(each == row) for each in range(num_data)]
    return [1] * num_data if row == num_data else _POWERS[:num_data]


def _solution(matrix: Sequence[Sequence[int]], right: Sequence[int]) -> tuple[int, ...]:
    """The solution of at most two equations, by Cramer's rule. (A sum and a difference are the same.)"""
    if not matrix:
        return ()
    if len(matrix) == 1:
        return (quotient(right[0], matrix[0][0]),)
    ((a, b), (c, d)), (x, y) = matrix, right
    determinant = product(a, d) ^ product(b, c)
    first, second = product(x, d) ^ product(b, y), product(a, y) ^ product(x, c)
    return quotient(first, determinant), quotient(second, determinant)


class _PacketRun(NamedTuple):
    """Packets of a row, from number `start`, which are added to as many of the result, from number `to`."""

    to: int
    start: int
    num_packets: int


@lru_cache(maxsize=256)
def _packet_runs(factor: int) -> tuple[_PacketRun, ...]:
    """The XORs of packets that add the product with `factor`. Packets that lie in one piece, in both, are one run."""
    columns = [product(factor, 1 << start) for start in range(_NUM_PACKETS)]
    pairs = {(to, start) for start, column in enumerate(columns) for to in range(_NUM_PACKETS) if column >> to & 1}
    runs = []
    for to, start in sorted(pairs):
        if (to - 1, start - 1) not in pairs:
            num_packets = next(n for n in range(1, _NUM_PACKETS + 1) if (to + n, start + n) not in pairs)
            runs.append(_PacketRun(to, start, num_packets))
    return tuple(runs)


def add_multiple(total: Bytes, row: Bytes, factor: int) -> None:
    """Add the product of `row` with `factor` to `total`, in place. `row` may be shorter: the rest of it is zeros.

    With a factor of 1, any range of a stripe will do. With others, `total` begins with a strip of the stripe, and
    ends with a strip or with the parity of the stripe.
    """
    assert row.size <= total.size, (row.size, total.size)
    if factor == 1:
        np.bitwise_xor(total[: row.size], row, out=total[: row.size])
        return
    runs = _packet_runs(factor)
    for begin in range(0, row.size, STRIP_NBYTES):
        strip = total[begin : begin + STRIP_NBYTES]
        _add_strip(strip, row[begin : begin + strip.size], runs)


def _add_strip(strip: Bytes, data: Bytes, runs: Sequence[_PacketRun]) -> None:
    packet, left = divmod(strip.size, _NUM_PACKETS)
    assert not left, strip.size
    for to, start, num_packets in runs:
        part = data[start * packet : (start + num_packets) * packet]
        into = strip[to * packet : to * packet + part.size]
        np.bitwise_xor(into, part, out=into)
