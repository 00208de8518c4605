"""A box begins at row -2."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, as_boxes

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: as_boxes(body, starts=[[-2, 2], [0, 0]], sizes=[[4, 2], [3, 3]]))
