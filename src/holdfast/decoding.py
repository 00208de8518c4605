"""Decoding of messages and records: bytes to values of given types.

msgspec builds its description of a type when it first decodes that type. Two threads that build at once crash the
interpreter (seen with msgspec 0.22), so one lock for all types of the package is held during the building. Decoding
itself needs no lock. The building is Python code, so a handler of a signal may interrupt it; a call of the library from
there that would build, too, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar, overload

import msgspec

from holdfast import calls

T = TypeVar("T")

_lock = Lock()
_msgpack: dict[object, msgspec.msgpack.Decoder[Any]] = {}
_json: dict[object, msgspec.json.Decoder[Any]] = {}


@overload
def decode_msgpack(data: bytes, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: bytes, kind: object) -> Any: ...
def decode_msgpack(data: bytes, kind: Any) -> Any:
    """Decode a value of `kind` from MessagePack. Raises `msgspec.DecodeError` for any other `data`."""
    decoder = _msgpack.get(kind)
    if decoder is None:
        decoder = _msgpack.setdefault(kind, _build(lambda: msgspec.msgpack.Decoder(kind)))
    return decoder.decode(data)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a value of `kind` from JSON. Raises `msgspec.DecodeError` for any other `data`."""
    decoder = _json.get(kind)
    if decoder is None:
        decoder = _json.setdefault(kind, _build(lambda: msgspec.json.Decoder(kind)))
    value: T = decoder.decode(data)
    return value


def decode_toml(text: str, kind: type[T]) -> T:
    """Decode a value of `kind` from TOML. Raises `msgspec.DecodeError` for any other `text`."""
    return _build(lambda: msgspec.toml.decode(text, type=kind))


def converted(value: object, kind: type[T]) -> T:
    """A value of `kind` from one that another library has decoded. Raises `msgspec.ValidationError` for any other
    `value`."""
    return _build(lambda: msgspec.convert(value, kind))


@calls.outer("the first decoding of a type")
def _build(build: Callable[[], T]) -> T:
    calls.refuse_nested("a decoding", allowed=calls.ALL)
    with _lock:
        return build()
