"""The manifest claims 2^40 data files."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_manifest(num_files=1 << 40)
