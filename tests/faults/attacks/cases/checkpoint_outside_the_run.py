"""The commit points to ../../elsewhere."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(checkpoint="../../elsewhere"))
