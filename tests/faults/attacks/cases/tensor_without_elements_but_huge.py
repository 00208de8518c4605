"""A tensor of shape [0, 2^62]: it has no elements, and no array can be made for it."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_manifest(shape_table=[[3], [4, 2], [0, 1 << 62]])
