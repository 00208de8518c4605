"""Cut points rise strictly in 64-bit arithmetic, once around all integers, and end where they should."""

from __future__ import annotations

from typing import Any

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    def change(body: dict[str, Any]) -> None:
        cuts = [0, 1 << 62, -(1 << 63), -(1 << 62), 3]
        body["sequences"] += [["a", [[cut, [], []] for cut in cuts]], ["a", [[0, [4], [0]]]]]
        at = len(body["sequences"]) - 2
        body["partition_table"].append(["flat", at, at + 1])
        body["partitions"][0] = len(body["partition_table"]) - 1

    victim.set_body(change)
