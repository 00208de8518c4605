"""The commit is a sparse file of 8 GiB: one read would take all memory."""

from __future__ import annotations

import os

from tests.faults.attacks.victim import Victim

CODE = "corrupt.size"


def attack(victim: Victim) -> None:
    os.truncate(victim.commit, 8 << 30)
