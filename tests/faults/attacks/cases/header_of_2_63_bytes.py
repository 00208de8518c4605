"""A data file's header claims 2^63 bytes. Holdfast does not read it to load; `verify` does."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.header"


def attack(victim: Victim) -> None:
    data = bytearray(victim.data(1).read_bytes())
    data[:8] = (1 << 63).to_bytes(8, "little")
    victim.data(1).write_bytes(data)
