"""A stateless permutation: the place of each number follows from a key alone, so nothing is shuffled, kept or stored.

Design note 018 is the normative text. Checkpoints hold positions in these permutations, so the functions of this module
never change: the golden values in ``tests/data/test_permutation.py`` hold for all versions. All arithmetic is of 64
bits, unsigned, and wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]

#: With 12, some orders of 5 or 6 numbers are more frequent than others; more than 16 change nothing that can be
#: measured.
ROUNDS: Final = 16
#: Rows and columns fit in 32 bits, so that a product of two 32-bit numbers scales a hash to them.
MAX_LENGTH: Final = 1 << 62

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


class Grids(NamedTuple):
    """The lengths that numbers are permuted below, and for each a grid of rows and columns with as many cells or a few
    more. Either one entry for all numbers, or one for each."""

    lengths: Numbers
    rows: Numbers
    columns: Numbers

    @staticmethod
    def of(lengths: Sequence[int]) -> Grids:
        """The grids for `lengths`, which are positive and at most `MAX_LENGTH`."""
        assert all(0 < length <= MAX_LENGTH for length in lengths)
        rows = [isqrt(length - 1) + 1 for length in lengths]
        columns = [-(-length // rows) for length, rows in zip(lengths, rows, strict=True)]
        return Grids(*(np.array(each, dtype=np.uint64) for each in (lengths, rows, columns)))

    def at(self, indices: npt.NDArray[np.intp]) -> Grids:
        """The grids with these indices."""
        return Grids(self.lengths[indices], self.rows[indices], self.columns[indices])


def hashed(numbers: Numbers) -> Numbers:
    """The hash of each number: the finaliser of SplitMix64 (Steele and others, 2014), a bijection of 64 bits."""
    mixed = numbers + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def keys_of(seeds: Numbers, numbers: Numbers) -> Numbers:
    """A key for each of `numbers`, such as those of epochs, by one seed, or one for each."""
    return hashed(hashed(numbers) ^ hashed(seeds))


def samples_at(places: Numbers, seeds: Numbers, grids: Grids) -> Numbers:
    """The samples at `places` of endless orders, by one seed and length, or one for each place.

    An order has as many samples in each epoch as its length: each number below it, in the permutation whose key follows
    from the seed and the number of the epoch.
    """
    epochs, numbers = np.divmod(places, grids.lengths)
    return permuted(numbers, grids, keys_of(seeds, epochs))


def permuted(numbers: Numbers, grids: Grids, keys: Numbers) -> Numbers:
    """The places of `numbers` in permutations of the numbers below their lengths, by one key, or one for each number.

    Takes a time that depends on how many numbers are asked for, and not on the lengths.
    """
    found = _permuted_once(numbers, grids, keys)
    while (beyond := np.flatnonzero(found >= grids.lengths)).size:
        there = grids if grids.lengths.size == 1 else grids.at(beyond)
        found[beyond] = _permuted_once(found[beyond], there, keys if keys.size == 1 else keys[beyond])
    return found


def _permuted_once(cells: Numbers, grids: Grids, keys: Numbers) -> Numbers:
    row, column = np.divmod(cells, grids.columns)
    for number in range(ROUNDS):
        keys = keys + _GOLDEN
        if number % 2:
            row = _moved(row, column, grids.rows, keys)
        else:
            column = _moved(column, row, grids.columns, keys)
    return row * grids.columns + column


def _moved(moving: Numbers, other: Numbers, sizes: Numbers, keys: Numbers) -> Numbers:
    """One coordinate, below `sizes`, moved cyclically by a hash of the other one and the key."""
    by = hashed(other ^ keys)
    by >>= np.uint64(32)
    by *= sizes
    by >>= np.uint64(32)
    by += moving
    return np.where(by >= sizes, by - sizes, by)
