"""Delivery of elements that lie at odd offsets: a chunk of a file may end in the middle of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.delivery import Delivery
from holdfast.geometry import Box
from holdfast.interop.given_places import ForeignTensor, GivenPlaces
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.store.base import Bytes


class Taken:
    """Targets over one array; they note the addresses of what they get."""

    def __init__(self, shape: tuple[int, ...], *, lends: bool) -> None:
        self.array = np.full(shape, -1, np.int32)
        self.num_elements = 0
        self.are_aligned = True
        self._lends = lends

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        self.array[at.slices()] = elements
        self._note(elements)

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        first = skipped // 4
        elements = data.view(np.int32)
        self.array.reshape(-1)[first : first + len(elements)] = elements
        self._note(elements)

    def memory(self, want: int) -> npt.NDArray[Any] | None:
        return self.array.reshape(-1) if self._lends else None

    def _note(self, elements: npt.NDArray[Any]) -> None:
        self.num_elements += elements.size
        self.are_aligned &= elements.flags.aligned


@given(st.integers(0, 17), st.lists(st.integers(1, 95), max_size=12), st.booleans(), st.booleans(), st.randoms())
def test_elements_arrive_whole_however_chunks_cut_them(
    offset: int, cuts: list[int], takes_columns: bool, lends: bool, order: Any
) -> None:
    stored = np.arange(24, dtype=np.int32).reshape(4, 6)
    file = np.frombuffer(bytes(offset) + stored.tobytes(), np.uint8)
    zero, size = np.zeros((1, 2), np.int64), np.asarray([[4, 6]], np.int64)
    tensor = ForeignTensor("w", "int32", (4, 6), zero, size, np.zeros(1, np.int64))
    places = GivenPlaces([tensor], [len(file)], lambda _, numbers: np.full(len(numbers), offset, np.int64))
    box = Box((0, 2), (4, 3)) if takes_columns else Box((0, 0), (4, 6))
    (reads,) = plan_load(places, [ReadRequest(0, box)])
    assert reads.odd.tolist() == [offset % 4 != 0]
    targets = Taken(box.size, lends=lends)
    take = Delivery(places, reads, [ReadRequest(0, box)], targets).take
    start, stop = int(reads.starts[0]), int(reads.stops[0])
    # Chunks of a file begin at multiples of its element size, so reads at even offsets are cut between elements only.
    bounds = sorted({at if offset % 4 else at // 4 * 4 for at in cuts if at < stop - start} | {0, stop - start})
    chunks = list(itertools.pairwise(bounds))
    order.shuffle(chunks)
    for low, high in chunks:
        take(0, low, file[start + low : start + high])
    assert np.array_equal(targets.array, stored[box.slices()])
    assert targets.are_aligned
