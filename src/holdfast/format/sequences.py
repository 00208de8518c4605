"""Integer sequences (cut points, owners) in few bytes.

A regular sequence is stored as *affine blocks*, each block ``start + sum(index[k] * steps[k])`` over a small grid of
``counts`` in row-major order. Any other sequence is stored as its differences in *byte planes*: all lowest bytes, all
second bytes, and so on, as many as the largest difference needs. Regular sharding over any number of ranks costs one
block; random cuts cost about the entropy of the cuts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Annotated

import msgspec
import numpy as np

from holdfast.errors import CorruptError
from holdfast.geometry import Int64s
from holdfast.wording import count

#: A sequence of more blocks than this counts as irregular.
_MAX_BLOCKS = 64
#: Most numbers in one sequence; a reader refuses more before it allocates memory.
MAX_LENGTH = 1 << 27
#: Most blocks in one sequence and most axes of a block: each costs time to decode, and next to no bytes.
_MAX_READ_BLOCKS = 4096
_MAX_AXES = 32

_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``start + sum(index[k] * steps[k])`` for all index tuples below ``counts``, last axis fastest."""

    start: _Int64
    counts: tuple[_Int64, ...]
    steps: tuple[_Int64, ...]


class Affine(msgspec.Struct, frozen=True, tag="a", array_like=True, forbid_unknown_fields=True):
    """The concatenation of affine blocks."""

    blocks: tuple[Block, ...]


class DifferencePlanes(msgspec.Struct, frozen=True, tag="p", array_like=True, forbid_unknown_fields=True):
    """``first``, then ``length - 1`` differences, each ``base`` plus an unsigned number of ``width`` bytes.

    The manifest's blob holds the numbers as ``width`` planes of ``length - 1`` bytes, lowest bytes first. The planes
    of all sequences follow one another in the blob, in the order of the table of sequences.
    """

    length: _Int64
    first: _Int64
    base: _Int64
    width: _Int64

    @property
    def nbytes(self) -> int:
        """Number of bytes of the blob that belong to the sequence."""
        return (self.length - 1) * self.width


Sequence = Affine | DifferencePlanes


def encode(values: Int64s) -> tuple[Sequence, bytes]:
    """`values` as a sequence, and the bytes that it adds to the blob."""
    block = _affine(values)
    if block is not None:
        return Affine((block,)), b""
    steps = np.diff(values)
    if np.count_nonzero(np.diff(steps)) < 2 * _MAX_BLOCKS:
        blocks = tuple(_runs(values))
        if len(blocks) <= _MAX_BLOCKS:
            return Affine(blocks), b""
    base = int(steps.min())
    rest = (steps - base).astype("<u8")
    width = max(1, (int(rest.max()).bit_length() + 7) // 8)
    planes = np.ascontiguousarray(rest.view(np.uint8).reshape(-1, 8)[:, :width].T)
    return DifferencePlanes(len(values), int(values[0]), base, width), planes.tobytes()


def _affine(values: Int64s) -> Block | None:
    """The one block that stands for `values`, or None when it takes several."""
    counts: list[int] = []
    steps: list[int] = []
    rest = values
    while len(rest) > 1:
        differences = np.diff(rest)
        breaks = np.flatnonzero(differences != differences[0])
        run = int(breaks[0]) + 1 if len(breaks) else len(rest)
        if len(rest) % run or run == 1:
            return None
        rows = rest.reshape(-1, run)
        if (np.diff(rows, axis=1) != differences[0]).any():
            return None
        counts.insert(0, run)
        steps.insert(0, int(differences[0]))
        rest = rows[:, 0]
    if not len(values):
        return Block(0, (0,), (0,))
    return Block(int(values[0]), tuple(counts), tuple(steps))


def _runs(values: Int64s) -> Iterable[Block]:
    """Divide `values` into arithmetic progressions, greedily from left to right."""
    steps = np.diff(values)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    at = 0
    for change in changes:  # steps are equal from some point up to `change`
        if change < at:
            continue
        count = change - at + 1
        step = int(steps[at]) if count > 1 else 0
        yield Block(int(values[at]), (count,), (step,))
        at += count
        if at >= len(values):
            return
    if at < len(values):
        yield Block(int(values[at]), (1,), (0,))


def decode(sequence: Sequence, blob: memoryview) -> Int64s:
    """The integers of `sequence`; `blob` is exactly its part of the manifest's blob."""
    if isinstance(sequence, Affine):
        affine_length(sequence)
        blocks = [_expand(block) for block in sequence.blocks]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
    if not (1 <= sequence.length <= MAX_LENGTH and 1 <= sequence.width <= 8):
        raise _corrupt(f"a sequence of {sequence.length} numbers of {sequence.width} bytes")
    planes = np.frombuffer(blob, np.uint8).reshape(sequence.width, sequence.length - 1)
    words = np.zeros((sequence.length, 8), np.uint8)
    for plane in range(sequence.width):
        words[1:, plane] = planes[plane]
    values = words.view("<i8").reshape(-1).astype(np.int64, copy=False)
    values[1:] += sequence.base
    values[0] = sequence.first
    np.cumsum(values, out=values)
    return values


def affine_length(sequence: Sequence) -> int:
    """The count of numbers in affine blocks, checked before memory is allocated for them; 0 for byte planes.

    Raises `CorruptError` for more blocks, axes or numbers than a sequence may have.
    """
    if isinstance(sequence, DifferencePlanes):
        return 0
    if len(sequence.blocks) > _MAX_READ_BLOCKS:
        raise _corrupt(f"a sequence of {count(len(sequence.blocks), 'block')}")
    length = sum(map(_length, sequence.blocks))
    if length > MAX_LENGTH:
        raise _corrupt(f"a sequence of more than {MAX_LENGTH} numbers")
    return length


def _length(block: Block) -> int:
    if len(block.counts) != len(block.steps) or len(block.counts) > _MAX_AXES:
        raise _corrupt("a block with too many counts, or other numbers of counts and steps")
    if min(block.counts, default=1) < 1 and block.counts != (0,):
        raise _corrupt("a block with an impossible count")
    return prod(block.counts)


def _expand(block: Block) -> Int64s:
    values = np.full(1, block.start, np.int64)
    for length, step in zip(block.counts, block.steps, strict=True):
        if length == 1:
            continue
        values = (values[:, None] + np.arange(length, dtype=np.int64) * step).reshape(-1)
    return values


def _corrupt(what: str) -> CorruptError:
    return CorruptError(
        f"The manifest holds {what}.",
        code="corrupt.manifest",
        action="Load another checkpoint of the run, or another copy of this one.",
    )
