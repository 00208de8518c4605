"""Two fields of a NamedTuple are written differently, and Python takes them for one."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    fields = ["fi", "\N{LATIN SMALL LIGATURE FI}"]
    rows = [["a", ["record", "P", fields]], *([f"a/{field}", ["plain", 1]] for field in fields)]
    victim.set_values(msgspec.msgpack.encode(rows))
