"""Two boxes share row 1; another element is nowhere."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, as_boxes

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: as_boxes(body, starts=[[0, 1], [0, 0]], sizes=[[2, 2], [3, 3]]))
