"""The translation of torch's dtypes, meshes, placements and own values into those of a layout, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from holdfast.errors import CorruptError, StateError
from holdfast.format.values import TorchValue
from holdfast.geometry import Shape
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard, StridedShard
from holdfast.plan.placements import division_order, local_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard


def dtensor_type() -> type[DTensor] | None:
    """The type of DTensors; None while ``torch.distributed.tensor`` is not imported, since then there are none. Does
    not import it, which would take half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    return type(tensor) is dtensor_type()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local tensor of a DTensor, else the tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The `local_part` of each of many tensors."""
    dtensor = dtensor_type()
    if dtensor not in set(map(type, tensors)):
        return tensors
    return [each._local_tensor if type(each) is dtensor else each for each in tensors]  # noqa: SLF001


def specs_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[DTensorSpec | None]:
    """The spec of each tensor; None for those that are not DTensors."""
    dtensor = dtensor_type()
    if dtensor not in set(map(type, tensors)):
        return [None] * len(tensors)
    return [each._spec if type(each) is dtensor else None for each in tensors]  # noqa: SLF001


class PlacementReader:
    """A translator of DTensors' meshes and placements for one walk of a state. Equal ones share one object.

    A translated mesh has its axes in the order in which they divide the tensor, and the ranks along an axis in the
    order of their process group: these orders decide which rank holds which part
    (``docs/design/012-what-ranks-really-hold.md``).
    """

    def __init__(self) -> None:
        self._meshes: dict[tuple[int, tuple[int, ...], frozenset[int]], tuple[DeviceMesh, Mesh]] = {}
        self._specs: dict[tuple[object, ...], Placed] = {}
        #: The key and spec of the last tensor: mostly those of the next one too, and keys are slow to hash.
        self._last: tuple[tuple[object, ...], Placed] | None = None
        self._shapes: dict[tuple[int, Shape], Shape] = {}

    def spec(self, described: DTensorSpec, shape: Shape, held: Shape, name: str) -> Placed:
        """The spec of the DTensor `name` of `shape`, whose local part on this rank has the shape `held`.

        Raises:
            StateError: the placements have no layout (code ``state.placement``), or imply another shape than `held`
                (``state.local_shape``).
        """
        # `_meshes` keeps the mesh alive, so that no other mesh gets its id. Types are part of the key: a shard may
        # equal one of a subclass that divides in another way (in torch 2.6, also a strided one).
        placements = described.placements
        # The type alone for a mesh of one axis, because a tuple takes longer.
        kinds = type(placements[0]) if len(placements) == 1 else tuple(map(type, placements))
        key = (id(described.mesh), kinds, placements, getattr(described, "shard_order", None))
        if self._last is None or self._last[0] != key:
            self._last = (key, self._specs.get(key) or self._translated(described, key, name))
        spec = self._last[1]
        expected = self._shapes.get((id(spec), shape)) or self._expected(spec, shape, described.mesh.get_rank())
        if held != expected and (0 not in held or 0 not in expected):
            raise _misshapen(described, held, expected, name)
        return spec

    def _translated(self, described: DTensorSpec, key: tuple[object, ...], name: str) -> Placed:
        mesh, order = described.mesh, getattr(described, "shard_order", None)
        translated = tuple(_placement(placement, name) for placement in described.placements)
        axes = _axes(tuple(mesh.shape), translated, order)
        spec = self._specs[key] = Placed(self._mesh(mesh, translated, axes, name), _in_order(translated, axes))
        return spec

    def _expected(self, spec: Placed, shape: Shape, rank: int) -> Shape:
        """The shape of the part on `rank` of a tensor of `shape` with this spec."""
        expected = local_shape(spec, shape, rank) if rank in spec.mesh.ranks else (0,)
        self._shapes[id(spec), shape] = expected
        return expected

    def _mesh(self, mesh: DeviceMesh, placements: Sequence[Placement], axes: tuple[int, ...] | None, name: str) -> Mesh:
        shape = tuple(mesh.shape)
        dividing = frozenset(
            axis for axis, item in enumerate(placements) if not isinstance(item, Replicate) and shape[axis] > 1
        )
        order = tuple(range(len(placements))) if axes is None else axes
        key = (id(mesh), order, dividing)
        if key not in self._meshes:
            ranks = _in_group_order(mesh, sorted(dividing), name).transpose(order)
            self._meshes[key] = (mesh, Mesh(ranks.shape, tuple(ranks.reshape(-1).tolist())))
        return self._meshes[key][1]


def _axes(
    mesh_shape: Shape, placements: tuple[Placement, ...], shard_order: ShardOrder | None
) -> tuple[int, ...] | None:
    """The mesh axes in the order in which they divide the tensor. None where that is the order of the mesh, or where
    strided shards describe the division themselves."""
    if any(isinstance(placement, StridedShard) for placement in placements):
        # Where torch gives a shard order beside strided shards, these are of flattened axes and do not mean an order.
        return None if shard_order else division_order(mesh_shape, placements)
    dividing = [axis for _, axes in shard_order or () for axis in axes]
    if all(list(axes) == sorted(axes) for _, axes in shard_order or ()):
        return None
    return (*dividing, *(axis for axis in range(len(placements)) if axis not in dividing))


def _in_order(placements: tuple[Placement, ...], axes: tuple[int, ...] | None) -> tuple[Placement, ...]:
    """The placements in the order of the mesh axes `axes`. Strided shards become plain ones, because they only
    expressed that order."""
    if axes is None:
        return placements
    turned = (placements[axis] for axis in axes)
    return tuple(Shard(each.axis) if isinstance(each, StridedShard) else each for each in turned)


def _in_group_order(mesh: DeviceMesh, axes: Sequence[int], name: str) -> npt.NDArray[np.int64]:
    """The ranks of a mesh; along `axes`, in the order of the process groups of these axes.

    torch divides a tensor by a rank's number in the group, and it sorts the ranks of the groups that it makes. So where
    a mesh has its ranks in another order, its coordinates do not say which rank holds which part.
    """
    ranks: npt.NDArray[np.int64] = mesh.mesh.numpy().astype(np.int64)
    is_sorted = _groups_are_sorted(mesh, ranks, axes, name)
    if not is_sorted:
        return ranks
    places = [
        ranks.argsort(axis).argsort(axis) if axis in axes else each for axis, each in enumerate(np.indices(ranks.shape))
    ]
    turned = np.full_like(ranks, -1)
    turned[tuple(places)] = ranks
    if (turned < 0).any():
        raise _refused(f"a mesh of ranks {ranks.tolist()}, in which torch gives several ranks the same part", name)
    return turned


def _groups_are_sorted(mesh: DeviceMesh, ranks: npt.NDArray[np.int64], axes: Sequence[int], name: str) -> bool:
    """Whether the groups along `axes` have their ranks in ascending order, as those do that torch makes. False where
    they have the order of the mesh, as groups can that torch was given. This rank knows its own groups only."""
    own = mesh.get_coordinate()
    if own is None:
        return True
    lines = [np.moveaxis(ranks, axis, -1)[(*own[:axis], *own[axis + 1 :])].tolist() for axis in axes]
    groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes]
    if groups == [sorted(line) for line in lines]:
        return True
    if groups == lines:
        return False
    raise _refused(f"a mesh of ranks {lines} over process groups of ranks {groups}", name)


def same_placement(tensor: torch.Tensor, like: torch.Tensor | None) -> bool:
    """Whether `tensor` is divided among ranks as `like` is, if that is a tensor of the same shape."""
    return same_placements([tensor], [like])[0]


def same_placements(tensors: Sequence[torch.Tensor], likes: Sequence[torch.Tensor | None]) -> list[bool]:
    """`same_placement` for each of many tensors."""
    rows = zip(tensors, likes, specs_of(tensors), specs_of(likes), strict=True)
    return [
        mine is other
        or like is None
        or (
            mine is not None
            and other is not None
            and (mine.mesh is other.mesh or mine.mesh == other.mesh)
            and mine.placements == other.placements
        )
        or tensor.shape != like.shape
        for tensor, like, mine, other in rows
    ]


def empty(dtype: str, shape: Shape, *, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor with uninitialised memory: placed and strided like `like`, which has the same shape, else plain."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if like is None:
        return torch.empty(shape, dtype=torch_dtype, device=device)
    with torch.no_grad():
        if not is_dtensor(like):
            return torch.empty_like(like, dtype=torch_dtype, device=device)
        local = torch.empty_like(like.to_local(), dtype=torch_dtype, device=device)
        return type(like).from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def torch_value(item: object) -> TorchValue | None:
    """A dtype, device, Size or Generator as a value; None for anything else."""
    if isinstance(item, torch.dtype):
        return TorchValue("dtype", str(item).removeprefix("torch."))
    if isinstance(item, torch.device):
        return TorchValue("device", str(item))
    if isinstance(item, torch.Size):
        return TorchValue("size", ",".join(map(str, item)))
    if isinstance(item, torch.Generator):
        return TorchValue("generator", str(item.device), item.get_state().numpy().tobytes())
    return None


def revive(value: TorchValue) -> object:
    """Make the object from which `torch_value` made `value`; for a Generator, a new one in the saved state."""
    if value.kind == "generator":
        generator = torch.Generator(device=value.text)
        generator.set_state(generator_state(value))
        return generator
    if value.kind == "dtype":
        dtype = getattr(torch, value.text, None)
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _malformed(value)
    try:
        if value.kind == "device":
            return torch.device(value.text)
        return torch.Size([int(extent) for extent in value.text.split(",") if value.text])
    except (RuntimeError, ValueError) as error:
        raise _malformed(value) from error


def generator_state(value: TorchValue) -> torch.Tensor:
    """The saved state of a Generator, as ``Generator.set_state`` takes it."""
    return torch.frombuffer(bytearray(value.data), dtype=torch.uint8)


def _placement(placement: TorchPlacement, name: str) -> Placement:
    types = sys.modules["torch.distributed.tensor.placement_types"]
    # Exact types: a subclass divides a tensor in its own way.
    if type(placement) is types.Replicate:
        return Replicate()
    if type(placement) is types.Shard:
        return Shard(cast("TorchShard", placement).dim)
    if type(placement) is types._StridedShard:  # noqa: SLF001
        strided = cast("TorchStridedShard", placement)
        return StridedShard(strided.dim, int(strided.split_factor))
    raise _refused(f"the placement {placement} ({type(placement).__name__})", name)


def _refused(what: str, name: str) -> StateError:
    return StateError(
        f"Tensor {name!r} has {what}, which does not determine where its elements are.",
        code="state.placement",
        action="Redistribute the tensor to Shard and Replicate placements.",
        tensor=name,
    )


def _misshapen(described: DTensorSpec, held: Shape, expected: Shape, name: str) -> StateError:
    rank = described.mesh.get_rank()
    return StateError(
        f"Rank {rank} holds {list(held)} of tensor {name!r} of shape {list(described.shape)}, but by its "
        f"placements {described.placements} it should hold {list(expected)}.",
        code="state.local_shape",
        action="Divide the tensor with fully_shard, parallelize_module or distribute_tensor, or describe the parts "
        "with holdfast.Piecewise.",
        tensor=name,
        rank=rank,
    )


def _malformed(value: TorchValue) -> CorruptError:
    return CorruptError(
        f"{value.text!r:.80} is not a torch {value.kind}.",
        code="corrupt.values",
        action="Use another copy or an older checkpoint.",
    )
