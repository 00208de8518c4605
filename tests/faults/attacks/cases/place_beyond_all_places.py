"""The commit is at number 10^10, for which there is no name."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(place={"epoch": 1, "seq": 10**10}))
