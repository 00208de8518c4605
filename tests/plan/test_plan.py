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
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Mesh, PieceReplicas, Pieces, Placed, Replicate, Shard, TensorLayout, Whole
from holdfast.plan.load import ReadRequest
from holdfast.plan.save import ManifestTemplate, RankMessage, plan_save
from tests.support.worlds import World, data_sections, fill, worlds


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box of a tensor, empty ones too."""
    bounds = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@given(worlds(), st.data())
def test_any_box_of_any_layout_comes_back_bit_for_bit(world: World, data: st.DataObject) -> None:
    files = Files(world.plan())
    names = list(files.manifest.body.names)
    assert names == sorted(world.full)
    wants = [ReadRequest(number, data.draw(boxes_in(files.manifest.shape(number)))) for number in range(len(names))]
    filled = fill(files, data_sections(world, files), wants, first_file=data.draw(st.integers(0, 8)))
    for want, got in zip(wants, filled, strict=True):
        assert np.array_equal(got, world.full[names[want.tensor]][want.box.slices()])


@given(worlds())
def test_data_sections_are_packed_aligned_and_described_by_a_header_that_fits(world: World) -> None:
    manifest = world.plan()
    files = Files(manifest)
    for index in range(manifest.body.num_files):
        layout = files.layout(index)
        at = 0
        for entry in layout.entries:
            assert entry.offset == at
            assert entry.offset % files.itemsizes[entry.tensor] == 0
            at += entry.nbytes
        assert layout.values_offset == at
        assert layout.data_start % container.ALIGNMENT == 0
        table = bytes(16 * container.num_blocks(layout.data_nbytes))
        header = container.header(manifest, layout, table)
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
        ReadRequest(number, Box((0,) * len(s), s))
        for number, s in enumerate(map(files.manifest.shape, range(len(world.full))))
    ]
    filled = fill(files, data_sections(world, files), wants, first_file=0)
    for want, got in zip(wants, filled, strict=True):
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
    (got,) = fill(files, data_sections(world, files), [ReadRequest(0, Box((0, 0), (2, 4)))], 0)
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


def _of(name: str, spec: Pieces, shape: Shape = (2, 4)) -> TensorLayout:
    return TensorLayout(name, "float32", shape, spec)


def test_ranks_send_one_body_whatever_pieces_they_hold() -> None:
    flat, boxes, nothing = Pieces.ranges(FlatRange(0, 8)), Pieces.boxes(Box((0, 0), (2, 4))), Pieces.ranges()
    layouts = [[_of("a", flat), _of("b", boxes)], [_of("a", nothing), _of("b", nothing)]]
    messages, bodies = World(layouts, {}).sent()
    assert len(bodies) == 1
    assert len({message.columns for message in messages}) == 2


def test_an_empty_piece_of_a_tensor_without_axes_is_no_copy_of_it() -> None:
    parts: list[Box | FlatRange] = [FlatRange(0, 0), Box((), ()), FlatRange(1, 1)]
    files = Files(World([[_of("scale", _one_piece(part), ())] for part in parts], {}).plan())
    assert files.manifest.sequence(files.manifest.body.writers).tolist() == [0, 1]  # rank 0 for the values
    assert files.cells(0).owners.tolist() == [1]


def test_tensors_with_equal_pieces_cost_one_slot() -> None:
    layouts = [_of(f"t{i:04d}", Pieces.ranges(FlatRange(1, 3))) for i in range(5000)]
    assert len(RankLayout.of(layouts, {}).columns) < 256


def test_tensors_cut_alike_on_one_rank_only_are_told_apart() -> None:
    cuts = {"a": (4, 8), "b": (4, 6, 8)}
    layouts = [
        [_of(name, Pieces.ranges(FlatRange(0, 4))) for name in cuts],
        [_of("a", Pieces.ranges(FlatRange(4, 8))), _of("b", Pieces.ranges(FlatRange(4, 6)))],
        [_of("a", Pieces.ranges()), _of("b", Pieces.ranges(FlatRange(6, 8)))],
    ]
    files = Files(World(layouts, {}).plan())
    assert [files.cells(tensor).numels.tolist() for tensor in range(2)] == [[4, 4], [4, 2, 2]]
    assert [files.cells(tensor).owners.tolist() for tensor in range(2)] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize(("policy", "num_writers"), [("split", 2), ("compare", 1)])
def test_equal_pieces_are_shared_out_where_they_are_declared_equal(policy: PieceReplicas, num_writers: int) -> None:
    shape = (8192, 4096)
    halves = [FlatRange(0, 1 << 24), FlatRange(1 << 24, 1 << 25)]
    for parts in (halves, [Box((0, 0), (4096, 4096)), Box((4096, 0), (4096, 4096))]):
        layouts = [[_of("w", Pieces((parts[rank % 2],), policy), shape)] for rank in range(4)]
        files = Files(World(layouts, {}).plan())
        cells = files.cells(0)
        assert cells.numels.tolist() == [(1 << 24) // num_writers] * 2 * num_writers
        assert len(set(cells.owners.tolist())) == 2 * num_writers


def test_pieces_are_shared_out_only_where_all_holders_declare_them_equal() -> None:
    whole = FlatRange(0, 1 << 24)
    policies: tuple[PieceReplicas, ...] = ("split", "compare")
    layouts = [[_of("w", Pieces.ranges(whole, replicas=policy), (4096, 4096))] for policy in policies]
    assert len(Files(World(layouts, {}).plan()).cells(0).owners) == 1


def test_more_boxes_than_a_reader_could_check_are_refused_when_they_are_planned() -> None:
    # Every other row is cut in two, so it is no grid; and of 8 axes, so each box has 256 corners.
    middle, rows = (0,) * 6, range(3700)
    boxes = [
        Box((row, *middle, at), (1, *(1,) * 6, 1 if row % 2 else 2))
        for row in rows
        for at in ((0, 1) if row % 2 else (0,))
    ]
    layout = TensorLayout("w", "uint8", (len(rows), *(1,) * 6, 2), Pieces.boxes(*boxes))
    sent = RankLayout.of([layout], {})
    plan = plan_save([RankMessage(sent.digest, sent.columns)], {sent.digest: sent.body})
    with pytest.raises(StateError) as refused:
        ManifestTemplate.of(plan, [])
    assert refused.value.code == "state.too_many_boxes"
