"""A commit with an unknown member of 100,000 nested arrays."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, body_of, sign

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    sign(victim.commit, body_of(victim.commit) + b',"x":' + b"[" * 100_000 + b"]" * 100_000)
