"""The seal lists a data file whose name ends early for the system."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_seal(lambda seal: seal["files"][0].update(name="data-00000.safetensors\0.txt"))
