"""The messages in which ranks describe their layouts to the planner.

The *body* is rank-free: equal for all ranks that shard alike. For tensors held in `Pieces` it only says that they are,
and each rank adds *columns* with its own parts. Tensors with equal parts share one slot of the columns, so thousands
of tensors that are cut alike cost one entry. Each rank also sends its own map from tensors to slots, because a rank
that holds nothing of many tensors shares other slots than the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.format import sequences
from holdfast.geometry import Box, FlatRange, Int64s, Shape
from holdfast.plan.layout import (
    Mesh,
    PieceReplicas,
    Pieces,
    Placed,
    Placement,
    Replicas,
    Spec,
    TensorLayout,
    Whole,
)

#: In a slot's head, the number of axes is above this bit, the number of parts below it.
_AXES_BIT = 32


class MeshWire(msgspec.Struct, frozen=True, array_like=True):
    """`Mesh` with its ranks encoded as an integer sequence: affine blocks where they are regular."""

    shape: Shape
    ranks: sequences.Sequence
    blob: bytes


class PlacedWire(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """`Placed` with its mesh as an index."""

    mesh: int
    placements: tuple[Placement, ...]


class WholeWire(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """`Whole`."""

    replicas: Replicas


class PiecesWire(msgspec.Struct, frozen=True, array_like=True, tag="pieces"):
    """`Pieces`, whose parts are in the rank's columns under number `number`."""

    number: int
    replicas: PieceReplicas


SpecWire = PlacedWire | WholeWire | PiecesWire


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The rank-free part of a layout. Tensor ``i`` is ``names[i]``, with indexes of its dtype, shape and spec. `still`
    are the numbers of the tensors that training leaves alone, as far as the rank knows."""

    names: tuple[str, ...]
    dtype_table: tuple[str, ...]
    dtypes: tuple[int, ...]
    shape_table: tuple[Shape, ...]
    shapes: tuple[int, ...]
    meshes: tuple[MeshWire, ...]
    spec_table: tuple[SpecWire, ...]
    specs: tuple[int, ...]
    aliases: tuple[tuple[str, str], ...]
    still: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankLayout:
    """One rank's layout in its encoded form: the body, its `digest`, and the rank's columns.

    Columns are little-endian int64; they are empty without `Pieces`. They hold, in this order:

    * the number of slots, and the number of words of the map;
    * the map: the slot of each number of a `PiecesWire`, as differences in int32, deflated and padded;
    * a head per slot: its number of parts and, from bit 32 on, its number of axes (0: flat ranges);
    * all parts one after another, each ``start, stop`` (flat) or ``start..., size...`` (box).
    """

    digest: bytes
    body: bytes
    columns: bytes

    @staticmethod
    def of(
        tensors: Sequence[TensorLayout], aliases: dict[str, str], still: Collection[str] = frozenset()
    ) -> RankLayout:
        """The layout of `tensors`, which must be sorted by name. `still` are the names of those that training leaves
        alone."""
        interner = _Interner()
        specs = [interner.spec(tensor) for tensor in tensors]
        dtypes = [interner.dtypes.setdefault(tensor.dtype, len(interner.dtypes)) for tensor in tensors]
        shapes = [interner.shapes.setdefault(tensor.shape, len(interner.shapes)) for tensor in tensors]
        body = Body(
            names=tuple(tensor.name for tensor in tensors),
            dtype_table=tuple(interner.dtypes),
            dtypes=tuple(dtypes),
            shape_table=tuple(interner.shapes),
            shapes=tuple(shapes),
            meshes=tuple(_mesh_wire(mesh) for mesh in interner.meshes),
            spec_table=tuple(interner.specs),
            specs=tuple(specs),
            aliases=tuple(sorted(aliases.items())),
            still=tuple(number for number, tensor in enumerate(tensors) if tensor.name in still) if still else (),
        )
        encoded = msgspec.msgpack.encode(body)
        return RankLayout(xxhash.xxh3_128_digest(encoded), encoded, interner.columns())


class _Interner:
    """The tables of distinct dtypes, shapes, meshes, specs and slots of a layout under construction."""

    def __init__(self) -> None:
        self.dtypes: dict[str, int] = {}
        self.shapes: dict[Shape, int] = {}
        self.meshes: dict[Mesh, int] = {}
        self.specs: dict[SpecWire, int] = {}
        self._slots: dict[tuple[Box | FlatRange, ...], int] = {}
        self._slot_of: list[int] = []
        #: Numbers of specs by ``id``: hashing a mesh of thousands of ranks for each tensor would take most of the time.
        self._known: dict[int, int] = {}

    def spec(self, tensor: TensorLayout) -> int:
        spec = tensor.spec
        number = self._known.get(id(spec))
        if number is None:
            wire = self._wire(spec, tensor.shape)
            number = self.specs.setdefault(wire, len(self.specs))
            if not isinstance(spec, Pieces):  # each tensor in pieces gets a number of its own
                self._known[id(spec)] = number
        return number

    def _wire(self, spec: Spec, shape: Shape) -> SpecWire:
        if isinstance(spec, Placed):
            return PlacedWire(self.meshes.setdefault(spec.mesh, len(self.meshes)), spec.placements)
        if isinstance(spec, Whole):
            return WholeWire(spec.replicas)
        self._slot_of.append(self._slots.setdefault(_described(spec, shape), len(self._slots)))
        return PiecesWire(len(self._slot_of) - 1, spec.replicas)

    def columns(self) -> bytes:
        if not self._slot_of:
            return b""
        packed = zlib.compress(np.diff(np.asarray(self._slot_of, "<i4"), prepend=np.int32(0)).tobytes(), 1)
        packed += bytes(-len(packed) % 8)
        heads = [len(parts) + (_num_axes(parts) << _AXES_BIT) for parts in self._slots]
        numbers: list[int] = []
        for parts in self._slots:
            for part in parts:
                numbers.extend((*part.start, *part.size) if isinstance(part, Box) else part)
        first = np.asarray([len(heads), len(packed) // 8], "<i8")
        return first.tobytes() + packed + np.asarray([*heads, *numbers], "<i8").tobytes()


def _described(spec: Pieces, shape: Shape) -> tuple[Box | FlatRange, ...]:
    """The parts in the form of the columns: a tensor without axes has flat ranges."""
    return spec.parts if shape else tuple(FlatRange(0, part.numel) for part in spec.parts)


def _num_axes(parts: Sequence[Box | FlatRange]) -> int:
    """The number of axes of boxes; 0 for flat ranges, and where there are no parts."""
    return len(parts[0].size) if parts and isinstance(parts[0], Box) else 0


class DecodedBody:
    """A decoded body, for the planner."""

    def __init__(self, encoded: bytes) -> None:
        self.body = decode_msgpack(encoded, Body)

    @cached_property
    def meshes(self) -> list[Mesh]:
        """The body's meshes."""
        return [
            Mesh(wire.shape, tuple(sequences.decode(wire.ranks, memoryview(wire.blob)).tolist()))
            for wire in self.body.meshes
        ]

    def placed(self, wire: PlacedWire) -> Placed:
        """The spec that `wire` stands for."""
        return Placed(self.meshes[wire.mesh], wire.placements)


@dataclass(frozen=True)
class HeldParts:
    """Parts of one tensor that ranks hold, all of one kind.

    `numbers` are flat ranges ``[parts, 2]`` where `num_axes` is 0, else boxes ``[parts, 2 * num_axes]``; `holders` has
    the rank that holds each part.
    """

    num_axes: int
    holders: Int64s
    numbers: Int64s


class RankColumns:
    """The columns of all ranks that share a body. Vectorised: 10 million parts take seconds, not minutes."""

    def __init__(self, ranks: Int64s, columns: Sequence[bytes]) -> None:
        self._ranks = ranks
        self._flat = np.frombuffer(b"".join(columns), "<i8").astype(np.int64, copy=False)
        lengths = np.asarray([len(column) // 8 for column in columns], np.int64)
        first = np.cumsum(lengths) - lengths
        num_slots, num_words = self._flat[first], self._flat[first + 1]
        heads = first + 2 + num_words
        #: The row of each rank's first slot among all slots.
        self._rows = np.cumsum(num_slots) - num_slots
        at = np.repeat(heads - self._rows, num_slots) + np.arange(int(num_slots.sum()))
        self._heads = self._flat[at]
        taken = _widths(self._heads >> _AXES_BIT) * (self._heads & (1 << _AXES_BIT) - 1)
        before = np.cumsum(taken) - taken
        #: Where each slot's parts begin.
        self._starts = np.repeat(heads + num_slots - before[self._rows], num_slots) + before
        packed: dict[bytes, int] = {}
        self._map_of = np.asarray(
            [
                packed.setdefault(column[16 : 16 + 8 * words], len(packed))
                for column, words in zip(columns, num_words.tolist(), strict=True)
            ]
        )
        self._maps = np.stack([_unpacked(data) for data in packed])

    def alike(self) -> list[int]:
        """For each number of a `PiecesWire`, the lowest number that has the same parts on every rank."""
        first: dict[bytes, int] = {}
        return [first.setdefault(column.tobytes(), number) for number, column in enumerate(self._maps.T)]

    def parts(self, number: int) -> list[HeldParts]:
        """The parts that the ranks hold of the tensors of `number`, by kind; ranks without parts do not appear."""
        slots = self._rows + self._maps[self._map_of, number]
        heads = self._heads[slots]
        counts, axes = heads & (1 << _AXES_BIT) - 1, heads >> _AXES_BIT
        found = []
        for num_axes in np.unique(axes[counts > 0]).tolist():
            mine = np.flatnonzero((axes == num_axes) & (counts > 0))
            count, width = counts[mine], 2 * num_axes or 2
            first = np.repeat(self._starts[slots[mine]] - (np.cumsum(count) - count) * width, count)
            rows = first + np.arange(len(first)) * width
            numbers = self._flat[rows[:, None] + np.arange(width)]
            found.append(HeldParts(num_axes, np.repeat(self._ranks[mine], count), numbers))
        return found


def _widths(axes: Int64s) -> Int64s:
    """The count of numbers that describe one part."""
    return np.where(axes > 0, 2 * axes, 2)


def _unpacked(data: bytes) -> Int64s:
    inflated = zlib.decompressobj().decompress(data)  # ignores the padding
    return np.cumsum(np.frombuffer(inflated, "<i4"), dtype=np.int64)


def _mesh_wire(mesh: Mesh) -> MeshWire:
    sequence, blob = sequences.encode(np.asarray(mesh.ranks, np.int64))
    return MeshWire(mesh.shape, sequence, blob)
