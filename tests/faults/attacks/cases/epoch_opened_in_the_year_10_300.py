"""An epoch was opened at a time that no calendar has."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, change_record

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.commit.unlink()
    change_record(victim.epoch, lambda epoch: epoch.update(created=1e300))
