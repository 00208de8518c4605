"""What torch calls things and what a layout calls them: dtypes, meshes, placements, torch's own values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from holdfast.errors import CorruptError, StateError
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import TorchValue
from holdfast.geometry import Shape
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

#: The names of the dtypes that can be stored.
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def dtensor_type() -> type[DTensor] | None:
    """The type of DTensors. Does not import ``torch.distributed.tensor`` (half a second): without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    return type(tensor) is dtensor_type()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: of a DTensor its local tensor, else the tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001


class PlacementReader:
    """Translates DTensors' meshes and placements. Equal ones share one object; lives as long as one walk of a state."""

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[DeviceMesh, Mesh]] = {}
        self._specs: dict[tuple[int, tuple[TorchPlacement, ...]], Placed] = {}

    def spec(self, described: DTensorSpec, name: str) -> Placed:
        """How the DTensor `name` is placed. Raises `StateError`, code ``state.placement``, for placements without a
        layout."""
        mesh, placements = described.mesh, described.placements
        for _, axes in getattr(described, "shard_order", None) or ():
            if len(axes) > 1 and list(axes) != sorted(axes):
                raise _refused(f"the shard order {described.shard_order}", name)
        # The mesh is kept alive by `_meshes`, so its id stays its own.
        key = (id(mesh), placements)
        spec = self._specs.get(key)
        if spec is None:
            spec = Placed(self._mesh(mesh), tuple(_placement(placement, name) for placement in placements))
            self._specs[key] = spec
        return spec

    def _mesh(self, mesh: DeviceMesh) -> Mesh:
        if id(mesh) not in self._meshes:
            ranks = mesh.mesh
            self._meshes[id(mesh)] = (mesh, Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist())))
        return self._meshes[id(mesh)][1]


def same_placement(tensor: torch.Tensor, like: torch.Tensor | None) -> bool:
    """Whether `tensor` is divided among ranks as `like` is; None divides nothing in particular."""
    if like is None or not is_dtensor(like):
        return like is None or not is_dtensor(tensor)
    return is_dtensor(tensor) and tensor.device_mesh == like.device_mesh and tensor.placements == like.placements


def empty(dtype: str, shape: Shape, *, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for a tensor: placed and strided like `like` (of the same shape), else plain."""
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
    """The inverse of `torch_value`; a Generator comes back as a new one in the saved state."""
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
    """What ``Generator.set_state`` takes."""
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
        f"Tensor {name!r} has {what}, which says nothing about where its elements are.",
        code="state.placement",
        action="Redistribute it to Shard and Replicate placements.",
        tensor=name,
    )


def _malformed(value: TorchValue) -> CorruptError:
    return CorruptError(
        f"{value.text!r:.80} is no torch {value.kind}.",
        code="corrupt.values",
        action="Use another copy or an older checkpoint.",
    )
