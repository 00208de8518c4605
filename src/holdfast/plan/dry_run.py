"""The dry run of a load on another world, from the manifest and a layout alone. Pure, and for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.format.container import Files
from holdfast.format.patterns import Globs, unmatched
from holdfast.geometry import Int64s, Shape
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import as_stored, castable
from holdfast.mapping.whole_planes import chosen_in_part
from holdfast.plan.blocks import NodeReading, count_blocks
from holdfast.plan.exchange import Bandwidths, Seconds
from holdfast.plan.layout_rules import HeldTensor, Layout, assign, parameter_of
from holdfast.plan.requirements import ReadRequirements


class CastTensor(msgspec.Struct, frozen=True):
    """A tensor that the job holds in another dtype than the stored one."""

    name: str
    stored: str
    held: str


@dataclass(frozen=True)
class Matching:
    """The comparison of a checkpoint with a layout: the tensors that a load fills, and those that would make it fail.

    `held` says how the ranks hold each loaded tensor. `unexpected` are stored tensors that no rank holds, `refused`
    those whose dtype may not be cast to the one that the ranks hold. `partly_kept` are tensors with elements that are
    not stored and keep their live values.
    """

    held: Mapping[str, HeldTensor]
    unexpected: tuple[str, ...]
    cast: tuple[CastTensor, ...]
    refused: tuple[CastTensor, ...]
    partly_kept: tuple[str, ...]

    @property
    def loads(self) -> bool:
        """Whether names and dtypes would let a load succeed."""
        return not (self.unexpected or self.refused)


@dataclass(frozen=True)
class Traffic:
    """The bytes of a load, as stored, without values: those that each rank needs, and those that nodes read for it."""

    needed: Int64s
    reading: NodeReading


def match(layout: Layout, table: CheckpointTable, *, select: Globs | None, cast: Globs | bool) -> Matching:
    """Compare names and dtypes of a checkpoint with those of a job that holds its tensors in `layout`.

    `select` and `cast` are as in a load; an optimizer is selected as a whole. Raises `IncompatibleError` for rules, as
    `assign` does, for globs that match nothing (``incompatible.select``, ``incompatible.cast``), and for those that
    take a part of a tensor's planes (``incompatible.planes``).
    """
    # A tensor that a load only compares with another one is read by the ranks that hold that other one.
    compared = {other: name for name, others in table.equal.items() for other in others}
    tensors = {name: stored for name, stored in table.stored.items() if name not in compared}
    placed = assign(layout, tensors, table.aliases)
    tied = {name: [name] for name in tensors}
    for alias, name in table.aliases.items():
        tied[name].append(alias)
    held: dict[str, HeldTensor] = {}
    unexpected: list[str] = []
    casts: dict[bool, list[CastTensor]] = {True: [], False: []}
    chosen: list[str] = []
    for name, stored in tensors.items():
        owner = parameter_of(name, tensors, table.aliases)
        if select is not None and not _any_in(select, tied[name] if owner is None else owner[:1]):
            continue
        chosen.append(name)
        may_cast = cast if isinstance(cast, bool) else _any_in(cast, tied[name])
        if name not in placed:
            unexpected.append(name)
            continue
        held[name] = placed[name]
        dtype = placed[name].dtype or stored.dtype
        if dtype != stored.dtype:
            casts[may_cast and castable(stored.dtype, dtype)].append(CastTensor(name, stored.dtype, dtype))
    if (in_part := chosen_in_part(chosen, tensors)) is not None:
        raise in_part
    for option, globs in (("select", select), ("cast", cast)):
        if isinstance(globs, Globs) and globs.unmatched():
            action = "Use globs that match names after the mapping; an optimizer has one name."
            raise unmatched(option, globs.unmatched(), where="the checkpoint", action=action)
    held |= {other: held[name] for other, name in compared.items() if name in held}
    kept = tuple(sorted(table.partly_kept() & held.keys()))
    return Matching(held, tuple(unexpected), tuple(casts[True]), tuple(casts[False]), kept)


def traffic(
    files: Files,
    table: CheckpointTable,
    held: Mapping[str, HeldTensor],
    mesh_shape: Shape,
    node_of: Int64s,
    *,
    request_nbytes: int = 0,
) -> Traffic:
    """The traffic of a load of tensors `held` on a mesh of all ranks, where rank ``r`` is on node ``node_of[r]``.

    A node that reads for itself does so by requests of up to `request_nbytes`, where that is more than nodes use that
    read for each other. Ranks that share a node may divide a request between them, which is not counted.
    """
    requirements = ReadRequirements(files, mesh_shape, node_of)
    for name, how in held.items():
        stored, parts = table.stored[name], table.parts.get(name)
        for part in as_stored(name, stored).parts if parts is None else parts:
            if part.source is not None:
                requirements.add(how, stored.shape, part, part.source)
    reading = count_blocks(files, requirements.wants(), requirements.members(), apart_nbytes=request_nbytes)
    return Traffic(requirements.needed(), reading)


def seconds(reading: NodeReading, bandwidths: Bandwidths) -> Seconds:
    """The least time that reading takes, for each of the two ways."""
    return bandwidths.seconds(reading.nodes.tolist(), int(reading.once.nbytes.sum()))


def even_nodes(world_size: int, num_nodes: int) -> Int64s:
    """The node of each rank, where consecutive ranks share a node and node sizes differ by at most one."""
    return np.arange(world_size) * num_nodes // world_size


def _any_in(globs: Globs, names: Sequence[str]) -> bool:
    return True in [name in globs for name in names]  # no short cut: `globs` must note every glob that matches
