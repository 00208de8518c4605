"""Save and load plans against brute force on full tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StateError
from holdfast.format import container
from holdfast.format.container import Files
from holdfast.geometry import Box, FlatRange, Shape
from holdfast.plan import replicas
from holdfast.plan.layout import Mesh, Pieces, Placed, Replicate, Shard, TensorLayout, Whole
from holdfast.plan.load import Want, pieces, plan_load
from tests.worlds import World, data_sections, worlds


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box of a tensor, empty ones too."""
    bounds = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def fill(world: World, files: Files, wants: list[Want], first_file: int) -> list[np.ndarray]:
    """Execute a load plan on simulated data sections."""
    sections = data_sections(world, files)
    itemsizes = files.itemsizes
    filled = [np.full((*want.box.size, itemsizes[want.tensor]), 0xDD, np.uint8) for want in wants]
    for reads in plan_load(files, wants, first_file=first_file):
        for read in map(reads.read, range(len(reads))):
            want, itemsize = wants[read.want], int(itemsizes[wants[read.want].tensor])
            rows = np.frombuffer(bytes(sections[reads.file][read.start : read.stop]), np.uint8).reshape(-1, itemsize)
            for at, stored, source, target in pieces(read, want.box, 0, len(rows)):
                held = rows[at : at + stored.numel].reshape(*stored.size, itemsize)
                filled[read.want][target.slices()] = held[source.slices()]
    return filled


@given(worlds(), st.data())
def test_any_box_of_any_layout_comes_back_bit_for_bit(world: World, data: st.DataObject) -> None:
    files = Files(world.plan())
    names = list(files.manifest.body.names)
    assert names == sorted(world.full)
    wants = [Want(number, data.draw(boxes_in(files.manifest.shape(number)))) for number in range(len(names))]
    filled = fill(world, files, wants, first_file=data.draw(st.integers(0, 8)))
    for want, got in zip(wants, filled, strict=True):
        assert np.array_equal(got, world.full[names[want.tensor]][want.box.slices()])


@given(worlds())
def test_data_sections_are_packed_aligned_and_described_by_a_header_that_fits(world: World) -> None:
    files = Files(world.plan())
    for index in range(files.manifest.body.num_files):
        layout = files.layout(index)
        at = 0
        for entry in layout.entries:
            assert entry.offset == at
            assert entry.offset % files.itemsizes[entry.tensor] == 0
            at += entry.nbytes
        assert layout.values_offset == at
        assert layout.data_start % container.ALIGNMENT == 0
        table = bytes(16 * container.num_blocks(layout.data_nbytes))
        header = container.header(files.manifest, layout, table)
        assert len(header) == layout.data_start
        described = json.loads(header[8:])
        assert header[container.TABLE_OFFSET :].startswith(table.hex().encode())
        assert len(described) == 1 + len(layout.entries) + (layout.values is not None)


@given(worlds(), st.integers(1, 200))
def test_replicas_are_split_without_losing_an_element_whatever_the_share(world: World, share: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SHARE_NBYTES", share)
        files = Files(world.plan())
    wants = [
        Want(number, Box((0,) * len(s), s))
        for number, s in enumerate(map(files.manifest.shape, range(len(world.full))))
    ]
    for want, got in zip(wants, fill(world, files, wants, first_file=0), strict=True):
        assert np.array_equal(got, world.full[files.manifest.body.names[want.tensor]])


def _one_piece(part: Box | FlatRange) -> Pieces:
    return Pieces.boxes(part) if isinstance(part, Box) else Pieces.ranges(part)


def _replicated(world_size: int, sizes: list[int]) -> World:
    layouts = [TensorLayout(f"t{i:03d}", "float32", (n, 16), Whole("split")) for i, n in enumerate(sizes)]
    return World([layouts] * world_size, {})


def _file_nbytes(files: Files) -> list[int]:
    values = sum(block.capacity for block in files.manifest.body.values)
    totals = files.columns(np.arange(files.manifest.body.num_files)).data_nbytes.tolist()
    return [totals[0] - values, *totals[1:]]


def test_large_replicated_state_is_written_in_equal_shares() -> None:
    rng = np.random.default_rng(0)
    for world_size in (2, 3, 8):
        sizes = rng.integers(1, 600_000, 40).tolist()
        nbytes = _file_nbytes(Files(_replicated(world_size, sizes).plan()))
        assert len(nbytes) == world_size
        assert max(nbytes) / (sum(nbytes) / world_size) <= 1.05


def test_small_replicated_state_is_not_scattered() -> None:
    assert len(_file_nbytes(Files(_replicated(8, [100] * 50).plan()))) == 1


def test_hybrid_sharding_splits_each_shard_between_its_replicas_in_grids() -> None:
    mesh = Mesh((2, 4), tuple(range(8)))
    layouts = [TensorLayout(f"w{i}", "float32", (4096, 4096), Placed(mesh, (Replicate(), Shard(0)))) for i in range(5)]
    files = Files(World([layouts] * 8, {}).plan())
    nbytes = _file_nbytes(files)
    assert max(nbytes) / (sum(nbytes) / 8) <= 1.05
    assert {type(part).__name__ for part in files.manifest.body.partition_table} == {"Grid"}


def test_the_lowest_holder_writes_buffers_that_may_differ() -> None:
    layouts = [TensorLayout("running_mean", "float32", (1 << 24,), Whole("first"))]
    files = Files(World([layouts] * 4, {}).plan())
    assert files.manifest.body.num_files == 1
    assert files.manifest.sequence(files.manifest.body.writers).tolist() == [0]


def test_a_dtensor_that_a_rank_of_its_mesh_lacks_is_refused() -> None:
    spec = Placed(Mesh((2,), (0, 1)), (Shard(0),))
    world = World([[TensorLayout("w", "float32", (4,), spec)], []], {})
    with pytest.raises(StateError, match=r"'w'.*ranks 1"):
        world.plan()


def test_ranks_that_disagree_about_shape_or_dtype_are_refused() -> None:
    world = World(
        [[TensorLayout("w", "float32", (4,), Whole("split"))], [TensorLayout("w", "float16", (4,), Whole("split"))]], {}
    )
    with pytest.raises(StateError, match=r"float32.*rank 0.*float16.*rank 1"):
        world.plan()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FlatRange(0, 3), FlatRange(4, 8)], "flat element 3 of 8 is not held"),
        ([FlatRange(0, 5), FlatRange(4, 8)], "flat element 4 of 8 is held in two"),
        ([FlatRange(0, 4), FlatRange(4, 7)], "flat element 7 of 8 is not held"),
        ([Box((0, 0), (1, 4)), Box((1, 1), (1, 3))], r"element \[1, 0\] is not held"),
        ([Box((0, 0), (2, 2)), Box((0, 1), (2, 3))], r"element \[0, 1\] is held in 2"),
        ([Box((0, 0), (2, 2)), Box((0, 2), (2, 3))], "outside shape"),
    ],
)
def test_pieces_that_do_not_cover_exactly_once_are_refused(parts: list[Box | FlatRange], message: str) -> None:
    layouts = [[TensorLayout("w", "float32", (2, 4), _one_piece(part))] for part in parts]
    with pytest.raises(StateError, match=message):
        World(layouts, {}).plan()


def test_identical_pieces_of_several_ranks_are_replicas() -> None:
    parts = [FlatRange(0, 4), FlatRange(4, 8), FlatRange(0, 4), FlatRange(4, 8)]
    layouts = [[TensorLayout("w", "uint8", (2, 4), Pieces.ranges(part))] for part in parts]
    world = World(layouts, {"w": np.arange(8, dtype=np.uint8).reshape(2, 4, 1)})
    files = Files(world.plan())
    (got,) = fill(world, files, [Want(0, Box((0, 0), (2, 4)))], 0)
    assert np.array_equal(got, world.full["w"])


def test_a_rank_without_parts_does_not_say_how_others_hold_the_tensor() -> None:
    parts = [Pieces.boxes(Box((0, 0), (2, 4))), Pieces.boxes(), Pieces.ranges()]
    world = World([[TensorLayout("w", "uint8", (2, 4), part)] for part in parts], {})
    assert world.plan().body.num_files == 1


def test_what_nobody_declared_replicated_is_written_whole_by_one_holder() -> None:
    layouts = [TensorLayout(f"t{i}", "float32", (1 << 22,), Whole("compare")) for i in range(8)]
    files = Files(World([layouts] * 4, {}).plan())
    assert all(len(files.cells(tensor).owners) == 1 for tensor in range(8))
    nbytes = _file_nbytes(files)
    assert len(nbytes) == 4
    assert max(nbytes) == min(nbytes)
