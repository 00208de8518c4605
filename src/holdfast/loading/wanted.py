"""What one rank needs of a checkpoint, and the memory that each part of it goes to.

A function of the binding and the checkpoint alone: however the bytes are moved, these boxes go to these places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.checkpoint.reading import Checkpoint
from holdfast.geometry import Box
from holdfast.mapping.parts import NO_AXIS, Parts
from holdfast.plan.load import ReadRequest, resharded
from holdfast.state.binding import Binding
from holdfast.state.match import BoundTensor
from holdfast.state.memory import LocalPieces
from holdfast.state.targets import MemoryTargets


@dataclass
class Wanted:
    """Boxes of stored tensors, and the memory of each in `targets`, under the number of the want.

    `zeros` is memory that is to be 0, because nothing is stored for it. `cast` are the tensors that are stored in
    another dtype than they are held in. `owners` names the tensors that a mapping changed, by the wants' numbers.
    """

    wants: list[ReadRequest] = field(default_factory=list)
    targets: MemoryTargets = field(default_factory=MemoryTargets)
    zeros: list[torch.Tensor] = field(default_factory=list)
    cast: set[str] = field(default_factory=set)
    owners: dict[int, str] = field(default_factory=dict)

    def resharded(self, checkpoint: Checkpoint) -> set[str]:
        """The tensors of which some part is not just one stored piece."""
        names, wants = checkpoint.manifest.body.names, self.wants
        return {self.owners.get(number) or names[wants[number].tensor] for number in resharded(checkpoint.files, wants)}


def wanted(checkpoint: Checkpoint, binding: Binding, parts: Mapping[str, Parts], rank: int) -> Wanted:
    """What all targets of the binding need on `rank`. `parts` has what tensors are made of that a mapping changed."""
    found, pieces = Wanted(), LocalPieces(rank)
    wants, targets, numbers, dtype_of = found.wants, found.targets, checkpoint.numbers, checkpoint.manifest.dtype
    for target in binding.targets:
        local = target.local
        boxes = pieces.of(local.layout, local.memory)
        if target.source in parts:
            for box, view in boxes:
                _add_parts(found, checkpoint, target, parts[target.source], box, view)
            continue
        number = numbers[target.source]
        dtype = _cast_from(dtype_of(number), target, found)
        for box, view in boxes:
            wants.append(ReadRequest(number, box))
            targets.add(view, dtype)
    return found


def _add_parts(
    found: Wanted, checkpoint: Checkpoint, target: BoundTensor, parts: Parts, box: Box, view: torch.Tensor
) -> None:
    """Add what a held box of a tensor is made of."""
    for part in parts:
        met = part.meet(box)
        if met is None:
            continue
        common, of_stored = met
        held = view[common.relative_to(box.start).slices()]
        if part.source is not None:
            number = checkpoint.numbers[part.source]
            found.owners[len(found.wants)] = target.source
            found.wants.append(ReadRequest(number, of_stored))
            dtype = _cast_from(checkpoint.manifest.dtype(number), target, found)
            found.targets.add(_as_stored(held, part.axes), dtype)
        elif part.zero:
            found.zeros.append(held)


def _cast_from(stored: str, target: BoundTensor, found: Wanted) -> torch.dtype | None:
    """The dtype that a target's elements are cast from; None where they are not."""
    if stored == target.local.layout.dtype:
        return None
    found.cast.add(target.source)
    dtype: torch.dtype = getattr(torch, stored)
    return dtype


def _as_stored(view: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Memory of a logical tensor with the axes of the stored one: its axis ``j`` is ``axes[j]``."""
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
