"""A data file is a symbolic link to /dev/zero, which has no end."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.incomplete"


def attack(victim: Victim) -> None:
    victim.data(0).unlink()
    victim.data(0).symlink_to("/dev/zero")
