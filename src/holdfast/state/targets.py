"""Local tensor memory as the target of a reader's deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._nn import unflatten_dense_tensors

from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box, whole
from holdfast.state.local_memory import array_of, carried, copy_elements
from holdfast.store.base import Bytes

Array = npt.NDArray[Any]

#: Dtypes whose elements torch copies bit for bit; elements of others are copied as their carriers. Nearly all tensors
#: have one of these dtypes, and for those a view as the carrier would cost as much as the copy.
_COPIED_AS_THEY_ARE = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32}

_nbytes = attrgetter("nbytes")


class MemoryTargets:
    """The local memory of requested boxes, as targets of elements, numbered in the order in which they were added.

    Several threads may fill disjoint memory at the same time.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._views: list[torch.Tensor] = []
        #: The dtype in which elements arrive, by number, where it differs from that of the memory.
        self._casts: dict[int, torch.dtype] = {}
        #: The results of `memory`, by number.
        self._rows: dict[int, Array | None] = {}

    def add(self, view: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add the memory of one box. Elements arrive in `dtype`, and are cast where the memory has another one."""
        if dtype is None or dtype is view.dtype:
            self.nbytes += view.nbytes
        else:
            self._casts[len(self._views)] = dtype
            self.nbytes += view.numel() * dtype.itemsize
        self._views.append(view)

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

    def fill(self, wants: Sequence[int], data: Bytes) -> None:
        """Copy all elements of the boxes `wants`: `data` has the elements of one box after the other, each in row-major
        order.

        Fills a run of boxes in contiguous host memory and of one dtype in one call: single calls from Python cost more
        than the copies, and delay all other threads.
        """
        targets = [self._views[want] for want in wants]
        kinds = [view.dtype if view.is_cpu and view.is_contiguous() else None for view in targets]
        if self._casts:
            kinds = [None if want in self._casts else kind for want, kind in zip(wants, kinds, strict=True)]
        first = 0
        for dtype, run in groupby(kinds):
            last = first + len(list(run))
            views = targets[first:last]
            if dtype is None:
                nbytes = self._put_each(wants[first:last], data)
            else:
                nbytes = sum(map(_nbytes, views))
                _copy(views if dtype in _COPIED_AS_THEY_ARE else list(map(carried, views)), data[:nbytes])
            first, data = last, data[nbytes:]

    def _put_each(self, wants: Sequence[int], data: Bytes) -> int:
        """Copy boxes one by one from the beginning of `data`; returns the number of bytes that they took."""
        taken = 0
        for want in wants:
            view = self._views[want]
            shape, itemsize = tuple(view.shape), self._casts.get(want, view.dtype).itemsize
            nbytes = view.numel() * itemsize
            elements = data[taken : taken + nbytes].view(CARRIERS[itemsize]).reshape(shape)
            self.put(want, whole(shape), elements)
            taken += nbytes
        return taken

    def _cast(self, want: int, at: Box, elements: Array) -> None:
        """Copy elements of another dtype, cast as ``tensor.to`` does. They go to a device before the cast."""
        with torch.inference_mode():
            arrived = torch.from_numpy(np.asarray(elements, order="C")).view(self._casts[want])
            self._views[want][at.slices()].copy_(arrived)


def _copy(views: list[torch.Tensor], data: Bytes) -> None:
    """Fill tensors of one dtype, one after the other, from `data`."""
    # In inference mode autograd records nothing, and inference tensors can be written too.
    with torch.inference_mode():
        elements = torch.from_numpy(data).view(views[0].dtype)
        torch._foreach_copy_(views, unflatten_dense_tensors(elements, views))
