"""Layouts: for each logical tensor, the parts that ranks hold. Rank-free wherever the sharding is regular.

Ranks that shard alike produce the same *body*, byte for byte: tensors with their specs, where a spec names a
mesh and placements and never "my part". So each rank sends a 16-byte digest, and one rank per distinct body
sends the body. Only specs that no rule describes (flat ranges, free boxes) add columns of the rank's own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.geometry import Box, FlatRange, Shape


class Shard(msgspec.Struct, frozen=True, tag="shard", array_like=True):
    """The placement of a tensor that is divided along `axis` over one mesh axis, as ``torch.chunk`` does."""

    axis: int


class StridedShard(msgspec.Struct, frozen=True, tag="strided", array_like=True):
    """The placement of a tensor that is divided along `axis` into `split_factor` chunks first.

    Then each chunk is divided over one mesh axis (FSDP2 over TP).
    """

    axis: int
    split_factor: int


class Replicate(msgspec.Struct, frozen=True, tag="replicate", array_like=True):
    """The placement of a tensor that all ranks of one mesh axis hold alike."""


Placement = Shard | StridedShard | Replicate


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A mesh of ranks: its shape, and the global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Placed(msgspec.Struct, frozen=True):
    """The spec of a tensor held as a DTensor: one placement per mesh axis."""

    mesh: Mesh
    placements: tuple[Placement, ...]


#: The declarations of a rank about plain tensors that several ranks hold under one name.
#: ``split``: they are replicated, so holders share the writing; ``first``: the lowest holder's copy is saved (DDP's
#: buffers differ legitimately); ``compare``: nothing is declared, so a save compares the copies before it drops one.
Replicas = Literal["split", "first", "compare"]
#: The same for equal pieces that several ranks hold.
PieceReplicas = Literal["split", "compare"]


class Whole(msgspec.Struct, frozen=True):
    """The spec of a tensor that every rank that names it holds whole."""

    replicas: Replicas


class Pieces(msgspec.Struct, frozen=True):
    """The spec of a tensor in parts that only this rank knows, each with its own local memory: flat ranges, or boxes.

    A rank that holds no part says nothing about the kind of the others' parts. A rank describes tensors with equal
    parts (a parameter's optimizer slots, tensors cut alike) to the planner once. Where several ranks hold equal parts,
    they ``split`` the writing if that is declared; else a save ``compare``s the parts and one of the ranks writes them.
    """

    parts: tuple[Box | FlatRange, ...]
    replicas: PieceReplicas = "compare"

    @staticmethod
    def ranges(*parts: FlatRange, replicas: PieceReplicas = "compare") -> Pieces:
        """A spec of flat ranges."""
        return Pieces(parts, replicas)

    @staticmethod
    def boxes(*parts: Box, replicas: PieceReplicas = "compare") -> Pieces:
        """A spec of boxes."""
        return Pieces(parts, replicas)


Spec = Placed | Whole | Pieces


class TensorLayout(msgspec.Struct, frozen=True, gc=False):
    """One logical tensor and how this rank's job holds it. `dtype` is a key of ``format.dtypes.DTYPES``."""

    name: str
    dtype: str
    shape: Shape
    spec: Spec
