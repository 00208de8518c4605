"""A commit needs a reader feature with a name of 500,000 letters, which the message must not repeat."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "incompatible.feature"


def attack(victim: Victim) -> None:
    victim.set_commit(lambda commit: commit.update(reader_features=["x" * 500_000]))
