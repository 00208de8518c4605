"""A tensor has U+202E, a control sequence and a markup tag in its name, and one of its bytes is damaged."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.file"


def attack(victim: Victim) -> None:
    victim.set_manifest(names=["model/bias", "model/scale", "model/\N{RIGHT-TO-LEFT OVERRIDE}\x1b[2J[/]"])
    data = bytearray(victim.data(1).read_bytes())
    data[-1] ^= 1
    victim.data(1).write_bytes(data)
