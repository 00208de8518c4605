"""Tensors held in flat ranges and boxes: any of them loads into any other, and into everything else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import Box, FlatRange, IncompatibleError, PerRank, Piecewise, StateError
from holdfast.format.container import Files
from holdfast.geometry import Shape
from holdfast.plan import replicas
from holdfast.plan.load import ReadRequest
from holdfast.state.local_memory import LocalPieces, carried
from holdfast.state.piecewise_layouts import describe
from tests.support.models import Bits, bits, full, start_new_job
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.worlds import World, cut, cut_points, dealt, fill, shapes

Policy = Literal["compare", "split"]

SHAPES: dict[str, Shape] = {"bias": (7,), "embed.weight": (13, 6), "norm": (), "up.weight": (5, 4, 3)}
#: Elements between tensors in flat memory.
PADDING = 3


def truth(name: str, shape: Shape) -> Bits:
    return full(5, name, torch.empty(shape))


def memory(whole_bits: Bits, shape: Shape, part: Box | FlatRange) -> torch.Tensor:
    """New memory with the true elements of a part."""
    data = torch.from_numpy(np.frombuffer(bytearray(cut(whole_bits, shape, part) or b"\0\0\0\0"), np.int32))
    held = data[: part.numel].view(torch.float32)
    return held.view(part.size) if isinstance(part, Box) else held


def is_true(name: str, item: Piecewise) -> bool:
    """Whether the memory of all pieces is, bit for bit, what it should be."""
    whole_bits = truth(name, item.shape)
    return all(bits(held).tobytes() == cut(whole_bits, item.shape, part) for part, held in item.pieces)


def zero(shapes_: Mapping[str, Shape], world_size: int, rank: int) -> tuple[dict[str, Piecewise], torch.Tensor]:
    """The part of a rank under ZeRO-1: all tensors one after another in one flat memory, cut into equal partitions."""
    total = sum(prod(shape) + PADDING for shape in shapes_.values())
    size = -(-total // world_size)
    partition = torch.zeros(size)
    items, offset = {}, 0
    for name, shape in shapes_.items():
        low, high = (min(max(at - rank * size, 0), size) for at in (offset, offset + prod(shape)))
        first = rank * size + low - offset
        held = [(FlatRange(first, first + high - low), partition[low:high])] if low < high else []
        items[name] = Piecewise(shape, held, dtype=torch.float32)
        offset += prod(shape) + PADDING
    return items, partition


def true_zero(world_size: int, rank: int) -> dict[str, Piecewise]:
    items, _ = zero(SHAPES, world_size, rank)
    for name, item in items.items():
        for part, held in item.pieces:
            held.copy_(memory(truth(name, item.shape), item.shape, part))
    return items


# Simulated worlds.


@st.composite
def held_by(draw: st.DrawFn, world_size: int, shape: Shape) -> list[list[Box | FlatRange]]:
    """For each rank its parts of a tensor, by flat ranges or by boxes of rows."""
    parts: Iterator[Box | FlatRange]
    if draw(st.sampled_from(["rows", "flat"])) == "rows" and shape:
        cuts, rest = draw(cut_points(shape[0], 4)), shape[1:]
        parts = (Box((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in itertools.pairwise(cuts))
    else:
        parts = itertools.starmap(FlatRange, itertools.pairwise(draw(cut_points(prod(shape), 6))))
    return draw(dealt(world_size, parts))


@st.composite
def jobs(draw: st.DrawFn, shapes_: Mapping[str, Shape]) -> list[dict[str, Piecewise]]:
    """The states of the ranks of one job, with true elements."""
    world_size = draw(st.integers(1, 5))
    states: list[dict[str, Piecewise]] = [{} for _ in range(world_size)]
    for name, shape in shapes_.items():
        policy: Policy = draw(st.sampled_from(["compare", "split"]))
        for state, parts in zip(states, draw(held_by(world_size, shape)), strict=True):
            held = [(part, memory(truth(name, shape), shape, part)) for part in parts]
            state[name] = Piecewise(shape, held, dtype=torch.float32, replicas=policy)
    return states


def written(files: Files, states: Sequence[Mapping[str, Piecewise]]) -> list[bytearray]:
    """The data sections that ranks write from the memory of their pieces."""
    sections = []
    names = files.manifest.body.names
    for index, rank in enumerate(files.manifest.sequence(files.manifest.body.writers).tolist()):
        described = {local.layout.name: local for _, local in describe(states[rank])}
        layout = files.layout(index)
        section = bytearray(b"\xee" * layout.data_nbytes)
        for entry in layout.entries:
            local = described[names[entry.tensor]]
            source = LocalPieces(rank).source(local.layout, local.memory, entry.part)
            assert source.nbytes == entry.nbytes
            source.read_into(0, np.frombuffer(section, np.uint8)[entry.offset : entry.offset + entry.nbytes])
        sections.append(section)
    return sections


@given(st.data())
def test_pieces_of_any_job_fill_the_pieces_of_any_other_bit_for_bit(data: st.DataObject) -> None:
    shapes_ = {f"t{number}": shape for number, shape in enumerate(data.draw(st.lists(shapes, min_size=1, max_size=4)))}
    saved, loaded = data.draw(jobs(shapes_)), data.draw(jobs(shapes_))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SHARE_NBYTES", data.draw(st.integers(4, 200)))
        files = Files(World([[local.layout for _, local in describe(state)] for state in saved], {}).plan())
    sections = written(files, saved)
    numbers = {name: number for number, name in enumerate(files.manifest.body.names)}
    for rank, state in enumerate(loaded):
        for _, local in describe(state):
            for held in local.memory:
                held.zero_()
            targets = LocalPieces(rank).of(local.layout, local.memory)
            wants = [ReadRequest(numbers[local.layout.name], box) for box, _ in targets]
            for (_, view), elements in zip(targets, fill(files, sections, wants, first_file=rank), strict=True):
                carried(view).copy_(torch.from_numpy(elements.view(np.int32)[..., 0]))
        assert all(is_true(name, item) for name, item in state.items())


# Real jobs.


def save_zero(run: str) -> None:
    start_new_job()
    holdfast.save(run, {"master": true_zero(dist.get_world_size(), dist.get_rank())}, 1)


def zero_to_zero(old: str, new: str) -> list[str]:
    """Load pieces and save them into another run; names of what was wrong."""
    start_new_job()
    items, partition = zero(SHAPES, dist.get_world_size(), dist.get_rank())
    partition.fill_(-1.0)
    report = holdfast.load(old, {"master": items})
    assert report.loaded == tuple(f"master/{name}" for name in sorted(SHAPES))
    holdfast.save(new, {"master": items}, 2)
    paddings = partition.numel() - sum(held.numel() for item in items.values() for _, held in item.pieces)
    untouched = int((partition == -1.0).sum()) >= paddings
    return [name for name, item in items.items() if not is_true(name, item)] + ([] if untouched else ["padding"])


def zero_to_dtensors(old: str, new: str) -> list[str]:
    start_new_job()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) if shape else torch.zeros(shape)
        for name, shape in SHAPES.items()
    }
    holdfast.load(old, {"master": tensors})
    holdfast.save(new, {"master": tensors}, 3)
    wrong = []
    for name, tensor in tensors.items():
        step = -(-SHAPES[name][0] // mesh.size()) if SHAPES[name] else 0
        own = slice(step * dist.get_rank(), step * (dist.get_rank() + 1)) if step else ...
        if bits(tensor).tobytes() != truth(name, SHAPES[name])[own].tobytes():
            wrong.append(name)
    return wrong


def to_plain(old: str, new: str) -> list[str]:
    start_new_job()
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    holdfast.load(old, {"master": tensors})
    holdfast.save(new, {"master": tensors}, 4)
    return [name for name, shape in SHAPES.items() if bits(tensors[name]).tobytes() != truth(name, shape).tobytes()]


def test_flat_ranges_go_through_other_ranges_dtensors_and_plain_tensors_and_back(tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("four", "three", "two", "one", "again")]
    run_ranks(4, save_zero, runs[0])
    assert run_ranks(3, zero_to_zero, runs[0], runs[1]) == [[]] * 3
    assert run_ranks(2, zero_to_dtensors, runs[1], runs[2]) == [[]] * 2
    assert run_ranks(1, to_plain, runs[2], runs[3]) == [[]]
    assert run_ranks(4, zero_to_zero, runs[3], runs[4]) == [[]] * 4
    for run in runs:
        view = holdfast.open(run)
        assert view.names() == [f"master/{name}" for name in sorted(SHAPES)]
        assert all(view[f"master/{name}"].numpy().tobytes() == truth(name, s).tobytes() for name, s in SHAPES.items())


COLUMNS = [Box((0, 0), (13, 2)), Box((0, 2), (4, 4)), Box((4, 2), (9, 4))]


def save_boxes(run: str) -> None:
    """Two ranks hold boxes, one holds nothing, and one does not name the tensor."""
    start_new_job()
    rank, shape = dist.get_rank(), SHAPES["embed.weight"]
    held = {0: COLUMNS[:1], 1: COLUMNS[1:], 2: []}
    state = {}
    if rank in held:
        pieces = [(box, memory(truth("embed.weight", shape), shape, box)) for box in held[rank]]
        state["embed.weight"] = Piecewise(shape, pieces, dtype=torch.float32)
    holdfast.save(run, state, 1)


def load_boxes(run: str) -> bool:
    """Every rank wants other columns, in memory of its own strides."""
    start_new_job()
    shape, rank = SHAPES["embed.weight"], dist.get_rank()
    box = Box((0, 3 * rank), (13, 3))
    item = Piecewise(shape, [(box, torch.zeros(3, 13).t())])
    holdfast.load(run, {"embed.weight": item})
    return is_true("embed.weight", item)


def test_boxes_load_into_other_boxes_and_a_rank_may_hold_nothing(tmp_path: Path) -> None:
    run_ranks(4, save_boxes, str(tmp_path))
    assert run_ranks(2, load_boxes, str(tmp_path)) == [True, True]
    assert run_ranks(3, zero_to_zero_of_one, str(tmp_path)) == [True] * 3


def zero_to_zero_of_one(run: str) -> bool:
    start_new_job()
    name = "embed.weight"
    items, _ = zero({name: SHAPES[name]}, dist.get_world_size(), dist.get_rank())
    holdfast.load(run, items)
    return is_true(name, items[name])


HALVES = [FlatRange(0, 1 << 17), FlatRange(1 << 17, 1 << 18)]


def save_replicated(run: str, policy: Policy, lowest_differs: bool) -> tuple[int, int]:
    """Ranks of equal parity hold the same half of a matrix of 1 MiB; bytes of the checkpoint, and of this rank."""
    start_new_job()
    rank = dist.get_rank()
    half = torch.full((1 << 17,), float(rank % 2))
    if rank == 0 and lowest_differs:
        half[-1] = 7.0
    state = {"master": {"w": Piecewise((512, 512), [(HALVES[rank % 2], half)], replicas=policy)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SHARE_NBYTES", 1 << 16)
        report = holdfast.save(run, state, 1, timeout_s=20)
    return report.nbytes, report.written_nbytes


@pytest.mark.parametrize(("policy", "num_writers", "world_size"), [("compare", 2, 4), ("split", 6, 6)])
def test_equal_pieces_are_stored_once_and_shared_out_where_declared(
    tmp_path: Path, policy: Policy, num_writers: int, world_size: int
) -> None:
    sizes = run_ranks(world_size, save_replicated, str(tmp_path), policy, False)
    assert sum(own for _, own in sizes) == sizes[0][0] < 1.1 * (1 << 20)
    assert sum(own > 0 for _, own in sizes) == num_writers
    stored = holdfast.open(str(tmp_path))["master/w"].numpy()
    assert stored.tobytes() == np.repeat(np.asarray([0.0, 1.0], np.float32), 1 << 17).tobytes()


def test_undeclared_copies_of_a_piece_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(4, save_replicated, str(tmp_path), "compare", True)
    errors = raised.value.by_rank
    assert sorted(errors) == [0, 1, 2, 3]
    assert all(isinstance(error, StateError) and error.code == "state.diverged" for error in errors.values())
    assert all("'master/w'" in str(error) and "[0] and [2]" in str(error) for error in errors.values())


def save_parts(run: str, parts: list[list[Box | FlatRange]]) -> str:
    """The code of the error of saving a 4 x 4 matrix whose parts are held so."""
    start_new_job()
    held = [(part, torch.zeros(part.size if isinstance(part, Box) else part.numel)) for part in parts[dist.get_rank()]]
    with pytest.raises(StateError) as raised:
        holdfast.save(run, {"w": Piecewise((4, 4), held, dtype=torch.float32)}, 1, timeout_s=20)
    assert raised.value.tensor == "w"
    return raised.value.code


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([[FlatRange(0, 9)], [FlatRange(8, 16)]], "state.coverage"),
        ([[FlatRange(0, 7)], [], [FlatRange(8, 16)]], "state.coverage"),
        ([[], []], "state.coverage"),
        ([[Box((0, 0), (4, 3))], [Box((0, 2), (4, 2))]], "state.coverage"),
        ([[FlatRange(0, 8)], [Box((2, 0), (2, 4))]], "state.mixed_pieces"),
    ],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused_by_name(
    tmp_path: Path, parts: list[list[Box | FlatRange]], code: str
) -> None:
    assert run_ranks(len(parts), save_parts, str(tmp_path), parts) == [code] * len(parts)


# One process.


def matrix(*, dtype: torch.dtype = torch.float32) -> Piecewise:
    ones = torch.ones(8, dtype=dtype)
    return Piecewise((2, 4), [(FlatRange(0, 5), ones[:5]), (FlatRange(5, 8), ones[5:])])


def test_one_object_under_two_names_is_tied_but_the_same_memory_in_two_objects_is_not(tmp_path: Path) -> None:
    item, flat = matrix(), torch.arange(8.0)
    shared = [Piecewise((8,), [(FlatRange(0, 8), flat)]) for _ in range(2)]
    holdfast.save(tmp_path, {"b": item, "a": item, "c": shared}, 1)
    view = holdfast.open(tmp_path)
    assert view.names() == ["a", "c/0", "c/1"]
    assert view.aliases == {"b": "a"}


def test_strided_memory_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"w": torch.arange(8.0).view(2, 4), "v": torch.arange(3.0)}, 1)
    strided, parameter = torch.zeros(16)[::2], torch.nn.Parameter(torch.zeros(3))
    state = {
        "w": Piecewise((2, 4), [(FlatRange(0, 8), strided)]),
        "v": Piecewise((3,), [(Box((0,), (3,)), parameter)]),
    }
    loaded = holdfast.load(tmp_path, state).state
    assert loaded is state
    assert strided.tolist() == list(range(8))
    assert parameter.tolist() == [0.0, 1.0, 2.0]


def test_pieces_in_lists_and_of_tensors_without_elements_are_tensors_as_any(tmp_path: Path) -> None:
    nothing = Piecewise((0, 3), [], dtype=torch.bfloat16)
    holdfast.save(tmp_path, {"parts": [1, matrix(), {"x": nothing}]}, 1)
    into = {"parts": [0, torch.zeros(2, 4), {"x": torch.zeros(0, 3, dtype=torch.bfloat16)}]}
    holdfast.load(tmp_path, into)
    assert into["parts"][0] == 1
    assert torch.equal(torch.as_tensor(into["parts"][1]), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("live", "code"),
    [
        (matrix(dtype=torch.float64), "incompatible.dtype"),
        (Piecewise((8,), [], dtype=torch.float32), "incompatible.shape"),
    ],
)
def test_another_dtype_or_shape_is_incompatible(tmp_path: Path, live: Piecewise, code: str) -> None:
    holdfast.save(tmp_path, {"w": matrix()}, 1)
    with pytest.raises(IncompatibleError, match="'w'") as raised:
        holdfast.load(tmp_path, {"w": live})
    assert raised.value.code == code


def test_a_value_does_not_fill_pieces_nor_pieces_a_value(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "tensor", {"w": matrix()}, 1)
    holdfast.save(tmp_path / "value", {"w": 3}, 1)
    for path, live in ((tmp_path / "tensor", 3), (tmp_path / "value", matrix())):
        with pytest.raises(IncompatibleError) as raised:
            holdfast.load(path, {"w": live})
        assert raised.value.code == "incompatible.kind"


def test_pieces_in_a_per_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="PerRank") as raised:
        holdfast.save(tmp_path, {"own": PerRank([matrix()])}, 1)
    assert raised.value.code == "state.per_rank"


def test_pieces_whose_memory_was_resized_are_refused(tmp_path: Path) -> None:
    memory = torch.zeros(4, 2)
    state = {"t": Piecewise((4, 2), [(Box((0, 0), (4, 2)), memory)])}
    memory.resize_(1, 2)
    with pytest.raises(StateError, match=r"shape is now \[1, 2\]") as raised:
        holdfast.save(tmp_path / "run", state, 1)
    assert (raised.value.code, raised.value.tensor) == ("state.local_shape", "t")


@pytest.mark.parametrize("left", [0, 28])
def test_pieces_whose_memory_was_released_or_made_smaller_are_refused(tmp_path: Path, left: int) -> None:
    flat = torch.ones(8)
    item = Piecewise((2, 4), [(FlatRange(0, 8), flat)])
    flat.untyped_storage().resize_(left)
    with pytest.raises(StateError, match="released, or made smaller") as raised:
        holdfast.save(tmp_path, {"w": item}, 1)
    assert raised.value.code == "state.unsupported_tensor"


ONES = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("shape", "pieces", "options", "message"),
    [
        ((2, 4), [], {}, "pass the dtype"),
        ((2, -4), [], {"dtype": torch.int8}, "negative"),
        ((2, 4), [], {"dtype": torch.qint8}, "cannot be stored"),
        ((2, 4), [], {"dtype": torch.int8, "replicas": "first"}, "replicas"),
        ((2, 4), [(FlatRange(0, 8), ONES)], {"dtype": torch.int8}, "dtype"),
        ((2, 4), [(FlatRange(0, 4), ONES[0]), (FlatRange(4, 8), ONES[1].double())], {}, "dtype"),
        ((2, 4), [(FlatRange(0, 7), ONES)], {}, "must have 7 elements"),
        ((2, 4), [(FlatRange(1, 9), ONES)], {}, "outside"),
        ((2, 4), [(FlatRange(-1, 7), ONES)], {}, "outside"),
        ((2, 4), [(FlatRange(7, 6), ONES[0, :0])], {}, "outside"),
        ((2, 4), [(FlatRange(0, 8), ONES.t())], {}, "contiguous"),
        ((2, 4), [(FlatRange(0, 4), ONES[0]), (FlatRange(3, 7), ONES[1])], {}, "overlap"),
        ((2, 4), [(Box((0, 0), (2, 4)), ONES.t())], {}, "must have shape"),
        ((2, 4), [(Box((1, 0), (2, 4)), ONES)], {}, "outside"),
        ((2, 4), [(Box((0,), (8,)), ONES.view(8))], {}, "outside"),
        ((2, 4), [(Box((0, 0), (2, 2)), ONES[:, :2]), (Box((1, 1), (1, 3)), ONES[:1, :3])], {}, "overlap"),
        ((), [(Box((), ()), ONES[0, 0]), (Box((), ()), ONES[0, 1])], {}, "overlap"),
        ((2, 4), [(FlatRange(0, 8), ONES.to("meta"))], {}, "meta"),
    ],
)
def test_pieces_that_contradict_themselves_are_refused_when_made(
    shape: Shape, pieces: list[tuple[Box | FlatRange, torch.Tensor]], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Piecewise(shape, pieces, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(FlatRange(0, 4), ONES[0]), (Box((1, 0), (1, 4)), ONES[1:])], "all flat ranges, or all boxes"),
        ([(slice(0, 8), ONES)], "slice"),
        ([((0, 8), ONES)], "tuple"),
        ([(FlatRange(0, 8), np.ones(8))], "ndarray"),
        ([(FlatRange(0.0, 8.0), ONES)], "float"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_piece_is_refused_when_made(pieces: list[tuple[FlatRange, torch.Tensor]], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Piecewise((2, 4), pieces)


def test_a_part_in_any_kind_of_integer_is_the_same_part() -> None:
    item = Piecewise(torch.Size([2, 4]), [(FlatRange(np.int64(0), np.int64(8)), ONES)])  # type: ignore[arg-type]
    assert [part for part, _ in item.pieces] == [FlatRange(0, 8)]
    assert repr(item) == "Piecewise((2, 4), torch.float32, [FlatRange(start=0, stop=8)])"
