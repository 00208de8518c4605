"""Byte planes of 2^62 numbers, of 0 bytes each, so that they need nothing of the blob."""

from __future__ import annotations

from typing import Any

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    def change(body: dict[str, Any]) -> None:
        body["sequences"].append(["p", 1 << 62, 0, 1, 0])
        body["partition_table"] = [["flat", len(body["sequences"]) - 1, 0]] * len(body["partition_table"])

    victim.set_body(change)
