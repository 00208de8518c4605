"""Two aliases stand for each other."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_manifest(aliases={"a": "b", "b": "a"})
