"""A tensor claims 2^60 elements."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_manifest(shape_table=[[3], [4, 2], [1 << 30, 1 << 30]])
