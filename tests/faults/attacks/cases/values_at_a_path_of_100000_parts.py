"""A value whose path has 100,000 components."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    victim.set_values(msgspec.msgpack.encode([["/".join("a" * 100_000), ["plain", 1]]]))
