"""A list claims 2^60 entries."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    victim.set_values(msgspec.msgpack.encode([["a", ["list", "list", 1 << 60]]]))
