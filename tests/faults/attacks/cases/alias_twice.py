"""One alias stands for two tensors: MessagePack allows a key to stand twice."""

from __future__ import annotations

import msgspec

from holdfast.format import manifest as fmt
from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    decoded = fmt.decode(victim.manifest.read_bytes(), path="manifest")
    packed = msgspec.msgpack.encode(decoded.body)
    twice = b"\xa7aliases\x82\xa1a\xaamodel/bias\xa1a\xabmodel/scale"
    assert b"\xa7aliases\x80" in packed
    victim.set_packed(packed.replace(b"\xa7aliases\x80", twice), blob=bytes(decoded._blob))
