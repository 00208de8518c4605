"""The source of a view's elements: ranged reads, or, without verification, the mapped file itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.delivery import cut
from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import NotFoundError
from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box, flat_boxes, whole
from holdfast.interop.formats import find_state
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.run.paths import Selection
from holdfast.store.base import Bytes
from holdfast.view.index import Lattice
from holdfast.view.mapping import CAN_MAP, map_file

_log = logging.getLogger(__name__)

#: Elements as their carriers: see `CARRIERS`.
Array = npt.NDArray[Any]


class ViewSource:
    """The elements of a checkpoint. Safe for several threads."""

    def __init__(self, checkpoint: StoredState, *, verify: bool) -> None:
        self.checkpoint = checkpoint
        self.verify = verify
        #: The shared mappings of files, by the file's number. Each lives as long as an array over it.
        self._mapped: WeakValueDictionary[int, Bytes] = WeakValueDictionary()
        self._lock = RLock()  # a handler of a signal may read while its thread reads

    def __reduce__(self) -> tuple[object, ...]:
        """Have another process, such as a worker of a data loader, open the same checkpoint again."""
        record = self.checkpoint.record
        target = Selection(record.location, place=record.place if record.in_history else None)
        return _reopened, (target, record.identity, self.verify)

    def carrier(self, tensor: int) -> np.dtype[Any]:
        """The carrier dtype for the elements of tensor number `tensor`."""
        return np.dtype(CARRIERS[int(self.checkpoint.files.itemsizes[tensor])])

    def read(self, parts: Sequence[tuple[int, Lattice, Array]]) -> None:
        """Fill arrays with the elements of lattices of tensors. Reads each file once, in bounded memory."""
        wants = [ReadRequest(tensor, lattice.box) for tensor, lattice, _ in parts]
        if wants:
            self.checkpoint.read(wants, _ViewArrays(parts), verify=self.verify)

    def whole(self, tensors: Sequence[int], *, private: bool) -> list[Array]:
        """All elements of several tensors, mapped or read."""
        boxes = [whole(self.checkpoint.manifest.shape(tensor)) for tensor in tensors]
        wants = [ReadRequest(tensor, box) for tensor, box in zip(tensors, boxes, strict=True)]
        found: list[Array] = []
        parts: list[tuple[int, Lattice, Array]] = []
        for tensor, box, array in zip(tensors, boxes, self.mapped(wants, private=private), strict=True):
            if array is None:
                found.append(np.empty(box.size, self.carrier(tensor)))
                parts.append((tensor, Lattice(box.start, box.size, (1,) * len(box.size)), found[-1]))
            else:
                found.append(array)
        self.read(parts)
        return found

    def mapped(self, wants: Sequence[ReadRequest], *, private: bool) -> list[Array | None]:
        """For each request, an array over the mapped file; None if its elements do not lie in one piece, or the file is
        not mapped.

        The arrays are read-only. If `private`, the caller may write to them, which changes neither the file nor any
        other array.
        """
        arrays: list[Array | None] = [None] * len(wants)
        if not self._maps:
            return arrays
        for reads in plan_load(self.checkpoint.files, wants):
            straight = np.flatnonzero(reads.straight & ~reads.odd)  # elements at odd addresses are copied instead
            if not len(straight):
                continue
            low, high = int(reads.starts[straight[0]]), int(reads.stops[straight].max())
            span = (reads.data_start + low, reads.data_start + high)
            memory = self._span(reads.file, reads.data_start, reads.data_nbytes, span, private=private)
            if memory is None:
                continue
            for row in straight.tolist():
                want = wants[int(reads.wants[row])]
                held = memory[int(reads.starts[row]) - low : int(reads.stops[row]) - low]
                arrays[int(reads.wants[row])] = held.view(self.carrier(want.tensor)).reshape(want.box.size)
        return arrays

    def section(self, index: int, data_start: int, data_nbytes: int) -> Bytes | None:
        """The mapped data section of a file; None if it is not mapped. Raises what `Checkpoint.open_file` raises."""
        span = data_start, data_start + data_nbytes
        return self._span(index, data_start, data_nbytes, span, private=False) if self._maps else None

    @property
    def _maps(self) -> bool:
        return not self.verify and CAN_MAP and self.checkpoint.storage.capabilities.is_mappable

    def _span(
        self, index: int, data_start: int, data_nbytes: int, span: tuple[int, int], *, private: bool
    ) -> Bytes | None:
        """Mapped bytes of a file: in a new mapping for this caller if `private`, else in the file's shared mapping."""
        if private:
            return self._map(index, data_start, data_nbytes, span, private=True)
        with self._lock:
            memory = self._mapped.get(index)
            if memory is None:
                memory = self._map(index, data_start, data_nbytes, (0, data_start + data_nbytes), private=False)
                if memory is not None:
                    self._mapped[index] = memory
        return None if memory is None else memory[slice(*span)]

    def _map(
        self, index: int, data_start: int, data_nbytes: int, span: tuple[int, int], *, private: bool
    ) -> Bytes | None:
        # Opened only to check the file's size.
        file = self.checkpoint.open_file(index, data_start=data_start, data_nbytes=data_nbytes, verify=False)
        file.reader.close()
        try:
            return map_file(file.path, *span, private=private)
        except OSError as error:  # a file system without mappings, or no room for one more
            _log.info("%s cannot be mapped (%s): reading it instead", file.path, error)
            return None


def _reopened(target: Selection, identity: str, verify: bool) -> ViewSource:
    state = find_state(target).state
    if state.record.identity != identity:
        raise NotFoundError(
            f"'{target}' is no longer the checkpoint that was opened.",
            code="not_found.commit",
            action="Open it again.",
            path=target.root,
        )
    return ViewSource(state, verify=verify)


class _ViewArrays:
    """The arrays that `Checkpoint.read` fills, one for each read request."""

    def __init__(self, parts: Sequence[tuple[int, Lattice, Array]]) -> None:
        self._parts = parts

    def put(self, want: int, at: Box, elements: Array) -> None:
        _, lattice, array = self._parts[want]
        if lattice.is_dense:
            array[at.slices()] = elements
            return
        source, target = [], []
        for start, size, step in zip(at.start, at.size, lattice.step, strict=True):
            skipped = -start % step
            first = (start + skipped) // step
            source.append(slice(skipped, None, step))
            target.append(slice(first, first + len(range(skipped, size, step))))
        array[tuple(target)] = elements[tuple(source)]

    def memory(self, want: int) -> Array | None:
        _, lattice, array = self._parts[want]
        return array.reshape(-1) if lattice.is_dense and array.flags.c_contiguous else None

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        boxes = [self._parts[want][1].box for want in wants]
        itemsizes = [self._parts[want][2].itemsize for want in wants]
        sizes = (box.numel * itemsize for box, itemsize in zip(boxes, itemsizes, strict=True))
        rows = zip(wants, boxes, itemsizes, cut(data, sizes, skipped), strict=True)
        for want, box, itemsize, (first, part) in rows:
            elements = part.view(CARRIERS[itemsize])
            start = first // itemsize
            for offset, at in flat_boxes(box.size, start, start + len(elements)):
                self.put(want, at, elements[offset : offset + at.numel].reshape(at.size))
