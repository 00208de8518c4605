"""Boxes, flat ranges and coverage against arrays of numbered elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry import (
    Box,
    CoverageFault,
    Shape,
    chunk_cuts,
    coverage_fault,
    flat_boxes,
    intersect,
    subtract,
    whole,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    bounds = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(shapes)
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, stop


def mask(shape: Shape, *boxes: Box) -> np.ndarray:
    """For each element, the number of `boxes` that contain it."""
    times = np.zeros(shape, np.int64)
    for box in boxes:
        times[box.slices()] += 1
    return times


@given(box_pairs())
def test_an_intersection_holds_what_both_boxes_hold(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = intersect(a, b)
    expected = mask(shape, a) * mask(shape, b)
    if common is None:
        assert not expected.any()
    else:
        assert common.numel > 0
        assert np.array_equal(mask(shape, common), expected)


@given(box_pairs())
def test_a_difference_is_few_disjoint_boxes_of_what_only_the_first_holds(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    rest = subtract(a, b)
    assert all(box.numel for box in rest)
    assert len(rest) <= max(2 * len(shape), 1)
    assert np.array_equal(mask(shape, *rest), mask(shape, a) * (1 - mask(shape, b)))


@given(box_pairs())
def test_relative_boxes_index_the_part_they_are_relative_to(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = intersect(a, b)
    if common is not None:
        elements = np.arange(prod(shape)).reshape(shape)
        part = elements[a.slices()]
        assert np.array_equal(part[common.relative_to(a.start).slices()], elements[common.slices()])


@given(flat_ranges())
def test_a_flat_range_is_few_boxes_that_are_contiguous_in_it(case: tuple[Shape, int, int]) -> None:
    shape, start, stop = case
    found = list(flat_boxes(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    elements = np.arange(prod(shape)).reshape(shape)
    at = start
    for offset, box in found:
        assert start + offset == at
        assert box.numel > 0
        assert elements[box.slices()].reshape(-1).tolist() == list(range(at, at + box.numel))
        at += box.numel
    assert at == max(start, stop)


def test_the_most_boxes_of_a_flat_range_are_needed_when_both_ends_are_ragged() -> None:
    assert len(list(flat_boxes((4, 4, 4), 1, 63))) == 5
    assert len(list(flat_boxes((4, 4, 4), 0, 64))) == 1
    assert list(flat_boxes((), 0, 1)) == [(0, Box((), ()))]


@given(st.integers(0, 40), st.integers(1, 12))
def test_cuts_are_those_of_torch_chunk(extent: int, parts: int) -> None:
    sizes = [len(chunk) for chunk in torch.chunk(torch.empty(extent), parts)]
    sizes += [0] * (parts - len(sizes))
    cuts = chunk_cuts(extent, parts)
    assert cuts[0] == 0
    assert np.diff(cuts).tolist() == sizes


@st.composite
def coverings(draw: st.DrawFn) -> tuple[list[Shape], list[int], list[Box]]:
    """Tensors with exactly covering boxes, and then perhaps a box too many, one too few, or one moved."""
    num_axes = draw(st.integers(0, 3))
    tensors = [tuple(draw(st.integers(0, 4)) for _ in range(num_axes)) for _ in range(draw(st.integers(1, 3)))]
    owners: list[int] = []
    boxes: list[Box] = []
    for tensor, shape in enumerate(tensors):
        pieces = [whole(shape)] if prod(shape) else []
        for _ in range(draw(st.integers(0, 4))):
            pieces = [part for piece in pieces for part in split(piece, draw(boxes_in(shape)))]
        owners += [tensor] * len(pieces)
        boxes += pieces
    for _ in range(draw(st.integers(0, 2)) if boxes else 0):
        victim = draw(st.integers(0, len(boxes) - 1))
        other = draw(boxes_in(tensors[owners[victim]]))
        if other.numel and draw(st.booleans()):
            owners.append(owners[victim])
            boxes.append(other)
        elif other.numel:
            boxes[victim] = other
        else:
            del owners[victim], boxes[victim]
            break
    order = draw(st.permutations(range(len(boxes))))
    return tensors, [owners[i] for i in order], [boxes[i] for i in order]


def split(piece: Box, box: Box) -> list[Box]:
    common = intersect(piece, box)
    return subtract(piece, box) + ([] if common is None else [common])


def found_fault(tensors: list[Shape], owners: list[int], boxes: list[Box]) -> CoverageFault | None:
    rows = (len(boxes), len(tensors[0]))
    starts = np.asarray([box.start for box in boxes], np.int64).reshape(rows)
    sizes = np.asarray([box.size for box in boxes], np.int64).reshape(rows)
    return coverage_fault(tensors, np.asarray(owners, np.int64), starts, sizes)


@given(coverings())
def test_a_fault_is_the_first_element_that_counting_finds(case: tuple[list[Shape], list[int], list[Box]]) -> None:
    tensors, owners, boxes = case
    expected = None
    for tensor, shape in reversed(list(enumerate(tensors))):
        times = mask(shape, *(box for owner, box in zip(owners, boxes, strict=True) if owner == tensor))
        wrong = np.flatnonzero(times.reshape(-1) != 1)
        if len(wrong):
            index = tuple(int(at) for at in np.unravel_index(wrong[0], shape)) if shape else ()
            expected = CoverageFault(tensor, index, int(times.reshape(-1)[wrong[0]]))
    assert found_fault(tensors, owners, boxes) == expected


@pytest.mark.parametrize("extent", [2**31, 2**40, 2**61])
def test_huge_extents_are_checked_exactly(extent: int) -> None:
    halves = [Box((0, 0), (extent, 1)), Box((0, 1), (extent, 2))]
    assert found_fault([(extent, 3)], [0, 0], halves) is None
    gap = [halves[0], Box((0, 1), (extent - 1, 2))]
    assert found_fault([(extent, 3)], [0, 0], gap) == CoverageFault(0, (extent - 1, 1), 0)
