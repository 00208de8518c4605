"""The commit has two steps."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.replace_text(victim.commit, '"step":7,', '"step":8,"step":7,')
