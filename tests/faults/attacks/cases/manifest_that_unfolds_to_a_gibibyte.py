"""A manifest of 1 MiB is a zlib stream of 1 GiB of zeros."""

from __future__ import annotations

import zlib

import xxhash

from holdfast.format import manifest as fmt
from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    unfolded = zlib.compressobj(9)
    compressed = b"".join(unfolded.compress(bytes(1 << 20)) for _ in range(1 << 10)) + unfolded.flush()
    sizes = len(compressed), 1 << 30, 0
    digest = xxhash.xxh3_128_digest(compressed)
    victim.manifest.write_bytes(fmt._HEAD.pack(fmt.MAGIC, *sizes, digest) + compressed)
    victim.reseal()
