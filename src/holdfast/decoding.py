"""Decoding of messages and records: bytes to values of given types.

msgspec builds what it knows of a type when the type is first decoded, and two threads that do so at once crash the
interpreter (seen with msgspec 0.22). So one lock is held while that is built, for all types of the package; decoding
itself needs none.
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
    """The value of `kind` that MessagePack `data` holds. Raises `msgspec.DecodeError` where it holds none."""
    decoder = _msgpack.get(kind)
    if decoder is None:
        with _lock:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)


def decode_json(data: bytes, kind: type[T]) -> T:
    """The value of `kind` that JSON `data` holds. Raises `msgspec.DecodeError` where it holds none."""
    decoder = _json.get(kind)
    if decoder is None:
        with _lock:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value


def decode_toml(text: str, kind: type[T]) -> T:
    """The value of `kind` that TOML `text` holds. Raises `msgspec.DecodeError` where it holds none."""
    with _lock:
        return msgspec.toml.decode(text, type=kind)
