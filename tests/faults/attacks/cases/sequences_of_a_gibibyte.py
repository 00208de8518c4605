"""Sequences that are each within the limit stand for gigabytes, in 20 bytes each."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: body["sequences"].extend([["a", [[0, [1 << 27], [1]]]]] * 8))
