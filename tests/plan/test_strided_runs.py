"""Runs against brute force: which element of a cell goes to which element of a box."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry import Box, Shape
from holdfast.plan.strided_runs import CopySpan, StridedRun, copy_spans, shared

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    """A shape of one to four axes, and two boxes in it that share elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    common = [draw(st.integers(0, extent - 1)) for extent in shape]

    def box() -> Box:
        starts = [draw(st.integers(0, at)) for at in common]
        stops = [draw(st.integers(at + 1, extent)) for at, extent in zip(common, shape, strict=True)]
        return Box(tuple(starts), tuple(b - a for a, b in zip(starts, stops, strict=True)))

    return shape, box(), box()


def _run(cell: Box, box: Box) -> tuple[int, int, StridedRun]:
    firsts, lasts, runs = shared(np.asarray([cell.start]), np.asarray([cell.size]), box)
    return int(firsts[0]), int(lasts[0]), StridedRun(*runs[0].tolist())


def _move(source: Numbers, run: StridedRun, span: CopySpan, target: Numbers) -> None:
    for row in range(span.rows):
        at, place = span.at + row * run.step, span.place + row * run.pitch
        assert np.all(target[place : place + span.size] == -1), "an element was moved twice"
        target[place : place + span.size] = source[at : at + span.size]


def _elements(shape: Shape, cell: Box, box: Box) -> tuple[Numbers, Numbers]:
    """The number of each element of the cell, in its row-major order; and what the box gets of it, else -1."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    stored = numbers[cell.slices()].reshape(-1)
    return stored, np.where(np.isin(numbers, stored), numbers, -1)[box.slices()].reshape(-1)


@given(overlapping(), st.data())
def test_moves_bring_every_shared_element_to_its_place_once_however_the_bytes_arrive(
    case: tuple[Shape, Box, Box], data: st.DataObject
) -> None:
    stored, wanted = _elements(*case)
    first, last, run = _run(*case[1:])
    among = np.flatnonzero(np.isin(stored, wanted))
    assert (first, last) == (among[0], among[-1] + 1)
    if run.place < 0:
        return
    filled = np.full(len(wanted), -1)
    cuts = data.draw(st.sets(st.integers(first, last), max_size=5)) | {first, last}
    for low, high in pairwise(sorted(cuts)):
        parts = list(copy_spans(run, low - first, high - low))
        assert len(parts) <= 3
        for part in parts:
            _move(stored[low:high], run, part, filled)
    assert np.array_equal(filled, wanted)


@given(overlapping())
def test_two_axes_and_slices_along_one_axis_are_always_strips(case: tuple[Shape, Box, Box]) -> None:
    shape, cell, box = case
    cut = [axis for axis, extent in enumerate(shape) if cell.size[axis] < extent or box.size[axis] < extent]
    run = _run(cell, box)[2]
    assert run.place >= 0 or (len(shape) > 2 and len(cut) > 1)


def test_cells_are_looked_at_together() -> None:
    starts, sizes = np.asarray([[0, 0], [0, 4], [2, 4]]), np.asarray([[4, 4], [2, 4], [2, 2]])
    together = shared(starts, sizes, Box((1, 2), (2, 4)))
    for number in range(3):
        alone = shared(starts[[number]], sizes[[number]], Box((1, 2), (2, 4)))
        assert all(np.array_equal(each[[number]], one) for each, one in zip(together, alone, strict=True))


def test_gaps_of_two_widths_are_no_strips() -> None:
    cell = Box((0, 0, 0), (2, 3, 3))
    assert _run(cell, Box((0, 0, 0), (2, 3, 1)))[2] == StridedRun(0, 1, 3, 1)
    assert _run(cell, Box((0, 0, 0), (2, 2, 1)))[2].place == -1  # elements 0, 3, 9 and 12


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_moved_of_what_lies_between_strips(count: int) -> None:
    assert not list(copy_spans(StridedRun(0, 2, 5, 2), 3, count))
