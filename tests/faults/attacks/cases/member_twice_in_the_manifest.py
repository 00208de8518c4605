"""The manifest has two lists of names; readers may differ on which one counts."""

from __future__ import annotations

import msgspec

from holdfast.format import manifest as fmt
from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    decoded = fmt.decode(victim.manifest.read_bytes(), path="manifest")
    packed = msgspec.msgpack.encode(decoded.body)
    size = int.from_bytes(packed[1:3], "big")
    assert packed[0] == 0xDE
    head = b"\xde" + (size + 1).to_bytes(2, "big")
    victim.set_packed(head + b"\xa5names\x90" + packed[3:], blob=bytes(decoded._blob))
