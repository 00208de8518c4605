"""The manifest claims one data file more than the seal lists."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.file"


def attack(victim: Victim) -> None:
    victim.set_manifest(num_files=3)
