"""The values are a pickle that would write a file."""

from __future__ import annotations

import os
import pickle

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {victim.path}/executed",)

    victim.set_values(pickle.dumps(Bomb()))
