from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptError, NotFoundError, StateError
from holdfast.format import values
from holdfast.format.names import join
from holdfast.format.values import (
    Items,
    Node,
    Open,
    Plain,
    RecordNode,
    Stateful,
    TableNode,
    TensorRef,
    Text,
    TorchValue,
)

keys = st.one_of(st.text("abc%/@", max_size=4), st.integers(), st.booleans(), st.none(), st.binary(max_size=3))
numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64),
    st.booleans().map(np.bool_),
    st.complex_numbers().map(np.complex128),
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
    st.integers(0, 10**9).map(lambda n: np.datetime64(n, "us")),
    st.just(np.timedelta64("NaT")),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(categories=["Cs", "L"])),
    st.binary(),
    numpy_scalars,
)


class Point(NamedTuple):
    x: object
    y: object


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(Counter),
        st.builds(Point, inner, inner),
    )


trees = st.recursive(leaves, containers, max_leaves=20)


def flatten(value: object, path: str = "v", nodes: dict[str, Node] | None = None) -> dict[str, Node]:
    """The table of a value at `path`: what `holdfast.state.flatten` does for torch-free trees."""
    nodes = {} if nodes is None else nodes
    shell = values.container(value, path)
    if shell is None:
        leaf = values.leaf(value)
        assert leaf is not None
        nodes[path] = leaf
    else:
        nodes[path] = shell[0]
        for name, child in shell[1]:
            flatten(child, join(path, name), nodes)
    return nodes


def bits(value: object) -> object:
    """`value` in a form whose equality means the same types, the same order and the same bits."""
    if isinstance(value, dict):
        return type(value).__name__, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    if isinstance(value, np.generic):
        return type(value).__name__, value.dtype.str, value.tobytes()
    if isinstance(value, complex):
        return "complex", struct.pack("<dd", value.real, value.imag)
    return type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value


def no_tensors(name: str) -> object:
    raise AssertionError(name)


def round_trip(value: object) -> object:
    nodes = values.decode(values.encode(flatten(value)))
    return values.rebuild(nodes, "v", no_tensors, record=lambda *_: Point)


@given(trees)
def test_values_come_back_with_their_types_and_bits(value: object) -> None:
    assert bits(round_trip(value)) == bits(value)


@given(trees)
def test_encoding_does_not_depend_on_the_order_of_the_table(value: object) -> None:
    nodes = flatten(value)
    assert values.encode(dict(reversed(nodes.items()))) == values.encode(nodes)


@pytest.mark.parametrize("pattern", [0x7FF8000000000001, 0xFFF0000000000000, 0x8000000000000000, 0x7FF0DEADBEEF0000])
def test_floats_keep_every_bit(pattern: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", pattern))
    back = round_trip(value)
    assert struct.pack("<d", back) == struct.pack("<Q", pattern)


def test_a_namedtuple_without_its_type_comes_back_as_one_with_its_name_and_fields() -> None:
    nodes = values.decode(values.encode(flatten(Point(1, [2]))))
    point = values.rebuild(nodes, "v", no_tensors)
    assert type(point).__name__ == "Point"
    assert point == (1, [2])
    assert point.y == [2]  # type: ignore[attr-defined]
    assert type(values.rebuild(nodes, "v", no_tensors)) is type(point)


def test_a_tensor_is_asked_for_by_its_name() -> None:
    nodes: dict[str, Node] = {"a": Items("list", 2), "a/0": TensorRef(), "a/1": Plain(1)}
    assert values.rebuild(nodes, "a", lambda name: f"<{name}>") == ["<a/0>", 1]
    assert [name for name, _ in values.walk(nodes, "a")] == ["a", "a/0", "a/1"]


def test_torch_values_stay_records_until_revived() -> None:
    nodes = values.decode(values.encode({"a": TorchValue("dtype", "bfloat16")}))
    assert values.rebuild(nodes, "a", no_tensors) == TorchValue("dtype", "bfloat16")
    assert values.rebuild(nodes, "a", no_tensors, revive=lambda value: value.text.upper()) == "BFLOAT16"


def test_an_open_dict_holds_what_the_table_holds_directly_below_it() -> None:
    nodes: dict[str, Node] = {
        "o/g": Open("dict"),
        "o/g/b": Plain(2),
        "o/g/a%2Fc": Items("list", 1),
        "o/g/a%2Fc/0": Plain(1),
    }
    assert values.rebuild(nodes, "o/g", no_tensors) == {"a/c": [1], "b": 2}


def test_an_object_with_a_state_dict_is_the_value_that_it_gave() -> None:
    nodes: dict[str, Node] = {"s": Stateful(TableNode("dict", ("n",))), "s/n": Plain(3)}
    assert values.rebuild(values.decode(values.encode(nodes)), "s", no_tensors) == {"n": 3}


@pytest.mark.parametrize("path", ["nothing", "model"])
def test_what_is_no_value_is_not_found(path: str) -> None:
    with pytest.raises(NotFoundError, match=path):
        values.rebuild({"model": Open("module")}, path, no_tensors)


@pytest.mark.parametrize(
    "value",
    [
        {1},
        defaultdict(int),
        range(3),
        object(),
        np.zeros(2),
        np.void(b"ab"),
        bytearray(b"a"),
        np.longdouble(1),
        np.clongdouble(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_neither_leaves_nor_containers(value: object) -> None:
    assert values.leaf(value) is None
    assert values.container(value, "") is None


class Hidden(tuple[int, ...]):
    __slots__ = ()
    _fields = ("_x",)


def test_a_record_that_no_reader_could_make_again_is_not_saved() -> None:
    assert values.container(Hidden((1,)), "") is None


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (">i8", (5).to_bytes(8, "big"), 5),
        (">f4", b"\x3f\x80\0\0", 1.0),
        ("<i1", b"\x05", 5),
        (">M8[s]", (3).to_bytes(8, "big"), np.datetime64(3, "s")),
    ],
)
def test_numpy_scalars_of_any_byte_order_are_read(dtype: str, data: bytes, expected: object) -> None:
    nodes = values.decode(encoded([("a", values.NumpyScalar(dtype, data))]))
    assert values.rebuild(nodes, "a", no_tensors) == expected


#: Python takes it for the letters "fi" where it stands in an identifier.
LIGATURE = "\N{LATIN SMALL LIGATURE FI}"
MANY_FIELDS = tuple(f"f{number:04}" for number in range(4097))


def encoded(nodes: object) -> bytes:
    return msgspec.msgpack.encode(nodes)


@pytest.mark.parametrize(
    "rows",
    [
        [("b", Plain(1)), ("a", Plain(1))],
        [("a", Plain(1)), ("a", Plain(2))],
        [("a@b", Plain(1))],
        [("a//b", Plain(1))],
        [("/".join("a" * 129), Plain(1))],
        [("a", Items("list", 1))],
        [("a", Items("list", -1))],
        [("a", Items("list", 1 << 60))],
        [("a", TableNode("dict", ("b",)))],
        [("a", TableNode("dict", ("b", "b"))), ("a/b", Plain(1))],
        [("a", RecordNode("os.system", ()))],
        [("a", RecordNode("P", ("x=__import__('os')",))), ("a/x=__import__('os')", Plain(1))],
        [("a", RecordNode("class", ()))],
        [("a", RecordNode("P", ("class",))), ("a/class", Plain(1))],
        [("a", RecordNode("P", ("_x",))), ("a/_x", Plain(1))],
        [("a", values.BigInt(b"\x01"))],
        [("a", values.BigInt((1 << 64).to_bytes(12, "little")))],
        [("a", values.BigInt(b""))],
        [("a", Text(b"\xff"))],
        [("a", values.NumpyScalar("O", b"12345678"))],
        [("a", values.NumpyScalar("<f4", b"123"))],
        [("a", values.NumpyScalar("<f4", b"12345678"))],
        [("a", values.NumpyScalar("f4,f4", b"12345678"))],
        [("a", values.NumpyScalar("<f3", b"123"))],
        [("a", values.NumpyScalar("U", b"\xff"))],
        [("a", Stateful(Items("tuple", 1)))],
        [("a", ["unknown", 1])],
        [("a", ["stateful", ["open", "dict"]])],
        [("a", ["encoded", "x", ["encoded", "y", ["plain", 1]]])],
        [("a", ["encoded", "x", ["list", "list", 1]])],
        [("a", ["planes", "x", []])],
        [("a", ["planes", "x", ["data", "data"]])],
        [("a", ["per_rank", 0])],
        [("a/%rank=01", Plain(1))],
        [("a/%plane=x", Plain(1))],
        [("a", TableNode("dict", ("%rank=0",))), ("a/%rank=0", Plain(1))],
        [("a", ["plain", "text"])],
        [("a", ["plain", 1, 2])],
        [("a", RecordNode("P", ("fi", LIGATURE))), ("a/fi", Plain(1)), (f"a/{LIGATURE}", Plain(1))],
        [("a", RecordNode("P", MANY_FIELDS)), *((f"a/{field}", Plain(1)) for field in MANY_FIELDS)],
        [("a", ["torch", "callable", "os.system", b""])],
        {"a": 1},
        [[[[[[]]]]]],
    ],
    ids=lambda rows: str(rows)[:80],
)
def test_tables_that_encode_never_gives_are_corrupt(rows: object) -> None:
    with pytest.raises(CorruptError):
        values.decode(encoded(rows))


@given(st.binary(max_size=64).filter(lambda data: data != b"\x90"))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        values.decode(data)


def test_an_empty_table_is_a_table() -> None:
    assert values.decode(values.encode({})) == {}


@given(trees, st.data())
def test_a_damaged_table_is_corrupt_or_another_sound_table(value: object, data: st.DataObject) -> None:
    good = bytearray(values.encode(flatten(value)))
    good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        nodes = values.decode(bytes(good))
    except CorruptError:
        return
    assert values.decode(values.encode(nodes)).keys() == nodes.keys()


def test_deeply_nested_bytes_do_not_exhaust_the_stack() -> None:
    with pytest.raises(CorruptError):
        values.decode(b"\x91" * 1_000_000)
    with pytest.raises(CorruptError):
        values.decode(b"\x91\x92\xa1a\x93\xa5plain\x01" + b"\x91" * 1_000_000)


def test_tables_over_the_limit_are_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    data = values.encode({"a": Plain(math.pi)})
    monkeypatch.setattr(values, "MAX_NBYTES", 4)
    with pytest.raises(StateError, match=r"state\.values_size"):
        values.encode({"a": Plain(math.pi)})
    with pytest.raises(CorruptError, match="limit of 4"):
        values.decode(data)


def test_values_are_decoded_without_torch() -> None:
    code = "import sys; from holdfast.format import values; values.decode(b'\\x90'); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
