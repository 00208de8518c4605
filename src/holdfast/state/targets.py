"""Local tensor memory as the target of a reader's deliveries."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box, flat_boxes
from holdfast.state.collect import LocalTensor
from holdfast.state.local_memory import COPY_NBYTES, array_of, carried, copy_elements
from holdfast.store.base import Bytes

Array = npt.NDArray[Any]

#: Copies of fewer bytes keep the interpreter's lock: to release it and to wait for it again takes longer.
_SHORT_NBYTES = 64 << 10

_move_and_release = ctypes.memmove
_move_short = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.pythonapi))


class _Places(NamedTuple):
    """The places of boxes, as columns: the address of each one's memory, and the size of its elements as they arrive.

    The address is 0 where the memory is no contiguous host memory of the dtype in which elements arrive.
    """

    addresses: list[int]
    sizes: list[int]


class MemoryTargets:
    """The local memory of requested boxes, as targets of elements, numbered in the order in which they were added. Add
    all of them before the first elements arrive.

    Several threads may fill disjoint memory at the same time.
    """

    def __init__(self) -> None:
        self._views: list[torch.Tensor] = []
        #: The `_Places` of those boxes that are whole local tensors and whose places are known; 0 for the others.
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        #: The dtype in which elements arrive, by number, where it differs from that of the memory.
        self._casts: dict[int, torch.dtype] = {}
        #: The results of `memory`, by number.
        self._rows: dict[int, Array | None] = {}

    def add(self, view: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add the memory of one box. Elements arrive in `dtype`, and are cast where the memory has another one."""
        if dtype is not None and dtype is not view.dtype:
            self._casts[len(self._views)] = dtype
        self._views.append(view)
        self._addresses.append(0)
        self._sizes.append(0)

    def add_whole(self, local: LocalTensor, dtype: torch.dtype | None = None) -> None:
        """As `add`, for a box that is the whole local tensor."""
        self.add(local.memory[0], dtype)
        if dtype is None:
            self._addresses[-1], self._sizes[-1] = local.address, local.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, as they arrive."""
        return sum(self._places.sizes)

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """The memory of all boxes."""
        return self._views

    def put(self, want: int, at: Box, elements: Array) -> None:
        """Copy `elements` (an array of the carrier type) into box number `want`, to `at`, which is relative to it."""
        if want in self._casts:
            self._cast(want, at, elements)
            return
        view = self._views[want]
        if view.is_cpu:
            copy_elements(array_of(view)[at.slices()], elements)
        else:
            carried(view)[at.slices()].copy_(torch.from_numpy(np.asarray(elements)))

    def memory(self, want: int) -> Array | None:
        """All elements of one box in row-major order, as carriers; None where they are not contiguous host memory of
        the dtype in which elements arrive."""
        if want not in self._rows:
            view = self._views[want]
            flat = want not in self._casts and view.is_cpu and view.is_contiguous()
            self._rows[want] = array_of(view).reshape(-1) if flat else None
        return self._rows[want]

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        """Copy elements of the boxes `wants`: `data` has the elements of one box after the other, each in row-major
        order. It begins `skipped` bytes into the first box, and may end before the last one does."""
        # By address: per tensor, an array or a call of torch costs more than most copies, and delays all other threads.
        addresses, sizes = self._places
        source, taken, nbytes = data.ctypes.data, 0, len(data)
        for want in wants:
            step = sizes[want] - skipped
            if step > nbytes - taken:  # noqa: PLR1730 - a call of `min` takes as long as a small copy
                step = nbytes - taken
            target = addresses[want]
            if not target:
                self._put_part(want, skipped, data[taken : taken + step])
            elif step < _SHORT_NBYTES:
                _move_short(target + skipped, source + taken, step)
            elif step <= COPY_NBYTES:
                _move_and_release(target + skipped, source + taken, step)
            else:
                for at in range(0, step, COPY_NBYTES):
                    _move_and_release(target + skipped + at, source + taken + at, min(COPY_NBYTES, step - at))
            taken += step
            skipped = 0
        assert taken == nbytes, "the boxes have fewer bytes than there are"

    @cached_property
    def _places(self) -> _Places:
        addresses, sizes = self._addresses, self._sizes
        for want in [want for want, address in enumerate(addresses) if not address]:
            view, dtype = self._views[want], self._casts.get(want)
            sizes[want] = view.nbytes if dtype is None else view.numel() * dtype.itemsize
            if dtype is None and view.is_cpu and view.is_contiguous():
                addresses[want] = view.data_ptr()
        return _Places(addresses, sizes)

    def _put_part(self, want: int, skipped: int, data: Bytes) -> None:
        """Put elements of a box, after the first `skipped` bytes of it."""
        view = self._views[want]
        itemsize = self._casts.get(want, view.dtype).itemsize
        first, elements = skipped // itemsize, data.view(CARRIERS[itemsize])
        for offset, at in flat_boxes(tuple(view.shape), first, first + len(elements)):
            self.put(want, at, elements[offset : offset + at.numel].reshape(at.size))

    def _cast(self, want: int, at: Box, elements: Array) -> None:
        """Copy elements of another dtype, cast as ``tensor.to`` does. They go to a device before the cast."""
        with torch.inference_mode():
            arrived = torch.from_numpy(np.asarray(elements, order="C")).view(self._casts[want])
            self._views[want][at.slices()].copy_(arrived)
