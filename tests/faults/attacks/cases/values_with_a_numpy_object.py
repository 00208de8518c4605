"""A numpy scalar of dtype object: its bytes would be taken for an address."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    victim.set_values(msgspec.msgpack.encode([["a", ["numpy", "|O", b"12345678"]]]))
