"""Each tensor has a possible size; the sum of all sizes is 2^64, which a reader may take for 0."""

from __future__ import annotations

from typing import Any

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    def change(body: dict[str, Any]) -> None:
        names = [f"t{number:02}" for number in range(16)]
        body.update(names=names, dtypes=[0] * 16, shapes=[0] * 16, partitions=[0] * 16)
        body.update(dtype_table=["complex128"], shape_table=[[1 << 56]])

    victim.set_body(change)
