"""Messages under the keys of a shared store: encoded, and divided into chunks where they are large."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from holdfast.control.key_value_store import KeyValueStore
from holdfast.decoding import decode_msgpack

#: torch's TCPStore drops the connection of a client that sends a value over 8 MiB.
_CHUNK_NBYTES: Final = 4 * 2**20
#: Head of a message's first chunk: the number of its chunks.
_NUM_CHUNKS: Final = struct.Struct(">I")

S = TypeVar("S", bound=msgspec.Struct)


class Mailbox:
    """The messages in `store`. The first chunk of a message is under its key, and chunk ``i`` under ``<key>/<i>``."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def put(self, key: str, message: msgspec.Struct) -> int:
        """Store a message under `key`, and return the number of its chunks."""
        data = msgspec.msgpack.encode(message)
        chunks = [data[start : start + _CHUNK_NBYTES] for start in range(0, len(data), _CHUNK_NBYTES)]
        # Store the key itself last, so that a reader that sees it finds all chunks.
        for index, chunk in enumerate(chunks[1:], start=1):
            self._store.set(f"{key}/{index}", chunk)
        self._store.set(key, _first_chunk(len(chunks), chunks[0]))
        return len(chunks)

    def read(self, key: str) -> tuple[int, bytes]:
        """The number of chunks and the joined data under a key that exists."""
        return self._joined(key, self._store.get(key))

    def _joined(self, key: str, first: bytes) -> tuple[int, bytes]:
        (num_chunks,) = _NUM_CHUNKS.unpack_from(first)
        rest = (self._store.get(f"{key}/{index}") for index in range(1, num_chunks))
        return num_chunks, b"".join((first[_NUM_CHUNKS.size :], *rest))

    def take(self, key: str, kind: type[S]) -> S:
        """Remove the message under a key that exists, and return it."""
        num_chunks, data = self.read(key)
        self.remove(key, num_chunks)
        return decode_msgpack(data, kind)

    def take_all(self, keys: Sequence[str], kind: type[S]) -> list[S]:
        """Remove the messages under `keys`, which exist, and return them."""
        taken = []
        for key, first in zip(keys, self._store.get_all(keys), strict=True):
            num_chunks, data = self._joined(key, first)
            self.remove(key, num_chunks)
            taken.append(decode_msgpack(data, kind))
        return taken

    def remove(self, key: str, num_chunks: int) -> None:
        """Remove a message of `num_chunks` chunks."""
        for name in (key, *(f"{key}/{index}" for index in range(1, num_chunks))):
            self._store.delete(name)


def packed(message: msgspec.Struct) -> bytes:
    """A message of one chunk, in the form in which it is stored under its key."""
    return _first_chunk(1, msgspec.msgpack.encode(message))


def _first_chunk(num_chunks: int, first: bytes) -> bytes:
    return _NUM_CHUNKS.pack(num_chunks) + first
