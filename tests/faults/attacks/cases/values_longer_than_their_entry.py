"""The values claim 2^63 bytes of an entry of 4096."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    victim.set_entry((1 << 63).to_bytes(8, "little").ljust(4096, b"\0"))
