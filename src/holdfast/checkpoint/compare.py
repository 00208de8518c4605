"""Comparison of two checkpoints: names, shapes, dtypes, values, and every element of every tensor, in bounded memory.

The division of each side into files does not matter: the same boxes of both are read and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from holdfast.checkpoint.delivery import ArrayTargets
from holdfast.checkpoint.elements import Array, ElementDiff
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format import values as value_codec
from holdfast.format.dtypes import CARRIERS, DTYPES
from holdfast.format.values import Container, Leaf, Node
from holdfast.geometry import Box, Shape, flat_boxes
from holdfast.plan.load import ReadRequest

#: Most bytes of each side that are in memory at once.
_BATCH_NBYTES = 32 << 20


class TensorFacts(msgspec.Struct, frozen=True):
    """Dtype and global shape of a tensor."""

    dtype: str
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class TensorDifference(msgspec.Struct, frozen=True):
    """A tensor that both sides have and that differs.

    Where the shapes differ, no elements are compared and `num_differing` is None. `max_abs` and `num_not_finite` are
    those of `ElementDiff`.
    """

    name: str
    a: TensorFacts
    b: TensorFacts
    num_differing: int | None = None
    max_abs: float | int | None = None
    num_not_finite: int = 0


class ValueDifference(msgspec.Struct, frozen=True):
    """A value that differs, or that only one side has: then the other node is None."""

    name: str
    a: Node | None
    b: Node | None


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two checkpoints; all lists are sorted by name."""

    only_a: list[str]
    only_b: list[str]
    #: Number of tensors that both sides have, with those that differ.
    num_common: int
    tensors: list[TensorDifference]
    values: list[ValueDifference]

    @property
    def equal(self) -> bool:
        """Whether no name, shape, dtype, value or bit differs."""
        return not (self.only_a or self.only_b or self.tensors or self.values)


@dataclass(frozen=True)
class Pair:
    """A tensor that both sides have: its number, dtype and shape on each."""

    name: str
    one: int
    other: int
    a: TensorFacts
    b: TensorFacts

    @property
    def comparable(self) -> bool:
        """Whether the elements of both sides correspond.

        An element of the packed type is two numbers, so its shapes do not correspond to those of other types.
        """
        packed = "float4_e2m1fn_x2"
        return self.a.shape == self.b.shape and (
            self.a.dtype == self.b.dtype or packed not in (self.a.dtype, self.b.dtype)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the comparison reads, of both sides together."""
        return prod(self.a.shape) * sum(self.itemsizes) if self.comparable else 0

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Bytes per element on each side."""
        return DTYPES[self.a.dtype].itemsize, DTYPES[self.b.dtype].itemsize


def pairs(a: Checkpoint, b: Checkpoint, *, wanted: Callable[[str], bool] = lambda _: True) -> list[Pair]:
    """The tensors that both sides have under one `wanted` name, which may be an alias; sorted, tied tensors once."""
    found: dict[tuple[int, int], Pair] = {}
    of_a, of_b = _numbers(a), _numbers(b)
    for name in sorted(filter(wanted, of_a.keys() & of_b.keys())):
        one, other = of_a[name], of_b[name]
        described = (_describe(side, number) for side, number in ((a, one), (b, other)))
        found.setdefault((one, other), Pair(name, one, other, *described))
    return list(found.values())


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    progress: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare the tensors and values that have `wanted` names. Blocking, all bytes verified, memory bounded.

    Names are those of tensors and their aliases, so a tie that was saved as one tensor or as two is no difference.
    `progress` gets the bytes read of both sides since its last call.

    Raises:
        CorruptError: bytes that were read are damaged.
    """
    names_a, names_b = _numbers(a).keys(), _numbers(b).keys()
    common = pairs(a, b, wanted=wanted)
    return Comparison(
        only_a=sorted(filter(wanted, names_a - names_b)),
        only_b=sorted(filter(wanted, names_b - names_a)),
        num_common=len(common),
        tensors=list(_tensor_differences(a, b, common, progress)),
        values=[difference for difference in _value_differences(a, b) if wanted(difference.name)],
    )


def _numbers(checkpoint: Checkpoint) -> dict[str, int]:
    numbers = checkpoint.numbers
    return numbers | {alias: numbers[name] for alias, name in checkpoint.manifest.body.aliases.items()}


def _describe(checkpoint: Checkpoint, number: int) -> TensorFacts:
    return TensorFacts(checkpoint.manifest.dtype(number), checkpoint.manifest.shape(number))


def _tensor_differences(
    a: Checkpoint, b: Checkpoint, common: Sequence[Pair], progress: Callable[[int], None]
) -> Iterator[TensorDifference]:
    # In the order of a's files, so that each of their blocks is read once or twice.
    comparable = sorted((pair for pair in common if pair.comparable), key=lambda pair: int(a.files.position[pair.one]))
    tallies = {pair.name: ElementDiff(pair.a.dtype, pair.b.dtype) for pair in comparable}
    parts = (_ComparedPart(pair, tallies[pair.name], box) for pair in comparable for box in _boxes(pair))
    for batch in _batches(parts):
        _compare_batch(a, b, batch, progress)
    for pair in common:
        tally = tallies.get(pair.name)
        if tally is None:
            yield TensorDifference(pair.name, pair.a, pair.b)
        elif tally.num_differing or pair.a != pair.b:
            yield TensorDifference(pair.name, pair.a, pair.b, tally.num_differing, tally.max_abs, tally.num_not_finite)


@dataclass(frozen=True)
class _ComparedPart:
    """A box of a tensor that both sides have, and the tally that counts its differences."""

    pair: Pair
    tally: ElementDiff
    box: Box


def _boxes(pair: Pair) -> Iterator[Box]:
    """Boxes that make up a tensor, each of at most a batch's bytes on either side; whole rows where they fit."""
    shape = pair.a.shape
    numel, row, limit = prod(shape), prod(shape[1:]), _BATCH_NBYTES // max(pair.itemsizes)
    step = limit // row * row if 0 < row <= limit else limit
    for start in range(0, numel, step):
        for _, box in flat_boxes(shape, start, min(start + step, numel)):
            yield box


def _batches(parts: Iterator[_ComparedPart]) -> Iterator[list[_ComparedPart]]:
    """Consecutive parts, as many as fit a batch on both sides."""
    batch: list[_ComparedPart] = []
    held = 0
    for part in parts:
        nbytes = part.box.numel * max(part.pair.itemsizes)
        if batch and held + nbytes > _BATCH_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += nbytes
    if batch:
        yield batch


def _compare_batch(a: Checkpoint, b: Checkpoint, batch: list[_ComparedPart], progress: Callable[[int], None]) -> None:
    sides = (
        _read(a, [ReadRequest(part.pair.one, part.box) for part in batch]),
        _read(b, [ReadRequest(part.pair.other, part.box) for part in batch]),
    )
    for part, one, other in zip(batch, *sides, strict=True):
        part.tally.add(one, other)
        progress(one.nbytes + other.nbytes)


def _read(checkpoint: Checkpoint, wants: list[ReadRequest]) -> list[Array]:
    """Read the elements of each want, in row-major order, as carriers."""
    targets = ArrayTargets(
        [np.empty(want.box.size, CARRIERS[int(checkpoint.files.itemsizes[want.tensor])]) for want in wants]
    )
    checkpoint.read(wants, targets)
    return [array.reshape(-1) for array in targets.arrays]


def _value_differences(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDifference]:
    for path in sorted(a.nodes.keys() | b.nodes.keys()):
        one, other = a.nodes.get(path), b.nodes.get(path)
        if one is not None and other is not None:
            told = value_codec.same(one, other) or _told_by_children(one, other)
        else:
            told = all(node is None or _told_by_names(node) for node in (one, other))
        if not told:
            yield ValueDifference(path, one, other)


def _told_by_names(node: Node) -> bool:
    """Whether other differences report a node that only one side has: those of names below it, or of tensors."""
    bare = value_codec.bare(node)
    return not isinstance(bare, Leaf) and not (isinstance(bare, Container) and not list(value_codec.children(node)))


def _told_by_children(one: Node, other: Node) -> bool:
    """Whether two containers of one kind hold different names, which are reported as differences of their own."""
    kinds = [(type(bare), getattr(bare, "kind", None)) for bare in map(value_codec.bare, (one, other))]
    return kinds[0] == kinds[1] and set(value_codec.children(one)) != set(value_codec.children(other))
