"""A shape has 100,000 axes of extent 1."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_manifest(shape_table=[[3], [4, 2], [1] * 100_000])
