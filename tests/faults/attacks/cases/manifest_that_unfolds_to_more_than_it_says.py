"""A manifest of 1 MiB claims a body of 64 KiB, and its zlib stream goes on for 1 GiB."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_packed(bytes(1 << 26), claimed=1 << 16)
