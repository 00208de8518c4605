"""Headers of safetensors files: what the stock writer makes is read, and anything else is refused with a reason."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as stock_load
from safetensors.torch import save as stock_save

import holdfast
from holdfast.interop.safetensors_header import MAX_HEADER_NBYTES, decode_header, read_header
from holdfast.store.base import Location
from holdfast.store.urls import open_store


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def decoded(header: object, data_nbytes: int = 8) -> list[str]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return [tensor.name for tensor in decode_header(text, 8 + len(text) + data_nbytes, path="file")]


def test_tensors_come_in_the_order_of_the_file_with_their_first_bytes() -> None:
    tensors = {"b": torch.zeros(3), "a": torch.zeros(2, 2, dtype=torch.int64), "c": torch.zeros(0, 4)}
    data = stock_save(tensors, metadata={"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    found = {tensor.name: tensor for tensor in decode_header(data[8 : 8 + length], len(data), path="file")}
    assert found.keys() == tensors.keys()
    assert found["a"][1:] == ("int64", (2, 2), 8 + length)
    assert found["b"][1:] == ("float32", (3,), 8 + length + 32)


def test_dtypes_of_safetensors_get_the_names_of_torch() -> None:
    names = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "complex64", "uint16", "bool", "float8_e8m0fnu"]
    for name in names:
        data = stock_save({"w": torch.zeros(4).to(getattr(torch, name))})
        length = int.from_bytes(data[:8], "little")
        assert [tensor.dtype for tensor in decode_header(data[8 : 8 + length], len(data), path="file")] == [name]
    halves = entry("F4", [3, 4], [0, 6])
    (packed,) = decode_header(json.dumps({"w": halves}).encode(), 8 + len(json.dumps({"w": halves})) + 6, path="file")
    assert (packed.dtype, packed.shape) == ("float4_e2m1fn_x2", (3, 2))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "malformed header"),
        (b"{", "malformed header"),
        (b"[]", "no JSON object"),
        (b"\xff\xfe{}", "malformed header"),
        (b"[" * 100_000, "malformed header"),
        (b'{"w": NaN}', "NaN is no JSON"),
        ({"__metadata__": {"a": 1}}, "no table of strings"),
        ({"w": 3}, "lacks dtype, shape or data_offsets"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "lacks dtype, shape or data_offsets"),
        ({"w": entry(offsets=[0])}, "no two ascending offsets"),
        ({"w": entry(offsets=[8, 0])}, "no two ascending offsets"),
        ({"w": entry(offsets=[-8, 0])}, "no two ascending offsets"),
        ({"w": entry(offsets=[0, True])}, "no two ascending offsets"),
        ({"w": entry(shape=[-2])}, "impossible shape"),
        ({"w": entry(shape=[1 << 60, 0], offsets=[0, 0])}, "impossible shape"),
        ({"w": entry(shape=[1 << 40, 1 << 40])}, "impossible shape"),
        ({"w": entry(shape=[1] * 65)}, "impossible shape"),
        ({"w": entry(shape=[3])}, "8 bytes, but its shape and dtype need 12"),
        ({"w": entry("F4", [3], [0, 2])}, "odd number of halves"),
        ({"v": entry(), "w": entry(offsets=[4, 12])}, "tensor 'w' overlaps"),
        ({"v": entry(), "w": entry()}, "tensor 'w' overlaps"),
        ({"w": entry(offsets=[4, 12])}, "a gap of 4 bytes"),
        ({"w": entry(shape=[4], offsets=[0, 16])}, "cut off"),
        ({"w": entry(shape=[1], offsets=[0, 4])}, "belong to no tensor"),
        ({}, "belong to no tensor"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": {}}', "'w' twice"),
    ],
)
def test_a_malformed_header_is_refused_as_the_stock_reader_refuses_it(header: object, said: str) -> None:
    with pytest.raises(holdfast.CorruptError) as caught:
        decoded(header)
    assert caught.value.code == "corrupt.foreign"
    assert said in str(caught.value)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if said not in ("'w' twice", "NaN is no JSON", "impossible shape"):  # there we are stricter
        with pytest.raises((SafetensorError, KeyError, AttributeError)):
            stock_load(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize("code", ["F6_E2M3", "X9", 3, None])
def test_a_dtype_that_holdfast_does_not_know_names_the_tensor(code: object) -> None:
    with pytest.raises(holdfast.IncompatibleError) as caught:
        decoded({"w": entry(code)})
    assert (caught.value.code, caught.value.tensor) == ("incompatible.foreign", "w")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is cut off: it has 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "is cut off"),
        ((9).to_bytes(8, "little") + b"{}", "is cut off in its header"),
        ((MAX_HEADER_NBYTES + 1).to_bytes(8, "little") + b"{}", "is no safetensors file"),
        (b"\xff" * 64, "is no safetensors file"),
    ],
)
def test_a_file_that_is_cut_off_in_its_header_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(holdfast.CorruptError, match=said):
        holdfast.open(tmp_path)
    with pytest.raises(holdfast.CorruptError, match="is missing"):
        read_header(open_store(Location(str(tmp_path))), "other.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.one_of(st.binary(max_size=64), json_values.map(lambda value: json.dumps(value).encode())), st.integers(0, 64))
def test_any_bytes_are_decoded_or_refused_as_damage(text: bytes, data_nbytes: int) -> None:
    with suppress(holdfast.CorruptError, holdfast.IncompatibleError):
        tensors = decode_header(text, 8 + len(text) + data_nbytes, path="file")
        assert all(8 + len(text) <= tensor.offset <= 8 + len(text) + data_nbytes for tensor in tensors)


@given(st.data())
def test_a_changed_header_never_gives_tensors_outside_the_file(data: st.DataObject) -> None:
    whole = bytearray(stock_save({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int16)}))
    length = int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(8, 7 + length))
    whole[at] = data.draw(st.integers(0, 255))
    with suppress(holdfast.CorruptError, holdfast.IncompatibleError):
        for tensor in decode_header(bytes(whole[8 : 8 + length]), len(whole), path="file"):
            assert 8 + length <= tensor.offset <= len(whole)
