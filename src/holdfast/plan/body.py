"""What ranks tell each other about their layouts.

The *body* is rank-free: equal for all ranks that shard alike. `Pieces` are the exception: the body only says how many
kinds of division there are, and each rank adds *columns* with its own parts. Tensors that share one `Pieces` object
share one slot of the columns, so thousands of tensors that are cut alike cost one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import xxhash

from holdfast.format import sequences
from holdfast.geometry import Box, FlatRange, Int64s, Shape
from holdfast.plan.layout import Mesh, Pieces, Placed, Placement, Replicas, TensorLayout, Whole


class MeshWire(msgspec.Struct, frozen=True, array_like=True):
    """A mesh, its ranks as affine blocks where they are regular."""

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
    """`Pieces` in slot `slot` of the rank's columns; `num_axes` is 0 for flat ranges."""

    slot: int
    num_axes: int


SpecWire = PlacedWire | WholeWire | PiecesWire


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The rank-free part of a layout: tensor ``i`` is ``names[i]``, of the dtype, shape and spec with those indexes."""

    names: tuple[str, ...]
    dtype_table: tuple[str, ...]
    dtypes: tuple[int, ...]
    shape_table: tuple[Shape, ...]
    shapes: tuple[int, ...]
    meshes: tuple[MeshWire, ...]
    spec_table: tuple[SpecWire, ...]
    specs: tuple[int, ...]
    aliases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RankLayout:
    """One rank's layout as it is sent: `digest` of the encoded body, the body itself, and the rank's columns.

    Columns are little-endian int64: for each slot the number of parts, then all parts one after another, each
    ``start, stop`` (flat) or ``start..., size...`` (box).
    """

    digest: bytes
    body: bytes
    columns: bytes

    @staticmethod
    def of(tensors: Sequence[TensorLayout], aliases: dict[str, str]) -> RankLayout:
        """The layout of `tensors`, which are sorted by name."""
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
        )
        encoded = msgspec.msgpack.encode(body)
        return RankLayout(xxhash.xxh3_128_digest(encoded), encoded, interner.columns())


class _Interner:
    """Tables of distinct dtypes, shapes, meshes and specs."""

    def __init__(self) -> None:
        self.dtypes: dict[str, int] = {}
        self.shapes: dict[Shape, int] = {}
        self.meshes: dict[Mesh, int] = {}
        self.specs: dict[SpecWire, int] = {}
        self._slots: dict[int, PiecesWire] = {}
        self._parts: list[Pieces] = []
        self._mesh_ids: dict[int, int] = {}

    def spec(self, tensor: TensorLayout) -> int:
        wire = self._wire(tensor)
        return self.specs.setdefault(wire, len(self.specs))

    def _wire(self, tensor: TensorLayout) -> SpecWire:
        spec = tensor.spec
        if isinstance(spec, Placed):
            mesh = self._mesh_ids.get(id(spec.mesh))  # hashing thousands of ranks per tensor would dominate
            if mesh is None:
                mesh = self._mesh_ids[id(spec.mesh)] = self.meshes.setdefault(spec.mesh, len(self.meshes))
            return PlacedWire(mesh, spec.placements)
        if isinstance(spec, Whole):
            return WholeWire(spec.replicas)
        slot = self._slots.get(id(spec))
        if slot is None:
            if not tensor.shape:  # one element, no axes: as a flat range
                spec = Pieces.ranges(*(FlatRange(0, 1) for _ in spec.parts))
            num_axes = 0 if spec.flat else len(tensor.shape)
            slot = self._slots[id(tensor.spec)] = PiecesWire(len(self._parts), num_axes)
            self._parts.append(spec)
        return slot

    def columns(self) -> bytes:
        if not self._parts:
            return b""
        numbers = [len(spec.parts) for spec in self._parts]
        for spec in self._parts:
            for part in spec.parts:
                numbers.extend((*part.start, *part.size) if isinstance(part, Box) else part)
        return np.asarray(numbers, "<i8").tobytes()


class DecodedBody:
    """A body as the planner reads it."""

    def __init__(self, encoded: bytes) -> None:
        self.body = msgspec.msgpack.decode(encoded, type=Body)

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

    @cached_property
    def slot_axes(self) -> list[int]:
        """Per slot of the columns, the number of axes of its boxes; 0 for flat ranges."""
        slots = {spec.slot: spec.num_axes for spec in self.body.spec_table if isinstance(spec, PiecesWire)}
        return [slots[slot] for slot in range(len(slots))]


@dataclass(frozen=True)
class SlotParts:
    """All parts of one slot, from all ranks of a body: ``numbers`` is ``[parts, 2]`` or ``[parts, 2 * axes]``."""

    holders: Int64s
    numbers: Int64s


def gather_slots(slot_axes: Sequence[int], ranks: Int64s, columns: Sequence[bytes]) -> list[SlotParts]:
    """The columns of many ranks, slot by slot. Vectorised: 10 million parts take seconds, not minutes."""
    num_slots = len(slot_axes)
    if not num_slots:
        return []
    flat = np.frombuffer(b"".join(columns), "<i8").astype(np.int64, copy=False)
    lengths = np.asarray([len(column) // 8 for column in columns], np.int64)
    heads = np.cumsum(lengths) - lengths
    counts = flat[heads[:, None] + np.arange(num_slots)]
    widths = np.asarray([2 * axes or 2 for axes in slot_axes], np.int64)
    taken = counts * widths
    starts = heads[:, None] + num_slots + np.cumsum(taken, axis=1) - taken
    slots = []
    for slot in range(num_slots):
        count, width = counts[:, slot], int(widths[slot])
        first = np.repeat(starts[:, slot] - np.cumsum(count * width) + count * width, count)
        rows = first + np.arange(len(first)) * width
        slots.append(SlotParts(np.repeat(ranks, count), flat[rows[:, None] + np.arange(width)]))
    return slots


def _mesh_wire(mesh: Mesh) -> MeshWire:
    sequence, blob = sequences.encode(np.asarray(mesh.ranks, np.int64))
    return MeshWire(mesh.shape, sequence, blob)
