"""Decoding of messages and records: bytes to values of given types.

msgspec builds its description of a type when it first decodes that type. Two threads that build at once crash the
interpreter (seen with msgspec 0.22), so one lock for all types of the package is held during the building. Decoding
itself needs no lock.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar, overload

import msgspec

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
        with _lock:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a value of `kind` from JSON. Raises `msgspec.DecodeError` for any other `data`."""
    decoder = _json.get(kind)
    if decoder is None:
        with _lock:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value


def decode_toml(text: str, kind: type[T]) -> T:
    """Decode a value of `kind` from TOML. Raises `msgspec.DecodeError` for any other `text`."""
    with _lock:
        return msgspec.toml.decode(text, type=kind)
