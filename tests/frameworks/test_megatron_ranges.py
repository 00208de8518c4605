"""Ranges of local memory as boxes of views, and descriptors as pieces: pure functions, without Megatron.

The descriptors here have the module, the name and the fields of Megatron's own; `test_megatron_jobs` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import StateError
from holdfast.frameworks.megatron_padding import fitted
from holdfast.frameworks.megatron_ranges import StridedPart, boxes_in_range, dense_part, is_one_range
from holdfast.frameworks.megatron_shards import joined, read_tree
from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box, FlatRange


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A view of the numbers 0, 1, ... in a row, as factories make them, and how many numbers there are."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    numbers = torch.arange(torch.Size(shape).numel())
    view = numbers.view(shape)
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, view.ndim - 1))
        match draw(st.sampled_from(["narrow", "transpose", "unsqueeze"])):
            case "narrow":
                start = draw(st.integers(0, view.shape[axis] - 1))
                view = view.narrow(axis, start, draw(st.integers(1, view.shape[axis] - start)))
            case "transpose":
                view = view.transpose(axis, draw(st.integers(0, view.ndim - 1)))
            case _:
                view = view.unsqueeze(axis)
    return view, len(numbers)


@given(views(), st.data())
def test_a_range_of_the_memory_is_boxes_of_the_view(made: tuple[torch.Tensor, int], data: st.DataObject) -> None:
    view, numel = made
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    part = StridedPart(int(view.storage_offset()), tuple(view.shape), view.stride())
    found: dict[int, int] = {}
    for box, first in boxes_in_range(part, start, stop):
        inside = view[box.slices()]
        assert int(inside[(0,) * inside.ndim]) == first
        for number in inside.reshape(-1).tolist():
            found[number] = found.get(number, 0) + 1
    assert found == {number: 1 for number in view.reshape(-1).tolist() if start <= number < stop}
    assert part.is_dense == (part.strides == dense_part(0, part.size).strides or view.is_contiguous())


def test_a_view_that_is_no_box_is_refused() -> None:
    with pytest.raises(ValueError, match="no box"):
        list(boxes_in_range(StridedPart(0, (2, 3), (4, 3)), 0, 12))


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box((1, 2), (1, 3)), True),
        (Box((1, 0), (2, 8)), True),
        (Box((1, 2), (2, 3)), False),
        (Box((0, 0), (1, 1)), True),
    ],
)
def test_a_box_of_whole_rows_is_one_range(box: Box, expected: bool) -> None:
    assert is_one_range(box, (4, 8)) == expected


def _of_megatron(kind: type) -> type:
    kind.__module__, kind.__qualname__ = "megatron.core.dist_checkpointing.mapping", kind.__name__
    return kind


@_of_megatron
@dataclass
class ShardedTensor:
    key: str
    data: Any
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = ()
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@_of_megatron
@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    replica_id: int = 0
    flattened_range: slice | None = None


@_of_megatron
@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...] = (4,)
    global_offset: tuple[int, ...] = (1,)
    replica_id: int | tuple[int, ...] = field(default=0)


def _pieces(tree: object) -> dict[str, Piecewise]:
    return joined(((shard, shard.pieces()) for shard in read_tree(tree).shards), "model")


def test_layers_of_a_stack_are_pieces_of_one_tensor_in_their_own_memory() -> None:
    layers = [torch.rand(2, 3) for _ in range(2)]
    tree = {
        f"layers.{number}": ShardedTensor("layers", layer, (2, 3), (8, 4, 3), (4 + number, 2, 0), prepend_axis_num=1)
        for number, layer in enumerate(layers)
    }
    (tensor,) = _pieces(tree).values()
    assert tensor.shape == (8, 4, 3)
    assert [part for part, _ in tensor.pieces] == [Box((4, 2, 0), (1, 2, 3)), Box((5, 2, 0), (1, 2, 3))]
    assert [memory.data_ptr() for _, memory in tensor.pieces] == [layer.data_ptr() for layer in layers]


def test_a_flattened_range_is_a_range_of_whole_rows_and_boxes_of_a_cut_of_columns() -> None:
    memory = torch.arange(4.0)
    rows = ShardedTensor("rows", memory, (2, 4), (4, 4), (2, 0), flattened_range=slice(3, 7))
    columns = ShardedTensor("columns", memory, (2, 4), (2, 8), (0, 4), flattened_range=slice(3, 7))
    found = _pieces({"rows": rows, "columns": columns})
    assert [part for part, _ in found["rows"].pieces] == [FlatRange(11, 15)]
    assert [(part, held.tolist()) for part, held in found["columns"].pieces] == [
        (Box((0, 7), (1, 1)), [[0.0]]),
        (Box((1, 4), (1, 3)), [[1.0, 2.0, 3.0]]),
    ]


@pytest.mark.parametrize("copies", [False, True])
def test_a_factory_s_cuts_are_views_of_its_parameter_even_where_it_copies(copies: bool) -> None:
    weight = torch.arange(12.0).view(4, 3)

    def build(key: str, data: torch.Tensor, *_: object) -> list[ShardedTensor]:
        halves = [half.T.contiguous() if copies else half.T for half in data.chunk(2)]
        return [ShardedTensor(key, half, (3, 2), (3, 8), (0, 4 * at)) for at, half in enumerate(halves)]

    (tensor,) = _pieces({"w": ShardedTensorFactory("w", weight, build)}).values()
    assert [part for part, _ in tensor.pieces] == [Box((0, 0), (3, 2)), Box((0, 4), (3, 2))]
    for _, memory in tensor.pieces:
        memory.zero_()
    assert not weight.any()


def test_a_factory_that_changes_elements_is_refused() -> None:
    def build(key: str, data: torch.Tensor, *_: object) -> ShardedTensor:
        return ShardedTensor(key, data * 2, tuple(data.shape), tuple(data.shape), (0,))

    with pytest.raises(StateError, match="more than to cut") as caught:
        read_tree({"w": ShardedTensorFactory("w", torch.ones(4), build)})
    assert caught.value.code == "state.megatron"


class _Float8(torch.Tensor):
    pass


def test_tensors_that_are_not_plain_are_refused() -> None:
    packed = torch.ones(4).as_subclass(_Float8)

    def build(key: str, data: torch.Tensor, *_: object) -> ShardedTensor:
        return ShardedTensor(key, data, (4,), (4,), (0,))

    for item in (ShardedTensor("w", packed, (4,), (4,), (0,)), ShardedTensorFactory("w", packed, build)):
        with pytest.raises(StateError, match="_Float8, and not a plain tensor"):
            read_tree({"w": item})


@pytest.mark.parametrize("place", ["transformer.module.MegatronModule", "optimizer.optimizer.MegatronOptimizer"])
def test_a_model_or_an_optimizer_by_itself_is_refused(place: str, tmp_path: Path) -> None:
    module, _, name = place.rpartition(".")
    base = type(name, (nn.Module,), {"__module__": f"megatron.core.{module}"})
    with pytest.raises(StateError, match=r"megatron_state\(model, optimizer\)"):
        holdfast.save(tmp_path, {"item": type("Derived", (base,), {})()}, 0)


def test_objects_have_the_names_of_their_shards_and_one_rank_stores_them() -> None:
    tree = {"a._extra_state": ShardedObject("a", b"x", replica_id=(0, 1, 0)), "b": [ShardedObject("b", 3)]}
    found = read_tree(tree).objects
    assert [(each.name, each.value, each.path, each.is_main) for each in found] == [
        ("a/shard_1_4", b"x", "a._extra_state", False),
        ("b/shard_1_4", 3, "b/0", True),
    ]


def test_two_memories_for_one_part_and_plain_tensors_are_refused() -> None:
    twice = {name: ShardedTensor("w", torch.ones(2), (2,), (4,), (0,)) for name in ("a", "b")}
    with pytest.raises(StateError, match="two memories"):
        _pieces(twice)
    with pytest.raises(StateError, match="says nothing about the other ranks"):
        read_tree({"w": torch.ones(2)})


def test_a_stored_tensor_of_fewer_rows_leaves_the_rest() -> None:
    memory, flat = torch.ones(3, 2), torch.ones(5)
    boxes = fitted(Piecewise((6, 2), [(Box((3, 0), (3, 2)), memory)]), (4, 2))
    ranges = fitted(Piecewise((6, 2), [(FlatRange(5, 10), flat)]), (4, 2))
    assert boxes is not None
    assert ranges is not None
    assert [part for part, _ in boxes.tensor.pieces] == [Box((3, 0), (1, 2))]
    assert [part for part, _ in ranges.tensor.pieces] == [FlatRange(5, 8)]
    assert [tuple(rest.shape) for rest in (*boxes.rest, *ranges.rest)] == [(2, 2), (2,)]
    assert fitted(Piecewise((6, 2), [(FlatRange(5, 10), flat)]), (6, 3)) is None
