"""Slices of a view: right on any layout and any store, with few bytes read and little memory; mapped on request."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import CorruptError
from holdfast.format.container import Files
from holdfast.geometry import Shape
from holdfast.plan.layout import Mesh, Pieces, Placed, Shard, TensorLayout, Whole
from holdfast.store.base import Bytes
from holdfast.view import source
from tests.support.faulty_storage import Count, FaultyStore
from tests.support.published import put
from tests.support.worlds import World, worlds
from tests.view.stored_views import Remembering, published, view_of

MIB = 1 << 20
ROWS, WIDTH = 4096, 1024
ROW_NBYTES = 4 * WIDTH


def table(name: str) -> TensorLayout:
    return TensorLayout(name, "int32", (ROWS, WIDTH), Whole("compare"))


def stored_table() -> tuple[Remembering, npt.NDArray[Any]]:
    """One int32 table of 16 MiB in one file."""
    content = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    full = content.view(np.uint8).reshape(ROWS, WIDTH, 4)
    return Remembering(published(World([[table("w")]], {"w": full}))), content


#: Hypothesis wants no fixtures.
TABLE = stored_table()


def starts_and_steps(extent: int) -> st.SearchStrategy[slice | int]:
    ends = st.none() | st.integers(-extent - 1, extent + 1)
    slices: st.SearchStrategy[slice | int] = st.builds(slice, ends, ends, st.none() | st.integers(-4, 4).filter(bool))
    return st.one_of(slices, st.integers(-extent, extent - 1)) if extent else slices


@st.composite
def indexes(draw: st.DrawFn, shape: Shape) -> tuple[Any, ...]:
    return tuple(draw(starts_and_steps(extent)) for extent in shape[: draw(st.integers(0, len(shape)))])


@given(data=st.data(), world=worlds(), verify=st.booleans())
def test_any_slice_of_any_layout_is_what_numpy_gives(data: st.DataObject, world: World, verify: bool) -> None:
    view = view_of(published(world), verify=verify)
    for name in view.names():
        lazy = view[name]
        index = data.draw(indexes(lazy.shape))
        expected = world.full[name][index]  # the last axis is the bytes of an element
        found = lazy[index]
        assert tuple(found.shape) == expected.shape[:-1]
        assert bits(found) == expected.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_opening_and_looking_at_names_shapes_and_dtypes_reads_no_data_file() -> None:
    count = Count()
    view = view_of(FaultyStore(TABLE[0], count))
    assert (view.step, view.names(), dict(view.aliases), "w" in view) == (7, ["w"], {}, True)
    assert (view["w"].shape, view["w"].dtype, view["w"].nbytes) == ((ROWS, WIDTH), "int32", 16 * MIB)
    assert not [path for _, path in count.seen if path.endswith(".safetensors")]
    assert len(count.seen) <= 9


def test_opening_costs_no_more_requests_when_there_are_more_files() -> None:
    def requests(num_files: int) -> int:
        spec = Placed(Mesh((num_files,), tuple(range(num_files))), (Shard(0),))
        layouts = [[TensorLayout("w", "uint8", (64, 1), spec)] for _ in range(num_files)]
        storage = published(World(layouts, {"w": np.zeros((64, 1, 1), np.uint8)}))
        count = Count()
        assert view_of(FaultyStore(storage, count)).names() == ["w"]
        return len(count.seen)

    assert requests(1) == requests(32)


@given(first=st.integers(0, ROWS - 1), num=st.integers(1, 700))
def test_a_slice_reads_the_blocks_that_hold_it_and_nothing_else(first: int, num: int) -> None:
    storage, content = TABLE
    view = view_of(storage)
    stop = min(first + num, ROWS)
    assert np.array_equal(view["w"].numpy(slice(first, stop)), content[first:stop])
    touched = range(first * ROW_NBYTES // MIB, -(-stop * ROW_NBYTES // MIB))
    reads = storage.data_reads(view)
    assert sum(read.stop - read.start for read in reads) <= len(touched) * MIB
    assert min(read.start for read in reads) == touched.start * MIB
    assert max(read.stop for read in reads) <= touched.stop * MIB


@given(data=st.data(), world=worlds(), copies=st.integers(1, 6))
def test_offsets_of_some_tensors_are_the_same_as_among_all(data: st.DataObject, world: World, copies: int) -> None:
    # Tensors that are divided alike: few offsets are computed in another way than many.
    layouts = [
        [msgspec.structs.replace(layout, name=f"{layout.name}.{copy}") for copy in range(copies) for layout in rank]
        for rank in world.layouts
    ]
    files = Files(World([sorted(rank, key=lambda layout: layout.name) for rank in layouts], {}).plan())
    everywhere = np.arange(files.manifest.body.num_files)
    wanted = sorted(data.draw(st.sets(st.integers(0, max(len(files.order) - 1, 0))))) if len(files.order) else []
    some, every = files.columns(everywhere, np.asarray(wanted, np.int64)), files.columns(everywhere)
    assert np.array_equal(some.offsets, every.offsets[:, wanted])
    assert np.array_equal(some.data_starts, every.data_starts)
    assert np.array_equal(some.data_nbytes, every.data_nbytes)


def test_without_verification_a_slice_reads_whole_pages_only() -> None:
    storage, content = TABLE
    view = view_of(storage, verify=False)
    assert view["w"].numpy((1000, slice(3, 5))).tolist() == content[1000, 3:5].tolist()
    (read,) = storage.data_reads(view)
    assert (read.start, read.stop) == (1000 * ROW_NBYTES, 1001 * ROW_NBYTES)


def test_steps_over_whole_blocks_leave_them_out() -> None:
    storage, content = TABLE
    view = view_of(storage)
    assert np.array_equal(view["w"].numpy(slice(None, None, -1024)), content[::-1024])
    assert sum(read.stop - read.start for read in storage.data_reads(view)) == 4 * MIB


def test_a_slice_takes_no_memory_for_what_it_leaves_out(tmp_path: Path) -> None:
    storage, content = TABLE
    view = holdfast.open(put(storage.objects, tmp_path / "run"))
    view["w"].numpy(0)
    tracemalloc.start()
    try:
        found = view["w"].numpy((slice(None, None, 7), slice(1, None, 64)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found, content[::7, 1::64])
    assert peak < MIB


def test_the_second_slice_of_a_file_asks_for_its_blocks_alone() -> None:
    storage, _ = TABLE
    view = view_of(storage)
    view["w"].numpy(0)
    storage.reads = []
    view["w"].numpy(5)
    assert [(read.stop - read.start) for read in storage.reads] == [MIB]


def local(tmp_path: Path) -> tuple[Path, npt.NDArray[Any]]:
    """Tables in a folder: `w` in one piece, `cut` in pieces of 10 rows and of what is left."""
    _, content = TABLE
    full = content[:64].view(np.uint8).reshape(64, WIDTH, 4)
    layouts = [
        [TensorLayout("cut", "float32", (64, WIDTH), Pieces.boxes(box)), TensorLayout("w", "int32", (64, WIDTH), spec)]
        for box, spec in (
            (holdfast.Box((0, 0), (10, WIDTH)), Whole("first")),
            (holdfast.Box((10, 0), (54, WIDTH)), Whole("first")),
        )
    ]
    world = World(layouts, {"w": full, "cut": full})
    return put(published(world).objects, tmp_path / "run"), content[:64]


def test_unverified_pieces_of_local_files_are_mapped_not_read(tmp_path: Path) -> None:
    run, content = local(tmp_path)
    view = holdfast.open(run, verify=False)
    one, other = view["w"].numpy(), view["w"].numpy(slice(8, 40, 2))
    assert np.array_equal(one, content)
    assert np.array_equal(other, content[8:40:2])
    assert np.shares_memory(one, other)
    assert np.shares_memory(view.numpy("w")["w"], one)
    assert np.array_equal(view["cut"].numpy(slice(2, 9)).view(np.int32), content[2:9])
    assert np.shares_memory(view["cut"].numpy(2), view["cut"].numpy(slice(1, 4)))
    # The view puts the parts of a tensor that lies in two files together.
    assert np.array_equal(view["cut"].numpy().view(np.int32), content)
    assert not np.shares_memory(view["cut"].numpy(), view["cut"].numpy())


def test_unverified_arrays_are_read_only_mapped_or_not(tmp_path: Path) -> None:
    view = holdfast.open(local(tmp_path)[0], verify=False)
    for array in (view["w"].numpy(), view["cut"].numpy(), view["w"].numpy((3, 4)), *view.numpy().values()):
        assert not array.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view["w"].numpy().flags.writeable = True


def test_mapped_torch_tensors_are_the_callers_own(tmp_path: Path) -> None:
    run, content = local(tmp_path)
    view = holdfast.open(run, verify=False)
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    for tensor in (view["w"][...], view.torch("w")["w"], view["w"][::-1].flip(0)):
        assert np.array_equal(tensor.numpy(), content)
        tensor.add_(1)
        assert np.array_equal(tensor.numpy(), content + 1)
    assert np.array_equal(view["w"].numpy(), content)
    assert {path: path.read_bytes() for path in before} == before


def test_mapped_arrays_outlive_the_view_and_the_file(tmp_path: Path) -> None:
    run, content = local(tmp_path)
    array = holdfast.open(run, verify=False)["w"].numpy()
    for path in run.rglob("*.safetensors"):
        path.unlink()
    assert np.array_equal(array, content)


def test_mappings_take_no_descriptors_and_go_with_their_arrays(tmp_path: Path) -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    view = holdfast.open(local(tmp_path)[0], verify=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    tensors, arrays = [view["w"][row] for row in range(64)], [view["w"].numpy(row) for row in range(64)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert num_mappings() == 65
    del tensors
    assert num_mappings() == 1
    del arrays
    assert num_mappings() == 0


def test_what_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, start: int, stop: int, *, private: bool) -> Bytes:
        raise OSError(errno.ENODEV, "no mappings here", path)

    run, content = local(tmp_path)
    monkeypatch.setattr(source, "map_file", refuse)
    view = holdfast.open(run, verify=False)
    array = view["w"].numpy()
    assert np.array_equal(array, content)
    assert not array.flags.writeable
    assert np.array_equal(view.torch()["w"].numpy(), content)
    assert {piece.name for piece in view.in_file_order()} == {"w", "cut"}


def test_a_file_that_was_cut_off_is_not_mapped(tmp_path: Path) -> None:
    run, _ = local(tmp_path)
    view = holdfast.open(run, verify=False)
    for path in run.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    with pytest.raises(CorruptError, match="bytes instead of"):
        view["w"].numpy()
    with pytest.raises(CorruptError, match="bytes instead of"):
        view["w"][...]


def test_verified_arrays_are_no_mappings_and_may_be_written_to(tmp_path: Path) -> None:
    run, content = local(tmp_path)
    view = holdfast.open(run)
    array = view["w"].numpy()
    array += 1
    assert np.array_equal(view["w"].numpy(), content)
