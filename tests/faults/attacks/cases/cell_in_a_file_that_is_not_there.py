"""A tensor lies in file 7 of 2."""

from __future__ import annotations

from typing import Any

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    def change(body: dict[str, Any]) -> None:
        body["sequences"].append(["a", [[7, [1], [0]]]])
        body["partition_table"].append(["grid", [0], len(body["sequences"]) - 1])
        body["partitions"][0] = len(body["partition_table"]) - 1

    victim.set_body(change)
