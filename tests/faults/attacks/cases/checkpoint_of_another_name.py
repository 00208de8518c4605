"""The commit points to the folder of another step."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(checkpoint="step-0000000008-0123456789abcdef"))
