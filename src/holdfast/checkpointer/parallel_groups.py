"""The parallel groups of a rank, as the meshes of its DTensors tell them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from holdfast.plan.layout import Mesh, Placed
from holdfast.state.collect import LocalTensor


def parallel_groups(tensors: Iterable[LocalTensor], *, rank: int, world_size: int) -> tuple[str, ...]:
    """A label for each tensor, pipeline and data group of `rank`; ranks of one group have the same one. A group of all
    ranks of the job has none: it says nothing about who is close to whom."""
    specs = (each.layout.spec for each in tensors)
    meshes = {id(spec.mesh): spec.mesh for spec in specs if isinstance(spec, Placed)}
    groups = {group for mesh in meshes.values() for group in _groups(mesh, rank) if 1 < len(group) < world_size}
    return tuple(sorted(xxhash.xxh3_64_hexdigest(np.array(group, np.int64).tobytes()) for group in groups))


def _groups(mesh: Mesh, rank: int) -> Iterable[tuple[int, ...]]:
    """The ranks along each axis of a mesh through `rank`, and all ranks of the mesh, as a stage of a pipeline has."""
    if rank not in mesh.ranks:
        return
    ranks = np.array(mesh.ranks).reshape(mesh.shape)
    (own,) = np.argwhere(ranks == rank)
    for axis in range(ranks.ndim):
        line = ranks[tuple(slice(None) if each == axis else at for each, at in enumerate(own.tolist()))]
        yield tuple(sorted(line.tolist()))
    yield tuple(sorted(mesh.ranks))
