"""An affine block with 200,000 axes of count 1: one number, and seconds of work."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: body["sequences"].append(["a", [[0, [1] * 200_000, [0] * 200_000]]]))
