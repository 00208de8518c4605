"""A node of 100,000 nested arrays."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    victim.set_values(b"\x91\x92\xa1a\x93\xa5plain\x01" + b"\x91" * 100_000 + b"\x90")
