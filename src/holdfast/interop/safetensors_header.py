"""The header of a safetensors file: where each tensor lies in it. Checked as strictly as by the stock reader.

A file is the length of its header (8 bytes), a JSON object, and the data. The object has for each tensor its dtype,
shape and offsets in the data. Tensors follow each other without gaps and without overlaps, to the end of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, TypeGuard

from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.geometry import Shape
from holdfast.interop.foreign_format import damaged, unreadable
from holdfast.store.base import Store

#: The stock reader refuses a longer header.
MAX_HEADER_NBYTES: Final = 100_000_000
_LENGTH_NBYTES: Final = 8
_METADATA: Final = "__metadata__"
#: The entry of the metadata in which torch notes for each tensor where it begins in the whole one, and what that entry
#: has for one that does not begin at 0. Files of whole tensors have the entry, too, but not the name of a rank's file.
_SHARDING: Final = "DCP_SHARDING_INFO"
_LATER_PART: Final = re.compile(r'"saved_offsets": ?\[[^\]\[]*[1-9]')
_RANK_FILE: Final = re.compile(r"shard-[0-9]+-.*")
_F4: Final = "F4"
#: Our dtypes by the codes of safetensors, also of those that our own files store as bytes.
_CODES: Final[Mapping[str, str]] = {
    **{dtype.code: dtype.name for dtype in DTYPES.values() if dtype.native},
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    _F4: "float4_e2m1fn_x2",
}


class HeaderTensor(NamedTuple):
    """A tensor of a safetensors file: its dtype and shape, as torch has them, and its first byte in the file."""

    name: str
    dtype: str
    shape: Shape
    offset: int


class Header(NamedTuple):
    """The header of a safetensors file of `nbytes`: its `tensors`, in the order of the file, and its own bytes."""

    tensors: Sequence[HeaderTensor]
    nbytes: int
    text: bytes


def read_header(storage: Store, key: str) -> Header:
    """Read and check the header of file `key`, in two requests.

    Raises `CorruptError`, code ``corrupt.foreign``, for a file that is missing, cut off or malformed, and
    `IncompatibleError`, code ``incompatible.foreign``, for an unknown dtype.
    """
    path, nbytes = storage.path(key), storage.nbytes(key)
    if nbytes is None:
        raise damaged(path, "is missing")
    if nbytes < _LENGTH_NBYTES:
        raise damaged(path, f"is cut off: it has {nbytes} bytes, less than the length of a header")
    length = int.from_bytes(storage.read(key, nbytes=_LENGTH_NBYTES), "little")
    check_length(length, nbytes, path=path)
    text = storage.read(key, start=_LENGTH_NBYTES, nbytes=length)
    return Header(decode_header(text, nbytes, path=path), nbytes, text)


def check_length(length: int, nbytes: int, *, path: str) -> None:
    """Refuse a length that no header of a file of `nbytes` can have."""
    if length > MAX_HEADER_NBYTES:
        raise damaged(path, f"is no safetensors file: its header would have {length} bytes")
    if length > nbytes - _LENGTH_NBYTES:
        raise damaged(path, f"is cut off in its header: that has {length} bytes, and the file {nbytes}")


def decode_header(text: bytes, nbytes: int, *, path: str) -> list[HeaderTensor]:
    """The tensors in the header `text` of a file of `nbytes`, in the order of the file. Raises as `read_header`."""
    entries = _object(text, path=path)
    metadata = entries.pop(_METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise damaged(path, "has a malformed header: its metadata is no table of strings")
    if _is_part(metadata, path):
        what = "is the part of one rank: a job saved it through HuggingFaceStorageWriter(save_distributed=True)"
        action = "Load the folder with dcp.load and HuggingFaceStorageReader, and save it again, or consolidate it."
        raise unreadable(path, what, action=action)
    start = _LENGTH_NBYTES + len(text)
    found = sorted((_entry(name, entry, path=path) for name, entry in entries.items()), key=lambda one: one[0])
    end = 0
    for (first, last), tensor in found:
        if first != end:
            what = "overlaps the tensor before it" if first < end else f"leaves a gap of {first - end} bytes before it"
            raise damaged(path, f"has a malformed header: tensor {tensor.name!r:.200} {what}", tensor=tensor.name)
        end = last
    if start + end != nbytes:
        how = "is cut off" if start + end > nbytes else "has bytes that belong to no tensor"
        raise damaged(path, f"{how}: its tensors need {start + end} bytes, and it has {nbytes}")
    return [tensor._replace(offset=start + first) for (first, _), tensor in found]


def _is_part(metadata: Mapping[str, str], path: str) -> bool:
    """Whether the tensors of a file are the parts that one rank had."""
    info = metadata.get(_SHARDING)
    if info is None:
        return False
    return _LATER_PART.search(info) is not None or _RANK_FILE.fullmatch(path.rpartition("/")[2]) is not None


def _object(text: bytes, *, path: str) -> dict[str, object]:
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        if isinstance(entries, dict):
            "".join(entries).encode()  # an escape in JSON can be half a character, and no name can
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"has a malformed header ({error!s:.200})") from error
    if not isinstance(entries, dict):
        raise damaged(path, "has a malformed header: it is no JSON object")
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!r:.200} twice")
        found[name] = value
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _entry(name: str, entry: object, *, path: str) -> tuple[tuple[int, int], HeaderTensor]:
    """The offsets of one entry of a header, and its tensor."""

    def malformed(what: str) -> HoldfastError:
        return damaged(path, f"has a malformed header: tensor {name!r:.200} {what}", tensor=name)

    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise malformed("lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise malformed("has no two ascending offsets")
    if not _counts(shape) or len(shape) > MAX_AXES or prod(filter(None, shape)) > MAX_NUMEL:
        raise malformed("has an impossible shape")
    dtype = _CODES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise IncompatibleError(
            f"{path}: tensor {name!r:.200} has dtype {code!r:.40}, which holdfast does not know.",
            code="incompatible.foreign",
            action="Convert the tensor to another dtype with the library that wrote the file.",
            path=path,
            tensor=name,
        )
    if code == _F4:  # counted in halves of a byte by safetensors, in bytes by torch
        if not shape or shape[-1] % 2:
            raise malformed("has an odd number of halves of bytes")
        shape = [*shape[:-1], shape[-1] // 2]
    needed = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise malformed(f"has {offsets[1] - offsets[0]} bytes, but its shape and dtype need {needed}")
    return (offsets[0], offsets[1]), HeaderTensor(name, dtype, tuple(shape), 0)


def _counts(numbers: object) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
