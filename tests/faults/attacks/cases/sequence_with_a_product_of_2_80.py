"""A block whose counts multiply to 2^80."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    victim.set_body(lambda body: body["sequences"].append(["a", [[0, [1 << 40, 1 << 40], [1, 1]]]]))
