"""A data file is a named pipe: opening it waits for a writer that never comes."""

from __future__ import annotations

import os

from tests.faults.attacks.victim import Victim

CODE = "corrupt.incomplete"


def attack(victim: Victim) -> None:
    victim.data(0).unlink()
    os.mkfifo(victim.data(0))
