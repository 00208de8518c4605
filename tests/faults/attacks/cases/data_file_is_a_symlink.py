"""A data file is a symbolic link to /etc/passwd."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.file"


def attack(victim: Victim) -> None:
    victim.data(0).unlink()
    victim.data(0).symlink_to("/etc/passwd")
