"""A file in the seal has two digests."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.replace_text(victim.seal, '"nbytes":', '"digest":"00112233445566778899aabbccddeeff","nbytes":')
