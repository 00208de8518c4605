"""Data files: any safetensors reader opens them, and their header's length is known before its text."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import container
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedManifest, FlatCuts, Grid, Manifest, Partition, SequenceTable, ValueBlock
from holdfast.geometry import Int64s, Shape
from holdfast.plan.layout import TensorLayout, Whole
from tests.support.worlds import World, data_sections, worlds

SPEC = Path(__file__).parents[2] / "docs" / "SPEC.md"


def manifest_of(files: Files) -> DecodedManifest:
    """The manifest, not only the table, from which `files` were derived."""
    assert isinstance(files.manifest, DecodedManifest)
    return files.manifest


def header(files: Files, index: int) -> bytes:
    """The header of a data file with some digests."""
    layout = files.layout(index)
    table = b"".join(
        xxhash.xxh3_128_digest(bytes([at % 251])) for at in range(container.num_blocks(layout.data_nbytes))
    )
    return container.header(manifest_of(files), layout, table)


def stock(data: bytes) -> dict[str, dict[str, Any]]:
    """The entries of a file as safetensors' own reader finds them."""
    return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]


def files_of(
    name: str,
    shape: Shape,
    dtype: str,
    *,
    kind: str,
    cuts: list[Int64s],
    num_files: int = 1,
    file: int = 0,
    values: tuple[ValueBlock, ...] = (),
) -> Files:
    """One tensor, wholly in one of `num_files` files, divided at `cuts`."""
    table = SequenceTable()
    numbers = tuple(table.add(axis) for axis in cuts)
    num_cells = prod(len(axis) - 1 for axis in cuts)
    owners = table.add(np.full(num_cells, file, np.int64))
    partition: Partition = Grid(numbers, owners) if kind == "grid" else FlatCuts(numbers[0], owners)
    body = Manifest(
        checkpoint_id="0123456789abcdef",
        run_id="0" * 32,
        place=(1, 1),
        step=0,
        created=0.0,
        world_size=1,
        metrics={},
        reader_features=(),
        names=(name,),
        dtype_table=(dtype,),
        dtypes=(0,),
        shape_table=(shape,),
        shapes=(0,),
        partition_table=(partition,),
        partitions=(0,),
        aliases={},
        diverged=(),
        num_files=num_files,
        writers=table.add(np.arange(num_files)),
        values=values,
        sequences=tuple(table.sequences),
    )
    return Files(fmt.decode(fmt.encode(body, table.blobs), path="manifest"))


@given(worlds())
def test_the_stock_reader_finds_every_piece(world: World) -> None:
    files = Files(world.plan())
    for index, section in enumerate(data_sections(world, files)):
        layout = files.layout(index)
        found = stock(header(files, index) + bytes(section))
        assert len(found) == len(layout.entries) + (layout.values is not None)
        for entry in layout.entries:
            tensor = files.manifest.body.names[entry.tensor]
            matches = [name for name in found if name == tensor or name.startswith(f"{tensor}@")]
            data = bytes(section[entry.offset : entry.offset + entry.nbytes])
            dtype = DTYPES[files.manifest.dtype(entry.tensor)]
            assert any(
                found[name]["data"] == data
                and found[name]["dtype"] == dtype.code
                and prod(found[name]["shape"]) == entry.nbytes // (dtype.itemsize if dtype.native else 1)
                for name in matches
            )


@given(worlds())
def test_columns_of_many_files_are_the_layouts_of_each(world: World) -> None:
    files = Files(world.plan())
    columns = files.columns(np.arange(files.manifest.body.num_files))
    for index in range(files.manifest.body.num_files):
        layout = files.layout(index)
        assert columns.data_starts[index] == layout.data_start
        assert columns.data_nbytes[index] == layout.data_nbytes
        first: dict[int, int] = {}
        for entry in layout.entries:
            first.setdefault(entry.tensor, entry.offset)
        for tensor, offset in first.items():
            assert columns.offsets[index, files.position[tensor]] == offset


def described(name: str, dtype: str, *shape: int) -> TensorLayout:
    return TensorLayout(name, dtype, shape, Whole("split"))


@pytest.mark.parametrize("features", [(), (fmt.SMALL_LAST,)])
def test_small_tensors_lie_behind_the_others_of_their_element_size_where_the_manifest_says_so(
    features: tuple[str, ...],
) -> None:
    layouts = [
        described("a/small", "float32", 16384),
        described("b/large", "float32", 16385),
        described("c/scalar", "float32"),
        described("d/half", "bfloat16", 40000),
        described("e/wide", "float64", 2),
        described("f/large", "float32", 10**7),
    ]
    planned = World([layouts], {}).plan()
    files = Files(planned.with_body(msgspec.structs.replace(planned.body, reader_features=features)))
    order = [planned.body.names[number][0] for number in files.order.tolist()]
    assert order == (["e", "b", "f", "a", "c", "d"] if features else ["e", "a", "b", "c", "f", "d"])
    assert [planned.body.names[entry.tensor][0] for entry in files.layout(0).entries] == order


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@"), min_size=1, max_size=100)


@st.composite
def odd_tensors(draw: st.DrawFn) -> Files:
    """Tensors with odd names, many axes, huge extents and many pieces, in files with huge numbers."""
    kind = draw(st.sampled_from(["grid", "flat"]))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape: tuple[int, ...] = tuple(draw(st.lists(st.integers(1, 2**12), max_size=12)))
    while prod(shape) > 2**50:
        shape = shape[1:]
    if draw(st.booleans()):
        shape = (*shape, 2**50 // prod(shape))
    extents = shape if kind == "grid" else (prod(shape),)
    cuts = []
    for extent in extents:
        inner = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
        cuts.append(np.asarray([0, *sorted(inner), extent], np.int64))
    while prod(len(axis) - 1 for axis in cuts) > 64:
        longest = max(range(len(cuts)), key=lambda axis: len(cuts[axis]))
        cuts[longest] = cuts[longest][[0, -1]]
    capacity = draw(st.sampled_from([0, 8, 4096, 2**31]))
    file = draw(st.integers(0, 12))
    values = (ValueBlock(file, capacity, ()),) if capacity else ()
    return files_of(draw(names), shape, dtype, kind=kind, cuts=cuts, num_files=13, file=file, values=values)


def text_of(files: Files, index: int) -> str:
    """The header without its table, however long the bound says that it is. Tables of petabytes are not made."""
    layout = replace(files.layout(index), data_nbytes=0, data_start=1 << 18)
    return container.header(manifest_of(files), layout, b"")[8:].decode("ascii").rstrip(" ")


@given(odd_tensors())
def test_the_bound_of_the_header_is_never_too_small(files: Files) -> None:
    shape = files.manifest.shape(0)
    for index in sorted({0, *files.cells(0).owners.tolist()}):
        layout = files.layout(index)
        text = text_of(files, index)
        room = layout.data_start - 8 - len(text) - 32 * container.num_blocks(layout.data_nbytes)
        num_entries = len(layout.entries) + (layout.values is not None)
        slack = 96 + 3 * max(len(shape), 1) * (len(str(prod(shape))) + 1)
        assert 0 <= room < container.ALIGNMENT + num_entries * slack
        described = json.loads(text)
        assert len(described) == 1 + num_entries
        stops = [entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"]
        assert max(stops, default=0) == layout.data_nbytes


@pytest.mark.parametrize(
    "name", ['"', "\\", "\x00", "\x7f", "\u00e9", "\U0001f600", "\ud7ff\ue000", " ", "{}", "a" * 9999]
)
def test_names_of_any_characters_come_back_from_the_stock_reader(name: str) -> None:
    full = name * 3
    files = files_of(full, (2, 3), "float32", kind="grid", cuts=[np.asarray([0, 2]), np.asarray([0, 3])])
    data = header(files, 0) + bytes(range(24))
    assert stock(data)[full]["data"] == bytes(range(24))
    assert json.loads(data[8 : files.layout(0).data_start])[full]["shape"] == [2, 3]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", ["grid", "flat"])
def test_the_name_that_safetensors_reserves_always_gets_a_part(shape: Shape, kind: str) -> None:
    extents = shape if kind == "grid" else (prod(shape),)
    cuts = [np.asarray([0, extent]) for extent in extents]
    files = files_of("__metadata__", shape, "uint8", kind=kind, cuts=cuts)
    part = ",".join(f"0:{extent}" for extent in extents)
    ((name, entry),) = stock(header(files, 0) + bytes(prod(shape))).items()
    assert name == f"__metadata__@{part}"
    assert entry["dtype"] == "U8"


def test_pieces_are_named_after_their_part_unless_they_are_the_whole() -> None:
    def described(shape: Shape, kind: str, *cuts: list[int]) -> list[str]:
        files = files_of("t", shape, "int8", kind=kind, cuts=[np.asarray(axis) for axis in cuts])
        return list(json.loads(header(files, 0)[8:]))[1:]

    assert described((), "grid") == ["t"]
    assert described((), "flat", [0, 1]) == ["t@0:1"]
    assert described((4,), "grid", [0, 4]) == ["t"]
    assert described((4,), "flat", [0, 4]) == ["t"]
    assert described((4,), "flat", [0, 1, 4]) == ["t@0:1", "t@1:4"]
    assert described((2, 3), "flat", [0, 6]) == ["t@0:6"]
    assert described((2, 3), "grid", [0, 2], [0, 1, 3]) == ["t@0:2,0:1", "t@0:2,1:3"]
    assert described((0, 3), "grid", [0], [0, 3]) == []


def test_the_digest_table_stands_where_the_specification_says() -> None:
    files = files_of("t", (3 << 20,), "uint8", kind="grid", cuts=[np.asarray([0, 3 << 20])])
    table = bytes(range(48))
    data = container.header(manifest_of(files), files.layout(0), table)
    assert data[container.TABLE_OFFSET :].startswith(table.hex().encode() + b'","checkpoint":')
    assert f"from file offset **{container.TABLE_OFFSET}**" in SPEC.read_text()


def test_the_headers_length_in_the_specification_is_the_codes() -> None:
    """The formula of section 7.4, and the worked sum of appendix A."""
    text = SPEC.read_text()
    files = files_of("t", (3,), "uint8", kind="grid", cuts=[np.asarray([0, 3])], num_files=1)
    metadata = container._metadata(manifest_of(files).body.checkpoint_id, 0, "")
    assert f"= {len(metadata) - 1} + digits(index)" in text
    worked = re.search(r"`T` of the header's length is (.*) = ([0-9]+)\.", text)
    assert worked is not None
    total = eval(compile(ast.parse(worked[1], mode="eval"), "SPEC.md", "eval"))
    assert total == int(worked[2])
    name, dtype = "model/weight", DTYPES["float32"]
    pieces = len(json.dumps(name)) + len(dtype.code) + 2 * (3 * 1 + 3) + container._ENTRY_NBYTES
    values = len(json.dumps(container.VALUES_NAME)) + 2 + len("4096") + container._ENTRY_NBYTES
    assert total == 9 + len(metadata) + 32 + pieces + values


@given(st.integers(0, 3), st.integers(0, 300))
def test_the_headers_length_follows_the_formula(num_axes: int, name_length: int) -> None:
    name, shape = "n" * (name_length + 1), (100,) * num_axes
    cuts = [np.asarray([0, 50, 100])] * num_axes
    files = files_of(
        name, shape, "bfloat16", kind="grid", cuts=cuts, num_files=11, file=10, values=(ValueBlock(10, 5000, ()),)
    )
    data_nbytes = 2 * 100**num_axes + 5000
    entry = (len(name) + 2) + 4 + max(num_axes, 1) * (3 * len(str(100**num_axes)) + 3) + 96
    total = 9 + 88 + 32 * -(-data_nbytes // 2**20) + 2**num_axes * entry + 107 + 4
    layout = files.layout(10)
    assert (layout.data_start, layout.data_nbytes) == (4096 * -(-total // 4096), data_nbytes)


def test_entries_are_ordered_by_element_size_then_name_then_cell() -> None:
    table = SequenceTable()
    halves = Grid((table.add(np.asarray([0, 1, 2])),), table.add(np.asarray([0, 0])))
    body = msgspec.structs.replace(
        files_of("t", (2,), "uint8", kind="grid", cuts=[np.asarray([0, 2])]).manifest.body,
        names=("a", "b", "c", "d"),
        dtype_table=("uint8", "float32", "complex128"),
        dtypes=(0, 1, 2, 1),
        shape_table=((2,),),
        shapes=(0, 0, 0, 0),
        partition_table=(halves,),
        partitions=(0, 0, 0, 0),
        writers=table.add(np.asarray([0])),
        sequences=tuple(table.sequences),
    )
    files = Files(fmt.decode(fmt.encode(body, table.blobs), path="manifest"))
    entries = files.layout(0).entries
    assert [(body.names[e.tensor], e.part.start, e.offset) for e in entries] == [
        *(("c", (0,), 0), ("c", (1,), 16), ("b", (0,), 32), ("b", (1,), 36)),
        *(("d", (0,), 40), ("d", (1,), 44), ("a", (0,), 48), ("a", (1,), 49)),
    ]


def test_a_file_without_data_is_a_valid_file_with_an_empty_table() -> None:
    files = files_of("t", (0,), "float32", kind="grid", cuts=[np.asarray([0])])
    layout = files.layout(0)
    assert layout.data_nbytes == 0
    assert stock(container.header(manifest_of(files), layout, b"")) == {}
