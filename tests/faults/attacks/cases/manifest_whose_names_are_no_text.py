"""A tensor name is no UTF-8."""

from __future__ import annotations

import msgspec

from holdfast.format import manifest as fmt
from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    decoded = fmt.decode(victim.manifest.read_bytes(), path="manifest")
    packed = msgspec.msgpack.encode(decoded.body)
    victim.set_packed(packed.replace(b"model/bias", b"model/\xed\xa0\x80s"), blob=bytes(decoded._blob))
