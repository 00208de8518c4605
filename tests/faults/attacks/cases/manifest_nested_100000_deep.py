"""The body holds an unknown member of 100,000 nested arrays."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_packed(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90")
