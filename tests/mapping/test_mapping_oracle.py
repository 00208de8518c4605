"""Random chains of rules load what numpy makes of the same tensors, into any parts that a rank may hold."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Box, FlatRange, Piecewise
from holdfast.geometry import coverage_fault
from holdfast.mapping import Cast, Crop, Drop, Fuse, Pad, Rename, Rule, Split, Stack, Transpose, Unstack
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import StoredTensor

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

#: The content of memory before a load: padding that is to be kept still holds it afterwards.
BEFORE = -1


class Chain:
    """Rules as they are drawn, and what numpy makes of the tensors."""

    def __init__(self, tensors: dict[str, Array], data: st.DataObject) -> None:
        self.tensors = dict(tensors)
        self.rules: list[Rule] = []
        self._data = data

    def extend(self) -> None:
        kinds = [self.split, self.fuse, self.stack, self.unstack, self.transpose, self.pad, self.crop, self.drop]
        self._draw(st.sampled_from(kinds))()

    def split(self) -> None:
        name, array, axis = self._tensor_and_axis()
        groups = self._draw(st.sampled_from(divisors(array.shape[axis])))
        left = array.shape[axis] // groups
        shares: list[int] = []
        while left and len(shares) < 3:
            shares.append(left if len(shares) == 2 else self._draw(st.integers(1, left)))
            left -= shares[-1]
        if len(shares) < 2 or left:
            return
        grouped = array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
        parts = np.split(grouped, np.cumsum(shares)[:-1], axis=axis + 1)
        to = tuple(self._new() + str(index) for index in range(len(parts)))
        self._replace([name], {t: merged(part, axis) for t, part in zip(to, parts, strict=True)})
        self.rules.append(Split(name, to, shares=tuple(shares), axis=axis, groups=groups))

    def fuse(self) -> None:
        name, array, axis = self._tensor_and_axis()
        others = [
            other
            for other, one in self.tensors.items()
            if other != name and one.ndim == array.ndim and np.delete(one.shape, axis).tolist() == rest(array, axis)
        ]
        names = (
            [name, *self._draw(st.lists(st.sampled_from(others), min_size=1, max_size=2, unique=True))]
            if others
            else []
        )
        if not names:
            return
        arrays = [self.tensors[one] for one in names]
        groups = self._draw(st.sampled_from(divisors(np.gcd.reduce([one.shape[axis] for one in arrays]))))
        grouped = [
            one.reshape(*one.shape[:axis], groups, one.shape[axis] // groups, *one.shape[axis + 1 :]) for one in arrays
        ]
        to = self._new()
        self._replace(names, {to: merged(np.concatenate(grouped, axis=axis + 1), axis)})
        self.rules.append(Fuse(tuple(names), to, axis=axis, groups=groups))

    def stack(self) -> None:
        _, array, axis = self._tensor_and_axis()
        alike = [other for other, one in self.tensors.items() if one.shape == array.shape]
        names = self._draw(st.permutations(alike))[: self._draw(st.integers(1, 3))]
        to, first = self._new(), self._draw(st.integers(0, 9))
        for index, one in enumerate(names, first):
            self.rules.append(Rename(one, f"{to}.{index}.w"))
        self._replace(names, {f"{to}.w": np.stack([self.tensors[one] for one in names], axis)})
        self.rules.append(Stack(f"{to}.{{i}}.w", f"{to}.w", axis=axis - array.ndim - 1, first=first))

    def unstack(self) -> None:
        name, array, axis = self._tensor_and_axis()
        to = self._new()
        self._replace([name], {f"{to}.{i}": np.take(array, i, axis) for i in range(array.shape[axis])})
        self.rules.append(Unstack(name, to + ".{i}", axis=axis))

    def transpose(self) -> None:
        name, array, _ = self._tensor_and_axis()
        order = tuple(self._draw(st.permutations(range(array.ndim))))
        self.tensors[name] = array.transpose(order)
        self.rules.append(Transpose(name, axes=order))

    def pad(self) -> None:
        name, array, axis = self._tensor_and_axis()
        more, zero = self._draw(st.integers(0, 3)), self._draw(st.booleans())
        width = [(0, more if k == axis else 0) for k in range(array.ndim)]
        self.tensors[name] = np.pad(array, width, constant_values=0 if zero else BEFORE)
        self.rules.append(Pad(name, size=array.shape[axis] + more, axis=axis, fill="zero" if zero else "keep"))

    def crop(self) -> None:
        name, array, axis = self._tensor_and_axis()
        size = self._draw(st.integers(0 if self._draw(st.integers(0, 9)) == 0 else 1, array.shape[axis]))
        self.tensors[name] = np.take(array, range(size), axis)
        self.rules.append(Crop(name, size=size, axis=axis))

    def drop(self) -> None:
        if len(self.tensors) > 3:
            name, _, _ = self._tensor_and_axis()
            self._replace([name], {})
            self.rules.append(Drop(name))

    def _tensor_and_axis(self) -> tuple[str, Array, int]:
        name = self._draw(st.sampled_from([name for name, one in self.tensors.items() if one.ndim and one.size]))
        return name, self.tensors[name], self._draw(st.integers(0, self.tensors[name].ndim - 1))

    def _replace(self, names: list[str], made: dict[str, Array]) -> None:
        for name in names:
            del self.tensors[name]
        self.tensors |= made

    def _new(self) -> str:
        return f"n{len(self.rules)}_"

    def _draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self._data.draw(strategy)

    @property
    def goes_on(self) -> bool:
        return any(one.ndim and one.size for one in self.tensors.values())


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, max(number, 1) + 1) if number % divisor == 0]


def rest(array: Array, axis: int) -> list[int]:
    return list(np.delete(array.shape, axis).tolist())


def merged(array: Array, axis: int) -> Array:
    """The array with `axis` and the next one as one."""
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])


def stored_tensors(shapes: list[Shape]) -> dict[str, Array]:
    """Tensors of which every element is another one."""
    ends = np.cumsum([prod(shape) for shape in shapes])
    return {
        f"t{index}": np.arange(1 + end - prod(shape), 1 + end).reshape(shape)
        for index, (end, shape) in enumerate(zip(ends, shapes, strict=True))
    }


def chain_of(data: st.DataObject, tensors: dict[str, Array]) -> Chain:
    chain = Chain(tensors, data)
    for _ in range(data.draw(st.integers(1, 5))):
        if chain.goes_on:
            chain.extend()
    return chain


def table_of(rules: list[Rule], tensors: dict[str, Array]) -> CheckpointTable:
    return mapped(rules, {name: StoredTensor("int64", one.shape) for name, one in tensors.items()}, {}, {})


def assembled(name: str, table: CheckpointTable, tensors: dict[str, Array]) -> Array:
    """A tensor put together from its parts, coordinate by coordinate."""
    shape = table.stored[name].shape
    if name not in table.parts:
        return tensors[name]
    out = np.full(shape, BEFORE)
    for part in table.parts[name]:
        within = np.indices(part.box.size)
        at = tuple(first + offset for first, offset in zip(part.box.start, within, strict=True))
        if part.source is not None:
            where = (
                first + (within[axis] if axis >= 0 else np.zeros(part.box.size, np.int64))
                for first, axis in zip(part.start, part.axes, strict=True)
            )
            out[at] = tensors[part.source][tuple(where)]
        elif part.zero:
            out[at] = 0
    return out


SHAPES = st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple), min_size=2, max_size=4)


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, data=st.data())
def test_parts_cover_every_tensor_once_and_hold_what_numpy_makes(shapes: list[Shape], data: st.DataObject) -> None:
    tensors = stored_tensors(shapes)
    chain = chain_of(data, tensors)
    table = table_of(chain.rules, tensors)
    assert {name: one.shape for name, one in chain.tensors.items()} == {n: s.shape for n, s in table.stored.items()}
    for name, expected in chain.tensors.items():
        np.testing.assert_array_equal(assembled(name, table, tensors), expected, err_msg=name)
        if name in table.parts:
            boxes = [part.box for part in table.parts[name]]
            corners = [np.asarray(list(each), np.int64) for each in zip(*boxes, strict=True)]
            starts, sizes = (each.reshape(len(boxes), expected.ndim) for each in corners or [np.zeros(0, np.int64)] * 2)
            assert coverage_fault([expected.shape], np.zeros(len(boxes), np.int64), starts, sizes) is None


def drawn_piece(data: st.DataObject, shape: Shape) -> tuple[FlatRange | Box, torch.Tensor]:
    """A part of a tensor, and memory for it that holds `BEFORE`."""
    if data.draw(st.booleans()):
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
        return FlatRange(first, last), torch.full((last - first,), BEFORE)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    backwards = torch.full(box.size[::-1], BEFORE)
    return box, backwards.permute(list(range(len(shape)))[::-1])


def part_of(array: Array, part: FlatRange | Box) -> Array:
    return array.reshape(-1)[part.start : part.stop] if isinstance(part, FlatRange) else array[part.slices()]


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, data=st.data())
def test_any_part_of_a_mapped_tensor_is_filled_as_numpy_fills_it(shapes: list[Shape], data: st.DataObject) -> None:
    tensors = stored_tensors(shapes)
    chain = chain_of(data, tensors)
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        holdfast.save(run, {name: torch.from_numpy(one.copy()) for name, one in tensors.items()}, 1)
        whole = {name: torch.full(one.shape, BEFORE) for name, one in chain.tensors.items()}
        report = holdfast.load(run, whole, mapping=chain.rules)
        assert report.loaded == tuple(sorted(chain.tensors))
        for name, expected in chain.tensors.items():
            np.testing.assert_array_equal(whole[name].numpy(), expected, err_msg=name)
        pieces = {name: drawn_piece(data, one.shape) for name, one in chain.tensors.items()}
        into = {name: Piecewise(chain.tensors[name].shape, [piece]) for name, piece in pieces.items()}
        holdfast.load(run, into, mapping=chain.rules)
        for name, (part, memory) in pieces.items():
            np.testing.assert_array_equal(memory.numpy(), part_of(chain.tensors[name], part), err_msg=name)


@settings(max_examples=30, deadline=None)
@given(shapes=SHAPES, data=st.data())
def test_a_cast_changes_elements_as_torch_casts_them_wherever_they_go(shapes: list[Shape], data: st.DataObject) -> None:
    tensors = stored_tensors(shapes)
    chain = chain_of(data, tensors)
    floats = {name: torch.from_numpy(one.copy()).float() / 7 for name, one in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        holdfast.save(folder + "/run", floats, 1)
        plain = {name: torch.full(one.shape, float(BEFORE)) for name, one in chain.tensors.items()}
        holdfast.load(folder + "/run", plain, mapping=chain.rules)
        narrow = {name: torch.full(one.shape, BEFORE, dtype=torch.bfloat16) for name, one in chain.tensors.items()}
        holdfast.load(folder + "/run", narrow, mapping=chain.rules, cast=True)
        by_rule = {name: torch.full(one.shape, BEFORE, dtype=torch.bfloat16) for name, one in chain.tensors.items()}
        holdfast.load(folder + "/run", by_rule, mapping=[Cast("**", "bfloat16"), *chain.rules])
    for name, expected in plain.items():
        bits = expected.bfloat16().view(torch.int16)
        assert torch.equal(narrow[name].view(torch.int16), bits)
        assert torch.equal(by_rule[name].view(torch.int16), bits)
