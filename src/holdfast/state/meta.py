"""Memory for tensors on the meta device, allocated once it is certain that a load fills all of it.

A tensor gets its memory in place: it stays the object that modules and optimizers hold, with its hooks and attributes.
Tensors that share a storage on the meta device share one afterwards.
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Iterable

import torch

from holdfast.errors import ConfigurationError, IncompatibleError, StateError
from holdfast.frameworks import NamedTensor
from holdfast.state.collect import Tied
from holdfast.state.differences import listing
from holdfast.state.local_placements import dtensor_type, is_dtensor, local_part
from holdfast.wording import count

# Offsets in a storage shift by multiples of this only, which keeps them aligned: no element is larger.
_ALIGNMENT = 16


class MetaTensors:
    """The tensors of one live state that are on the meta device and get memory.

    The memory is on `device`. By default a DTensor's memory is on the device of its mesh, and so is all other memory of
    a state with DTensors. In a state without DTensors it is where torch makes new tensors
    (``torch.set_default_device``).
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._mesh_device: torch.device | None = None
        self._found: list[Tied] = []

    def look_for_meshes(self, entries: Iterable[NamedTensor]) -> None:
        """Take the device for plain tensors from the meshes of the DTensors among `entries`."""
        if self._mesh_device is None:
            meshes = (entry.tensor.device_mesh for entry in entries if is_dtensor(entry.tensor))
            mesh = next(meshes, None)
            self._mesh_device = None if mesh is None else torch.device(mesh.device_type)

    def device_of(self, tensor: torch.Tensor | None) -> torch.device:
        """The device for a tensor's memory; None stands for any tensor that is not a DTensor.

        Raises `ConfigurationError`, code ``config.device``, when that is the meta device.
        """
        if self._device is not None:
            return self._device
        if tensor is not None and is_dtensor(tensor):
            return torch.device(tensor.device_mesh.device_type)
        # Not by `torch.get_default_device`, which raises in torch 2.6 once `torch.set_default_device(None)` was called.
        device = self._mesh_device or torch.empty(0).device
        if device.type == "meta":
            raise ConfigurationError(
                "Tensors to be loaded are on the meta device, and under torch.device('meta') new tensors are too.",
                code="config.device",
                action="Load outside of torch.device('meta'), or choose the device of their memory with device=.",
            )
        return device

    def add(self, tied: Tied) -> None:
        """Add tensors to which the next call of `allocate` gives memory. Raises `StateError` for one that cannot get
        memory."""
        for entry in tied.entries:
            check_alone(entry)
        self.device_of(tied.entries[0].tensor)
        self._found.append(tied)

    def allocate(self) -> None:
        """Give all added tensors uninitialised memory, once per storage."""
        with torch.no_grad():
            entries = [entry for tied in self._found for entry in tied.entries]
            storages: dict[int, dict[int, torch.Tensor]] = {}
            devices: dict[int, torch.device] = {}
            for entry in entries:
                part = local_part(entry.tensor)
                storage = part.untyped_storage()._cdata  # noqa: SLF001
                storages.setdefault(storage, {})[id(part)] = part
                devices[storage] = self.device_of(entry.tensor)
            for storage, parts in storages.items():
                for part, memory in zip(parts.values(), _memory([*parts.values()], devices[storage]), strict=True):
                    become(part, memory)
            for entry in entries:
                _become_dtensor(entry.tensor)
            for tied in self._found:
                # The tensor to be filled may be another view of the same memory.
                if tied.local.memory[0].is_meta:
                    become(tied.local.memory[0], local_part(tied.entries[0].tensor).detach())
        self._found.clear()


def check_alone(entry: NamedTensor) -> None:
    """Raise `StateError` for a tensor on the meta device that torch itself refers to, since it cannot get memory in
    place."""
    if entry.tensor._use_count() > 1:  # type: ignore[attr-defined]  # noqa: SLF001
        raise StateError(
            f"Tensor {entry.name!r} is on the meta device and cannot get memory in place: a view of it, an autograd "
            "graph or a wrapper such as DistributedDataParallel refers to it.",
            code="state.unsupported_tensor",
            action="Load before you wrap or run the module, or build it with memory.",
            tensor=entry.name,
        )


def become(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Give `tensor` the memory and properties of `fresh`; it stays the same object, with its own hooks and
    attributes."""
    # torch.utils.swap_tensors refuses tensors that are weakly referenced, as the weights of RNNs are, and swaps hooks
    # and attributes too.
    fresh.requires_grad_(tensor.requires_grad)
    hooks = {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    torch._C._swap_tensor_impl(tensor, fresh)  # noqa: SLF001
    tensor.__dict__.update(fresh.__dict__)  # of a subclass
    for slot in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]  # noqa: SLF001
        if hasattr(fresh, slot):
            setattr(tensor, slot, getattr(fresh, slot))
    for name, hook in hooks.items():
        if hook is not None:
            setattr(tensor, name, hook)


def check_fillable(names: Collection[str]) -> None:
    """Raise `IncompatibleError`, code ``incompatible.meta``, if there are `names` of tensors on the meta device that no
    checkpoint can hold."""
    if names:
        raise IncompatibleError(
            f"{count(len(names), 'tensor')} on the meta device cannot be loaded, because no checkpoint has buffers "
            f"that are not persistent, or plain attributes: {listing(sorted(names))}.",
            code="incompatible.meta",
            action=(
                "Compute them on a real device before the load (accelerate: init_empty_weights with "
                "include_buffers=False); or load with strict=False, compute them after it, and look at report.on_meta."
            ),
            tensor=min(names),
        )


def _memory(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Make tensors like `parts`, which share one storage: they share a storage on `device`, no larger than needed."""
    if len(parts) == 1:
        (part,) = parts
        return [torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)]
    spans = [_span(part) for part in parts]
    first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    nbytes = max(stop for _, stop in spans) - first
    storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    return [
        torch.empty(0, dtype=part.dtype, device=device).set_(
            storage, (start - first) // part.itemsize, part.shape, part.stride()
        )
        for part, (start, _) in zip(parts, spans, strict=True)
    ]


def _span(part: torch.Tensor) -> tuple[int, int]:
    """The range of bytes in its storage from a tensor's first element to its last."""
    start = int(part.storage_offset()) * part.itemsize
    if not part.numel():
        return start, start
    last = sum((extent - 1) * stride for extent, stride in zip(part.shape, part.stride(), strict=True))
    return start, start + (last + 1) * part.itemsize


def _become_dtensor(tensor: torch.Tensor) -> None:
    """Move a DTensor from the meta device to that of its local tensor, where that has got memory."""
    kind = dtensor_type()
    if kind is not None and is_dtensor(tensor) and tensor.is_meta:
        become(tensor, kind(tensor._local_tensor, tensor._spec, requires_grad=False))  # noqa: SLF001
