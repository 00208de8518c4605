"""The check that targets of a load share no memory: shared memory would silently hold whichever was loaded last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.errors import StateError
from holdfast.state.local_memory import AddressedMemory
from holdfast.state.match import BoundTensor

#: Limit of numpy's search for a common byte of two strided views, in its own unit; beyond it, they count as
#: overlapping.
_MAX_WORK = 1 << 20

_Addresses = npt.NDArray[np.uint64]

_address_of = attrgetter("address")
_device_of = attrgetter("device")
_nbytes_of = attrgetter("nbytes")


class TargetMemory(NamedTuple):
    """The local memory of all `targets`, part by part in their order, with the address of each part; and its size in
    bytes, if all parts are contiguous and on one device."""

    targets: Sequence[BoundTensor]
    parts: Sequence[torch.Tensor]
    addresses: _Addresses
    sizes: _Addresses | None

    @staticmethod
    def of(targets: Sequence[BoundTensor]) -> TargetMemory:
        """Look up the addresses of all parts."""
        held = [target.local for target in targets]
        parts = [part for local in held for part in local.memory]
        addresses, sizes = list(map(_address_of, held)), list(map(_nbytes_of, held))
        if not all(addresses):
            addresses, sizes = list(map(torch.Tensor.data_ptr, parts)), list(map(_nbytes_of, parts))
            if not all(map(torch.Tensor.is_contiguous, parts)) or len(set(map(_device_of, parts))) > 1:
                return TargetMemory(targets, parts, np.asarray(addresses, np.uint64), None)
        return TargetMemory(targets, parts, np.asarray(addresses, np.uint64), np.asarray(sizes, np.uint64))


class MemorySpan(NamedTuple):
    """A tensor's span of memory on its device: from its first byte to the one after its last."""

    device: str
    start: int
    stop: int

    @staticmethod
    def of(view: torch.Tensor) -> MemorySpan:
        """The span of a tensor with elements."""
        last = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.stride(), strict=True))
        start = view.data_ptr()
        return MemorySpan(str(view.device), start, start + (last + 1) * view.element_size())


class _HeldMemory(NamedTuple):
    span: MemorySpan
    target: BoundTensor
    #: The number of the part of the target.
    number: int
    view: torch.Tensor


def check_disjoint(memory: TargetMemory) -> None:
    """Refuse the memory of targets if two of their elements share it, in one tensor or in two.

    Two targets may share memory if they are the same part of the same stored tensor. Tensors on the meta device are
    skipped, because they have no memory yet.

    Raises:
        StateError: code ``state.overlap``; the error names the tensors.
    """
    if _are_apart(memory):
        return
    open_: list[_HeldMemory] = []
    for held in sorted(_held(memory.targets), key=lambda held: held.span):
        if _may_overlap_itself(held.view):
            layout = f"shape {list(held.view.shape)}, strides {list(held.view.stride())}"
            raise _overlap(
                held.target.name, f"Elements of the target tensor {held.target.name!r} share memory: {layout}."
            )
        open_ = [
            other for other in open_ if other.span.device == held.span.device and other.span.stop > held.span.start
        ]
        for other in open_:
            if not _is_same(other, held) and _share_memory(other.view, held.view):
                names = f"{other.target.name!r} and {held.target.name!r}"
                raise _overlap(held.target.name, f"The target tensors {names} share memory.")
        open_.append(held)


def _are_apart(memory: TargetMemory) -> bool:
    """Whether all parts are on one device, have no holes and lie one after another, as in most states. A quick test,
    which is done for all parts at once."""
    _, _, starts, sizes = memory
    if sizes is None:
        return False
    order, stops = np.argsort(starts), starts + sizes
    return bool(np.all(stops[order[:-1]] <= starts[order[1:]]))


def _held(targets: Sequence[BoundTensor]) -> Iterator[_HeldMemory]:
    for target in targets:
        for number, view in enumerate(target.local.memory):
            if view.numel() and not view.is_meta:
                yield _HeldMemory(MemorySpan.of(view), target, number, view)


def _is_same(a: _HeldMemory, b: _HeldMemory) -> bool:
    """Whether both get the same elements, so that the order in which they are filled does not matter."""
    mine, other = a.target.local.layout, b.target.local.layout
    return (
        (a.span, a.number, a.target.source) == (b.span, b.number, b.target.source)
        and (a.view.shape, a.view.stride(), a.view.dtype) == (b.view.shape, b.view.stride(), b.view.dtype)
        and (mine.shape, mine.spec) == (other.shape, other.spec)
    )


def _may_overlap_itself(view: torch.Tensor) -> bool:
    """Whether an axis steps into the memory that the axes of smaller strides reach. True for some contrived views
    without overlap too."""
    if view.is_contiguous():
        return False
    reach = 0
    for stride, extent in sorted(zip(view.stride(), view.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        arrays = np.asarray(AddressedMemory(a)), np.asarray(AddressedMemory(b))
        return np.shares_memory(*arrays, max_work=_MAX_WORK)  # type: ignore[arg-type]  # any limit is taken
    except np.exceptions.TooHardError:
        return True


def _overlap(name: str, what: str) -> StateError:
    return StateError(
        f"{what} Later values would overwrite those that are loaded first.",
        code="state.overlap",
        action="Give each tensor memory of its own (tensor.clone()), or leave one of them out with select=.",
        tensor=name,
    )
