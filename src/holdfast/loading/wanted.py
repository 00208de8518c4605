"""The parts of a checkpoint that one rank needs, and the memory that each of them fills.

They follow from the binding and the checkpoint alone, and do not depend on how the bytes are moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.checkpoint.data_files import DataFiles
from holdfast.geometry import Box
from holdfast.mapping.parts import NO_AXIS, Parts
from holdfast.plan.load import ReadRequest, resharded
from holdfast.state.binding import Binding
from holdfast.state.local_memory import LocalPieces
from holdfast.state.match import BoundTensor
from holdfast.state.targets import MemoryTargets


@dataclass
class Wanted:
    """The needs of one rank: boxes of stored tensors (`wants`), and in `targets` the memory of each, by its number.

    `zeros` is memory to set to 0, because nothing is stored for it. `cast` are the tensors whose stored dtype differs
    from the live one. `owners` maps numbers of wants to the names of the tensors that a mapping made of them.
    """

    wants: list[ReadRequest] = field(default_factory=list)
    targets: MemoryTargets = field(default_factory=MemoryTargets)
    zeros: list[torch.Tensor] = field(default_factory=list)
    cast: set[str] = field(default_factory=set)
    owners: dict[int, str] = field(default_factory=dict)

    def resharded(self, files: DataFiles) -> set[str]:
        """The tensors of which this rank needs a box that is not exactly one stored piece."""
        names, wants = files.manifest.body.names, self.wants
        return {self.owners.get(number) or names[wants[number].tensor] for number in resharded(files.files, wants)}


def wanted(files: DataFiles, binding: Binding, parts: Mapping[str, Parts], rank: int) -> Wanted:
    """The needs of all targets of the binding on `rank`. `parts` has, for the tensors that a mapping changed, the
    stored parts that they are made of."""
    found, pieces = Wanted(), LocalPieces(rank)
    wants, targets, numbers, body = found.wants, found.targets, files.numbers, files.manifest.body
    dtypes = list(map(body.dtype_table.__getitem__, body.dtypes))
    for target in binding.targets:
        local = target.local
        if parts and target.source in parts:
            for box, view in pieces.of(local.layout, local.memory):
                _add_parts(found, files, target, parts[target.source], box, view)
            continue
        number = numbers[target.source]
        dtype = None if dtypes[number] == local.layout.dtype else _cast_from(dtypes[number], target, found)
        part = pieces.whole_part(local.layout)
        if part is not None:  # as of nearly all tensors
            wants.append(ReadRequest(number, part))
            targets.add_whole(local, dtype)
            continue
        for box, view in pieces.of(local.layout, local.memory):
            wants.append(ReadRequest(number, box))
            targets.add(view, dtype)
    return found


def _add_parts(
    found: Wanted, files: DataFiles, target: BoundTensor, parts: Parts, box: Box, view: torch.Tensor
) -> None:
    """Add the stored parts of which a held box of a tensor is made."""
    for part in parts:
        met = part.meet(box)
        if met is None:
            continue
        common, of_stored = met
        held = view[common.relative_to(box.start).slices()]
        if part.source is not None:
            number = files.numbers[part.source]
            found.owners[len(found.wants)] = target.source
            found.wants.append(ReadRequest(number, of_stored))
            stored = files.manifest.dtype(number)
            dtype = None if stored == target.local.layout.dtype else _cast_from(stored, target, found)
            found.targets.add(_as_stored(held, part.axes), dtype)
        elif part.zero:
            found.zeros.append(held)


def _cast_from(stored: str, target: BoundTensor, found: Wanted) -> torch.dtype:
    """The dtype that a target's elements are cast from; notes that they are."""
    found.cast.add(target.source)
    dtype: torch.dtype = getattr(torch, stored)
    return dtype


def _as_stored(view: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """A view of a logical tensor's memory with the axes of the stored one, whose axis ``j`` is axis ``axes[j]`` of
    `view`."""
    if axes == tuple(range(view.dim())):
        return view
    used = [axis for axis in axes if axis != NO_AXIS]
    unused = [axis for axis in range(view.dim()) if axis not in used]  # of one element each
    seen = view.permute(used + unused)
    for _ in unused:
        seen = seen[..., 0]
    for position, axis in enumerate(axes):
        if axis == NO_AXIS:
            seen = seen.unsqueeze(position)
    return seen
