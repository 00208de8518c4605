"""A stateless permutation: the place of each number follows from a key alone, so nothing is shuffled, kept or stored.

The numbers below `length` are arranged in `rows` rows and `columns` columns, ``rows * columns >= length``, as nearly
square as possible. A Feistel network over rows and columns (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002) permutes the cells in `ROUNDS` rounds. In each, one coordinate is moved, cyclically, by a hash of the other one.
Cells beyond `length` are walked over: such a cell is permuted again until the result is below `length`; there are fewer
than ``columns`` of them, so this is rare.

Checkpoints hold positions in these permutations, so the functions of this module never change: the golden values in
``tests/data/test_permutation.py`` hold for all versions. All arithmetic is of 64 bits, unsigned, and wraps.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]

#: Fewer leave small lengths visibly uneven; more change nothing that can be measured.
ROUNDS: Final = 8
#: Rows and columns fit in 32 bits, so that a product of two 32-bit numbers scales a hash to them.
MAX_LENGTH: Final = 1 << 62

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def hashed(numbers: Numbers) -> Numbers:
    """The hash of each number: the finaliser of SplitMix64 (Steele and others, 2014), a bijection of 64 bits."""
    mixed = numbers + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def keys_of(seed: int, numbers: Numbers) -> Numbers:
    """A key for each of `numbers`, such as one for each epoch. `seed` is any whole number of 64 bits."""
    (start,) = hashed(np.array([seed % (1 << 64)], dtype=np.uint64))
    return hashed(hashed(numbers) ^ start)


def permuted(numbers: Numbers, length: int, keys: Numbers) -> Numbers:
    """The places of `numbers` in permutations of the numbers below `length`, by one key, or one for each number.

    Takes a time that depends on how many numbers are asked for, and not on `length` (at most `MAX_LENGTH`).
    """
    assert 0 < length <= MAX_LENGTH
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    found = _permuted_once(numbers, rows, columns, keys)
    while (beyond := np.flatnonzero(found >= np.uint64(length))).size:
        found[beyond] = _permuted_once(found[beyond], rows, columns, keys if keys.size == 1 else keys[beyond])
    return found


def _permuted_once(cells: Numbers, rows: int, columns: int, keys: Numbers) -> Numbers:
    row, column = np.divmod(cells, np.uint64(columns))
    for number in range(ROUNDS):
        keys = keys + _GOLDEN
        if number % 2:
            row = _moved(row, column, rows, keys)
        else:
            column = _moved(column, row, columns, keys)
    return row * np.uint64(columns) + column


def _moved(moving: Numbers, other: Numbers, size: int, keys: Numbers) -> Numbers:
    """One coordinate, below `size`, moved cyclically by a hash of the other one and the key."""
    by = hashed(other ^ keys)
    by >>= np.uint64(32)
    by *= np.uint64(size)
    by >>= np.uint64(32)
    by += moving
    return np.where(by >= np.uint64(size), by - np.uint64(size), by)
