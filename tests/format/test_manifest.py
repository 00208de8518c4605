"""Manifests: they come back as they were, every flipped bit is noticed, and no claim is believed unchecked."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptError, HoldfastError, IncompatibleError
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.manifest import Boxes, FlatCuts, Grid, Manifest, Partition, SequenceTable, ValueBlock
from holdfast.format.sequences import Affine, Block, DifferencePlanes
from holdfast.geometry import Int64s, Shape
from tests.support.worlds import World, worlds

PATH = "somewhere/manifest.hfm"


def ints(*values: int) -> Int64s:
    return np.asarray(values, np.int64)


def small_manifest() -> tuple[Manifest, list[bytes]]:
    """One of everything: a grid, flat cuts, boxes, byte planes, values, an alias."""
    table = SequenceTable()
    rng = np.random.default_rng(4)
    cuts = np.concatenate([ints(0), np.sort(rng.choice(np.arange(1, 5000), 200, replace=False)), ints(5000)])
    zeros = table.add(np.zeros(len(cuts) - 1, np.int64))
    grid = Grid((table.add(ints(0, 2, 4)), table.add(ints(0, 3))), table.add(ints(0, 1)))
    flat = FlatCuts(table.add(cuts), zeros)
    boxes = Boxes(
        (table.add(ints(0, 0, 2)), table.add(ints(0, 1, 0))),
        (table.add(ints(2, 2, 2)), table.add(ints(1, 2, 3))),
        table.add(ints(1, 0, 1)),
    )
    body = Manifest(
        checkpoint_id="0123456789abcdef",
        run_id="0" * 32,
        place=(3, 12),
        step=700,
        created=1.5,
        world_size=8,
        metrics={"loss": float("inf")},
        reader_features=(),
        names=("a", "b", "c"),
        dtype_table=("float32", "bfloat16"),
        dtypes=(0, 1, 0),
        shape_table=((4, 3), (5, 10, 100)),
        shapes=(0, 1, 0),
        partition_table=(grid, flat, boxes),
        partitions=(0, 1, 2),
        aliases={"tied": "a"},
        diverged=("a", "c"),
        num_files=2,
        writers=table.add(ints(0, 5)),
        values=(ValueBlock(1, 4096, ("", "x")),),
        sequences=tuple(table.sequences),
    )
    return body, table.blobs


def altered(**changes: object) -> bytes:
    """A manifest that says something else, with a right digest."""
    body, blobs = small_manifest()
    return fmt.encode(msgspec.structs.replace(body, **changes), blobs)


def framed(packed: bytes, blob: bytes = b"", *, claimed: int | None = None, trailer: bytes = b"") -> bytes:
    """A manifest file around any body."""
    compressed = zlib.compress(packed) + trailer
    nbytes = len(packed) if claimed is None else claimed
    digest = xxhash.xxh3_128_digest(compressed + blob)
    return struct.pack("<8sQQQ16s", fmt.MAGIC, len(compressed), nbytes, len(blob), digest) + compressed + blob


def refusal(data: bytes) -> HoldfastError:
    with pytest.raises(CorruptError, match=r"corrupt\.manifest") as caught:
        fmt.decode(data, path=PATH)
    assert caught.value.path == PATH
    assert PATH in str(caught.value)
    return caught.value


def test_what_was_encoded_is_decoded() -> None:
    body, blobs = small_manifest()
    manifest = fmt.decode(fmt.encode(body, blobs), path=PATH)
    assert manifest.body == body
    assert str(manifest.place) == "3.12"
    assert manifest.sequence(body.writers).tolist() == [0, 5]
    assert manifest.shape(1) == (5, 10, 100)
    assert manifest.dtype(1) == "bfloat16"
    files = Files(manifest)
    assert [int(files.cells(tensor).numels.sum()) for tensor in range(3)] == [12, 5000, 12]


@given(worlds())
def test_planned_manifests_come_back(world: World) -> None:
    manifest = world.plan()
    again = fmt.decode(fmt.encode(manifest.body, [bytes(manifest._blob)]), path=PATH)
    assert again.body == manifest.body
    for index in range(len(manifest.body.sequences)):
        assert np.array_equal(again.sequence(index), manifest.sequence(index))


@given(st.lists(st.binary(min_size=1, max_size=3000).map(bytes.hex), unique=True).map(sorted))
def test_bodies_of_any_size_are_decompressed_to_their_end(names: list[str]) -> None:
    columns = (0,) * len(names)
    packed = altered(names=tuple(names), dtypes=columns, shapes=columns, partitions=columns, aliases={}, diverged=())
    assert fmt.decode(packed, path=PATH).body.names == tuple(names)


def test_equal_sequences_are_stored_once() -> None:
    table = SequenceTable()
    assert table.add(ints(0, 7, 9)) == table.add(ints(0, 7, 9))
    assert table.add(ints(0, 7, 8)) == 1
    assert len(table.sequences) == len(table.blobs) == 2


def test_every_flipped_bit_is_noticed() -> None:
    body, blobs = small_manifest()
    data = bytearray(fmt.encode(body, blobs))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            fmt.decode(bytes(data), path=PATH)
        data[bit // 8] ^= 1 << bit % 8
    assert fmt.decode(bytes(data), path=PATH).body == body


def test_every_truncation_and_every_appended_byte_is_noticed() -> None:
    body, blobs = small_manifest()
    data = fmt.encode(body, blobs)
    for nbytes in range(len(data)):
        assert refusal(data[:nbytes]).code == "corrupt.manifest"
    assert f"{len(data) + 1} bytes instead of {len(data)}" in str(refusal(data + b"\0"))


def test_an_unknown_reader_feature_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleError, match=r"incompatible\.feature.*quantum, zip-2") as caught:
        fmt.decode(altered(reader_features=("zip-2", "quantum")), path=PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize("rest", [{}, {"place": "as never seen before"}, {"names": 7, "invented": None}])
def test_an_unknown_reader_feature_is_named_whatever_the_rest_looks_like(rest: dict[str, object]) -> None:
    body = msgspec.to_builtins(small_manifest()[0]) | {"reader_features": ["time-travel"]} | rest
    with pytest.raises(IncompatibleError, match="time-travel"):
        fmt.decode(framed(msgspec.msgpack.encode(body)), path=PATH)


def test_an_unknown_member_without_a_feature_is_corruption() -> None:
    body = msgspec.to_builtins(small_manifest()[0]) | {"invented": 1}
    assert "invented" in str(refusal(framed(msgspec.msgpack.encode(body))))


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x90", b"\x80", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"])
def test_bodies_that_are_no_manifest_are_refused(packed: bytes) -> None:
    assert refusal(framed(packed)).code == "corrupt.manifest"


@pytest.mark.parametrize("field", [8, 16, 24])
@pytest.mark.parametrize("claim", [2**30 + 1, 2**40, 2**64 - 1])
def test_absurd_sizes_are_refused_before_memory_is_taken(field: int, claim: int) -> None:
    data = bytearray(altered())
    data[field : field + 8] = claim.to_bytes(8, "little")
    assert str(claim) in str(refusal(bytes(data))) or field == 8


@pytest.mark.parametrize("claimed", [0, 1, 1000, 2**20 - 1, 2**20 + 1])
def test_decompression_stops_at_the_claimed_size(claimed: int) -> None:
    assert "it claims" in str(refusal(framed(bytes(2**20), claimed=claimed)))


def test_bytes_after_the_compressed_body_are_refused() -> None:
    body, _ = small_manifest()
    packed = msgspec.msgpack.encode(msgspec.structs.replace(body, sequences=(Affine((Block(0, (2,), (5,)),)),) * 12))
    assert fmt.decode(framed(packed), path=PATH).body.step == 700
    assert "longer or shorter than it claims" in str(refusal(framed(packed, trailer=b"more")))


@pytest.mark.parametrize(
    "changes",
    [
        {"names": ("a", "b")},
        {"names": ("b", "a", "c")},
        {"names": ("a", "a", "c")},
        {"dtypes": (0, 1, 2)},
        {"dtypes": (0, -1, 0)},
        {"shapes": (0, 2, 0)},
        {"partitions": (0, 1, 3)},
        {"partitions": (-1, 1, 2)},
        {"dtype_table": ("float32", "float17")},
        {"shape_table": ((4, -3), (5, 10, 100))},
        {"shape_table": ((2**40, 2**40), (5, 10, 100))},
        {"shape_table": ((0, 2**62), (5, 10, 100))},
        {"shape_table": ((1,) * 65, (5, 10, 100))},
        {"shape_table": ((2**56,), (2**56,)), "dtype_table": ("complex128", "complex128"), "shapes": (0, 1, 0)}
        | {"names": tuple("abcdef"), "dtypes": (0,) * 6, "shapes": (0,) * 6, "partitions": (0,) * 6},
        {"aliases": {"tied": "z"}},
        {"aliases": {"a": "b"}},
        {"diverged": ("c", "a")},
        {"diverged": ("a", "a")},
        {"diverged": ("a", "z")},
        {"diverged": ("tied",)},
        {"num_files": -1},
        {"num_files": 2**17 + 1},
        {"checkpoint_id": "../../etc"},
        {"run_id": "0" * 31},
        {"created": -1.0},
        {"created": float("nan")},
        {"created": 1e300},
        {"world_size": 0},
        {"values": (ValueBlock(2, 4096, ()),)},
        {"values": (ValueBlock(-1, 4096, ()),)},
        {"values": (ValueBlock(1, -1, ()),)},
        {"values": (ValueBlock(1, 7, ()),)},
        {"values": (ValueBlock(1, 2**40, ()),)},
        {"values": (ValueBlock(1, 4096, ("a",)), ValueBlock(1, 4096, ("b",)))},
        {"place": (0, 1)},
        {"place": (1, 0)},
        {"step": -1},
        {"writers": 99},
        {"writers": -1},
        {"partition_table": (Grid((0, 99), 0), FlatCuts(0, 0), FlatCuts(0, 0))},
        {"partition_table": (Boxes((0,), (0,), -5), FlatCuts(0, 0), FlatCuts(0, 0))},
        {"sequences": (DifferencePlanes(2**40, 0, 0, 8),)},
        {"sequences": (DifferencePlanes(0, 0, 0, 8),)},
        {"sequences": ()},
        {"sequences": (Affine((Block(0, (2**27,), (1,)),)),) * 12},
        {"sequences": (Affine((Block(0, (2**18 + 10_000,), (1,)),)),) * 12},
    ],
    ids=lambda changes: str(changes)[:80],
)
def test_impossible_content_with_a_right_digest_is_corruption(changes: dict[str, object]) -> None:
    assert refusal(altered(**changes)).code == "corrupt.manifest"


def test_a_key_that_stands_twice_is_corruption() -> None:
    """Decoders keep the first or the last: readers would differ."""
    packed = msgspec.msgpack.encode(small_manifest()[0])
    blob = b"".join(small_manifest()[1])
    assert fmt.decode(framed(packed, blob), path=PATH).body.step == 700
    twice = [
        b"\xde" + (int.from_bytes(packed[1:3], "big") + 1).to_bytes(2, "big") + b"\xa4step\x07" + packed[3:],
        packed.replace(b"\xa7aliases\x81\xa4tied\xa1a", b"\xa7aliases\x82\xa4tied\xa1b\xa4tied\xa1a"),
        packed.replace(b"\xa7metrics\x81", b"\xa7metrics\x82\xa4loss\x01"),
    ]
    for data in twice:
        assert data != packed
        assert "twice" in str(refusal(framed(data, blob)))


def test_text_that_is_no_utf_8_and_endless_nesting_are_corruption() -> None:
    packed = msgspec.msgpack.encode(small_manifest()[0])
    no_text = packed.replace(b"\xa1a\xa1b\xa1c", b"\xa1\xff\xa1b\xa1c")
    endless = b"\x82\xafreader_features\x90\xa1x" + b"\x91" * 100_000 + b"\x90"
    for body in (no_text, endless):
        assert "its body is malformed" in str(refusal(framed(body)))


def test_names_that_repeat_themselves_as_a_bomb_does_are_stored_so_that_readers_take_them() -> None:
    names = tuple(f"{number:06}{'x' * 300}" for number in range(20_000))
    columns = (0,) * len(names)
    data = altered(names=names, dtypes=columns, shapes=columns, partitions=columns, aliases={}, diverged=())
    assert fmt.decode(data, path=PATH).body.names == names


def files_of(shape: Shape, partition: Partition, *sequences: Int64s) -> Files:
    """One tensor in two files, divided as a partition says."""
    table = SequenceTable()
    numbers = [table.add(values) for values in sequences]
    assert numbers == list(range(len(sequences)))
    body = msgspec.structs.replace(
        small_manifest()[0],
        names=("t",),
        dtypes=(0,),
        shape_table=(shape,),
        shapes=(0,),
        partition_table=(partition,),
        partitions=(0,),
        aliases={},
        diverged=(),
        writers=0,
        sequences=tuple(table.sequences),
    )
    return Files(fmt.decode(fmt.encode(body, table.blobs), path=PATH))


GRID, FLAT, BOXES = Grid((0, 1), 2), FlatCuts(0, 1), Boxes((0, 1), (2, 3), 4)


@pytest.mark.parametrize(
    ("shape", "partition", "sequences"),
    [
        ((4, 3), GRID, [(0, 4), (0, 2), (0,)]),
        ((4, 3), GRID, [(0, 4), (0, 3, 4), (0, 1)]),
        ((4, 3), GRID, [(1, 4), (0, 3), (0,)]),
        ((4, 3), GRID, [(0, 2, 2, 4), (0, 3), (0, 0, 0)]),
        ((4, 3), GRID, [(0, 3, 2, 4), (0, 3), (0, 0, 0)]),
        ((4, 3), GRID, [(0, 2, 4), (0, 3), (0,)]),
        ((4, 3), GRID, [(0, 2, 4), (0, 3), (0, 2)]),
        ((4, 3), GRID, [(0, 2, 4), (0, 3), (0, -1)]),
        ((4, 3), GRID, [(), (0, 3), ()]),
        ((4, 3, 1), GRID, [(0, 4), (0, 3), (0,)]),
        ((4,), GRID, [(0, 4), (0, 3), (0,)]),
        ((4, 3), FLAT, [(0, 11), (0,)]),
        ((4, 3), FLAT, [(0, 12), (0, 0)]),
        ((4, 3), FLAT, [(0, 0, 12), (0, 0)]),
        ((4, 3), FLAT, [(0, 12), (7,)]),
        ((4, 3), FLAT, [(0, 2**62, -(2**63), -(2**62), 12), (0, 0, 0, 0)]),
        ((4, 3), GRID, [(0, 2**62, -(2**63), -(2**62), 4), (0, 3), (0, 0, 0, 0)]),
        ((4, 3), BOXES, [(0, 2), (0, 0), (2, 2), (3, 2), (0, 1)]),
        ((4, 3), BOXES, [(0, 1), (0, 0), (2, 3), (3, 3), (0, 1)]),
        ((4, 3), BOXES, [(0, 2), (0, 0), (2, 3), (3, 3), (0, 1)]),
        ((4, 3), BOXES, [(0, 4), (0, 0), (4, 0), (3, 3), (0, 1)]),
        ((4, 3), BOXES, [(-1, 2), (0, 0), (3, 2), (3, 3), (0, 1)]),
        ((4, 3), BOXES, [(0, 2), (0, 0), (2, 2), (3,), (0, 1)]),
        ((4, 3), BOXES, [(0, 2), (0, 0), (2, 2**63 - 1), (3, 3), (0, 1)]),
        ((4, 3), Boxes((0,), (1, 2), 3), [(0,), (4,), (3,), (1,)]),
        ((4, 3), Boxes((), (), 0), [(0,)]),
        ((0, 3), BOXES, [(), (), (), (), ()]),
    ],
)
def test_partitions_that_do_not_divide_the_tensor_are_refused(
    shape: Shape, partition: Partition, sequences: Sequence[tuple[int, ...]]
) -> None:
    unique: list[tuple[int, ...]] = list(dict.fromkeys(sequences))
    numbers = [unique.index(values) for values in sequences]
    files = files_of(shape, renumbered(partition, numbers), *(ints(*values) for values in unique))
    with pytest.raises(CorruptError, match=r"corrupt\.manifest"):
        files.layout(0)


def renumbered(partition: Partition, numbers: Sequence[int]) -> Partition:
    """The partition with each index of a sequence replaced."""
    if isinstance(partition, Grid):
        return Grid(tuple(numbers[i] for i in partition.cuts), numbers[partition.owners])
    if isinstance(partition, FlatCuts):
        return FlatCuts(numbers[partition.cuts], numbers[partition.owners])
    starts, sizes = (tuple(numbers[i] for i in columns) for columns in (partition.starts, partition.sizes))
    return Boxes(starts, sizes, numbers[partition.owners])


def test_boxes_with_more_corners_than_can_be_checked_are_refused() -> None:
    columns = [ints(0, 1), ints(1, 1), ints(0, 0)]
    files = files_of((2,) * 22, Boxes((0,) * 22, (1,) * 22, 2), *columns)
    with pytest.raises(CorruptError, match="22 axes"):
        files.layout(0)


def test_partitions_that_do_divide_the_tensor_are_accepted() -> None:
    assert len(files_of((4, 3), Grid((0, 1), 2), ints(0, 2, 4), ints(0, 3), ints(0, 1)).layout(0).entries) == 1
    assert len(files_of((4, 3), FlatCuts(0, 1), ints(0, 5, 12), ints(0, 0)).layout(0).entries) == 2
    assert len(files_of((), Grid((), 0), ints(1)).layout(1).entries) == 1
    assert len(files_of((), FlatCuts(0, 1), ints(0, 1), ints(1)).layout(1).entries) == 1
    assert not files_of((0, 3), Grid((0, 1), 2), ints(0), ints(0, 3), ints()).layout(0).entries
