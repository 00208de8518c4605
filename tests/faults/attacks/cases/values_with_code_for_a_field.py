"""A field of a NamedTuple is an expression: Python compiles the names of fields."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.values"


def attack(victim: Victim) -> None:
    field = "x=__import__('os')"
    rows = [["a", ["record", "P", [field]]], ["a/" + field, ["plain", 1]]]
    victim.set_values(msgspec.msgpack.encode(rows))
