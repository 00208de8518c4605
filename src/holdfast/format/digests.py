"""The kinds of digests of a checkpoint: one detects accidents, the other changes by somebody.

A checkpoint has one kind at every level: of the blocks of its data files, of their tables, of its manifest and of its
seal. Its reader features say which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

from holdfast.signing import SIGNED


class RunningDigest(Protocol):
    """A digest of data that comes in parts."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add the next part."""

    def digest(self) -> bytes:
        """The digest of all parts so far."""


@dataclass(frozen=True, slots=True)
class DigestKind:
    """A kind of digests, of `nbytes` bytes each. `of` makes one, and releases the GIL meanwhile; `begin` begins one of
    data that comes in parts."""

    name: str
    nbytes: int
    of: Callable[[bytes | memoryview], bytes]
    begin: Callable[[], RunningDigest]

    def hex(self, data: bytes | memoryview) -> str:
        """The digest of `data` in hexadecimal digits."""
        return self.of(data).hex()


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


XXH3: Final = DigestKind("xxh3-128", 16, xxhash.xxh3_128_digest, xxhash.xxh3_128)
SHA256: Final = DigestKind("sha-256", 32, _sha256, hashlib.sha256)


def digests_of(reader_features: Sequence[str]) -> DigestKind:
    """The kind of digests of a checkpoint with these reader features."""
    return SHA256 if SIGNED in reader_features else XXH3
