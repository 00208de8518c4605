"""A box ends before it begins; the sum of all sizes is right."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, as_boxes

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: as_boxes(body, starts=[[0, 2], [0, 0]], sizes=[[6, -2], [3, 3]]))
