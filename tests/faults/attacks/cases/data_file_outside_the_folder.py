"""The seal lists ../../../etc/passwd as a data file."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_seal(lambda seal: seal["files"][0].update(name="../../../etc/passwd"))
