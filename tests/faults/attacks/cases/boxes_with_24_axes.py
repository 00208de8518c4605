"""Free boxes of 24 axes: checking them by their corners would take 2^24 rows per box."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, as_boxes

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: as_boxes(body, starts=[[0, 1]] * 24, sizes=[[1, 1]] * 24, shape=[2] * 24))
    victim.set_seal(lambda seal: seal["files"][0].update(nbytes=1 << 40))
