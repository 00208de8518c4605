"""A commit with 200,000 metrics."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.size"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(metrics={str(n): float(n) for n in range(200_000)}))
