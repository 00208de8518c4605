"""Cut points are an arithmetic progression of 2^62 numbers, in 20 bytes."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: body["sequences"].append(["a", [[0, [1 << 62], [1]]]]))
