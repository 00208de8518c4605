"""The planes of a tensor as tensors of a state: plain ones, DTensors, or pieces, by where the tensor itself is.

A plane is divided where its tensor is, so a rank holds all planes of its elements. Its shape in a checkpoint depends on
the shape of the tensor alone, and not on how ranks divide it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch

from holdfast.errors import StateError
from holdfast.format.names import join, plane_component
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.planes import Cut, Plane, PlanedTensor, block_shape, blocks_fit
from holdfast.geometry import FlatRange, Shape
from holdfast.plan.layout import Placed, Replicate
from holdfast.plan.placements import local_boxes, local_shape
from holdfast.state.local_placements import PlacementReader, is_dtensor
from holdfast.state.registered_types import Registration, planes_of
from holdfast.wording import count

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

#: The specs of planes, by that of their tensor, with which they go. A later walk gives an unchanged plane the same one,
#: and so knows that it is unchanged.
_specs: WeakKeyDictionary[DTensorSpec, dict[tuple[Shape, torch.dtype, bool], DTensorSpec]] = WeakKeyDictionary()

#: One plane as an entry of a state.
PlanePart: TypeAlias = "NamedTensor | Piecewise"


def plane_name(name: str, plane: str) -> str:
    """The name of one plane of the tensor `name`."""
    return join(name, plane_component(plane))


def name_of_planes(plane: str) -> str:
    """The name of the tensor that the plane with this name belongs to."""
    return plane.rpartition("/")[0]


class PlaneDivider:
    """The planes of the tensors of one walk. It keeps the placements that it has read."""

    def __init__(self) -> None:
        self._reader = PlacementReader()
        self._checked: set[tuple[int, Shape, str]] = set()
        self._kept: list[Placed] = []

    def planes(self, entry: NamedTensor, registration: Registration) -> dict[str, PlanePart]:
        """The planes of a tensor by name, as entries of the state under their full names.

        Raises:
            StateError: a DTensor is cut within blocks (code ``state.blocks``), or its placements have no layout.
        """
        tensors, planed = planes_of(entry.name, entry.tensor, registration), registration.planed
        if planed is None:
            return {
                plane: NamedTensor(plane_name(entry.name, plane), tensor, entry.replicas)
                for plane, tensor in tensors.items()
            }
        if is_dtensor(entry.tensor):
            placed = self._placed(entry.name, entry.tensor, planed)
            return {key: _divided(entry, entry.tensor, placed, key, plane) for key, plane in planed.planes.items()}
        shape = tuple(entry.tensor.shape)
        return {
            key: NamedTensor(plane_name(entry.name, key), _whole(entry.name, plane, shape), entry.replicas)
            for key, plane in planed.planes.items()
        }

    def _placed(self, name: str, tensor: DTensor, planed: PlanedTensor) -> Placed:
        """The placements of a DTensor, all parts of which consist of the same planes."""
        described, shape = tensor._spec, tuple(tensor.shape)  # noqa: SLF001
        placed = self._reader.spec(described, shape, tuple(tensor._local_tensor.shape), name)  # noqa: SLF001
        key = (id(placed), shape, planed.name)
        if key not in self._checked:
            for rank in placed.mesh.ranks:
                numel = prod(local_shape(placed, shape, rank))
                if not blocks_fit(planed, numel):
                    raise _unfit(
                        name,
                        f"rank {rank} holds {count(numel, 'element')} of it, which are not quantised: they are fewer "
                        f"than {planed.min_numel:,}, or not whole blocks",
                    )
            self._checked.add(key)
            self._kept.append(placed)  # so that no other gets its id
        return placed


def _whole(name: str, plane: Plane, shape: Shape) -> torch.Tensor:
    """A plane of an undivided tensor in its shape in checkpoints."""
    if not isinstance(plane.cut, int) or plane.cut == 1:
        return plane.tensor
    _, found = _blocks(name, shape, plane.cut)
    return plane.tensor.view(found)


def _blocks(name: str, shape: Shape, block: int) -> tuple[int, Shape]:
    found = block_shape(shape, block)
    if found is None:
        raise _unfit(name, f"its shape {list(shape)} does not consist of blocks of {block:,} elements")
    return found


def _divided(entry: NamedTensor, tensor: DTensor, placed: Placed, key: str, plane: Plane) -> PlanePart:
    """One plane of a DTensor, divided where that is."""
    shape, local = tuple(tensor.shape), tuple(tensor._local_tensor.shape)  # noqa: SLF001
    sizes = zip(placed.placements, placed.mesh.shape, strict=True)
    axes = {each.axis for each, size in sizes if not isinstance(each, Replicate) and size > 1}
    name, part = plane_name(entry.name, key), plane.tensor
    cut: Cut = plane.cut
    if not axes:
        whole = _whole(entry.name, plane, shape)
        return NamedTensor(name, _dtensor(tensor, whole, tuple(whole.shape), is_copied=True), entry.replicas)
    if cut == "whole":
        return NamedTensor(name, _dtensor(tensor, part, tuple(part.shape), is_copied=True), entry.replicas)
    if cut == "rows":
        if not axes <= {0} or part.shape[:1] != local[:1]:
            raise _unfit(entry.name, f"its plane {key!r} of shape {list(part.shape)} is not divided by its rows")
        return NamedTensor(name, _dtensor(tensor, part, (shape[0], *part.shape[1:])), entry.replicas)
    if cut == 1:
        return NamedTensor(name, _dtensor(tensor, part, shape), entry.replicas)
    axis, found = _blocks(entry.name, shape, cut)
    if all(each < axis for each in axes) or (axis == len(shape) - 1 and local[axis] % cut == 0):
        here = (*local[:axis], prod(local[axis:]) // cut)
        return NamedTensor(name, _dtensor(tensor, part.view(here), found), entry.replicas)
    if axes == {0}:
        return _ranges(entry.name, tensor, placed, plane, found)
    raise _unfit(entry.name, f"axis {max(axes)} is cut within blocks of {cut:,} elements")


def _ranges(name: str, tensor: DTensor, placed: Placed, plane: Plane, found: Shape) -> Piecewise:
    """A plane of blocks that go over rows, in flat ranges: the rows that this rank holds are whole blocks."""
    block, shape = cast("int", plane.cut), tuple(tensor.shape)
    row, pieces = prod(shape[1:]), []
    for box, local in local_boxes(placed, shape, tensor.device_mesh.get_rank()):
        start, stop, first = (rows * row for rows in (box.start[0], box.stop[0], local.start[0]))
        if start % block or stop % block or first % block:
            raise _unfit(name, f"rows {box.start[0]} to {box.stop[0]} are not whole blocks of {block:,} elements")
        part = FlatRange(start // block, stop // block)
        pieces.append((part, plane.tensor.view(-1)[first // block : first // block + part.numel]))
    return Piecewise(found, pieces, dtype=plane.tensor.dtype)


def _dtensor(tensor: DTensor, part: torch.Tensor, shape: Shape, *, is_copied: bool = False) -> DTensor:
    """A DTensor of `shape` over `part`, placed as `tensor` is, or with copies on all ranks."""
    described = tensor._spec  # noqa: SLF001
    known = _specs.setdefault(described, {})
    key = (shape, part.dtype, is_copied)
    found = known.get(key)
    if found is None or found.mesh is not described.mesh:
        found = known[key] = _spec(described, part.dtype, shape, is_copied=is_copied)
    return type(tensor)(part, found, requires_grad=False)


def _spec(described: DTensorSpec, dtype: torch.dtype, shape: Shape, *, is_copied: bool) -> DTensorSpec:
    from torch.distributed.tensor import Replicate as Copied

    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    meta = type(described.tensor_meta)(torch.Size(shape), stride, dtype)  # type: ignore[misc]
    if is_copied:
        return type(described)(described.mesh, (Copied(),) * len(described.placements), tensor_meta=meta)
    return replace(described, tensor_meta=meta)


def _unfit(name: str, problem: str) -> StateError:
    return StateError(
        f"Tensor {name!r} is quantised in blocks that do not fit the parts of the ranks: {problem}.",
        code="state.blocks",
        action="Divide the tensor between blocks, such as by rows over fewer ranks; or use an optimizer without "
        "quantised state for this parameter.",
        tensor=name,
    )
