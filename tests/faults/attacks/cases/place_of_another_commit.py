"""The record of place 1.2 is at place 1.1."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(place={"epoch": 1, "seq": 2}))
