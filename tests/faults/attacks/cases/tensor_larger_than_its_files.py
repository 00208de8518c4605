"""A tensor claims 2^40 elements that the sealed files cannot hold: memory would be taken before they are read."""

from __future__ import annotations

from typing import Any

from tests.faults.attacks.victim import Victim

CODE = "corrupt.file"


def attack(victim: Victim) -> None:
    def change(body: dict[str, Any]) -> None:
        body["shape_table"].append([1 << 40])
        body["shapes"][0] = len(body["shape_table"]) - 1
        body["partition_table"].append(["flat", len(body["sequences"]), len(body["sequences"]) + 1])
        body["partitions"][0] = len(body["partition_table"]) - 1
        body["sequences"] += [["a", [[0, [2], [1 << 40]]]], ["a", [[0, [1], [0]]]]]

    victim.set_body(change)
