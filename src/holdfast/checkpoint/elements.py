"""Comparison of the elements of two tensors, as bits and as numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

#: Most elements that are compared at once (bounds memory).
_AT_ONCE = 1 << 20

Array = npt.NDArray[Any]


@dataclass
class ElementDiff:
    """A tally of the elements of a tensor that differ on two sides, and by how much, among the elements added so far.

    Equal dtypes are compared bit for bit, others as numbers. `max_abs` is the largest absolute difference of two finite
    numbers: an int where both are integers, None while no such pair differs. `num_not_finite` counts the differing
    pairs in which a number is a nan or infinite.
    """

    dtype_a: str
    dtype_b: str
    num_differing: int = 0
    max_abs: float | int | None = None
    num_not_finite: int = 0

    def add(self, one: Array, other: Array) -> None:
        """Count the differences between equally many elements of both sides, given as carriers."""
        for start in range(0, len(one), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            self._add(one[part], other[part])

    def _add(self, one: Array, other: Array) -> None:
        if self.dtype_a == self.dtype_b:
            differ = _bits_differ(one, other)
            if not differ.any():
                return
            one, other = (_as_numbers(side[differ], self.dtype_a) for side in (one, other))
        else:
            one, other = _as_numbers(one, self.dtype_a), _as_numbers(other, self.dtype_b)
            differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
            one, other = one[differ], other[differ]
        self.num_differing += int(np.count_nonzero(differ))
        finite = np.isfinite(one) & np.isfinite(other)
        self.num_not_finite += len(finite) - int(np.count_nonzero(finite))
        largest = _largest_difference(one[finite], other[finite])
        if largest is not None and (self.max_abs is None or largest > self.max_abs):
            self.max_abs = largest


def _bits_differ(one: Array, other: Array) -> npt.NDArray[np.bool_]:
    """A mask of the elements that differ between two rows of carriers."""
    # The carrier of 16 bytes is complex, and equal complex numbers may differ in bits; all others are integers.
    words = np.uint64 if one.itemsize == 16 else one.dtype
    differ: npt.NDArray[np.bool_] = np.not_equal(one.view(words), other.view(words))
    return differ[0::2] | differ[1::2] if one.itemsize == 16 else differ


@np.errstate(invalid="ignore")  # the conversion of a signaling nan, which any bits may be
def _as_numbers(carriers: Array, dtype: str) -> Array:
    """The numbers in `carriers` as int64, uint64, float64 or complex128, whichever holds all of `dtype` exactly."""
    numbers: Array
    if dtype == "complex32":
        numbers = carriers.view(np.float16).astype(np.float32).view(np.complex64).astype(np.complex128)
        return numbers
    if dtype == "float4_e2m1fn_x2":
        import ml_dtypes

        halves: Array = np.stack([carriers & 15, carriers >> 4], axis=1).reshape(-1)
        numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return numbers
    if dtype.startswith(("bfloat16", "float8")):
        import ml_dtypes

        numbers = carriers.view(getattr(ml_dtypes, dtype)).astype(np.float64)
        return numbers
    numbers = carriers.view(np.dtype(dtype))
    wide = {"b": np.uint64, "u": np.uint64, "i": np.int64, "f": np.float64, "c": np.complex128}
    return numbers.astype(wide[numbers.dtype.kind])


def _largest_difference(one: Array, other: Array) -> float | int | None:
    """The largest absolute difference of two rows of finite numbers; exact for integers of one signedness."""
    if not len(one):
        return None
    if one.dtype == other.dtype and one.dtype.kind in "iu":
        # Subtraction of 64-bit words wraps around, so the greater minus the lesser is right in any case.
        low, high = np.minimum(one, other).view(np.uint64), np.maximum(one, other).view(np.uint64)
        return int((high - low).max())
    with np.errstate(over="ignore"):  # the difference of two huge numbers is infinite
        return float(np.abs(one - other).max())
