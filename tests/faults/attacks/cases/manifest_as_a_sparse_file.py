"""The manifest is a sparse file of 8 GiB that the seal vouches for: one read would take all memory."""

from __future__ import annotations

import os

from tests.faults.attacks.victim import Victim

CODE = "corrupt.size"


def attack(victim: Victim) -> None:
    os.truncate(victim.manifest, 8 << 30)
    victim.set_seal(lambda seal: seal["manifest"].update(nbytes=8 << 30))
