"""No box holds row 2."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, as_boxes

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: as_boxes(body, starts=[[0, 3], [0, 0]], sizes=[[2, 1], [3, 3]]))
