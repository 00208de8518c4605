"""A data file's header has one name twice, for other bytes: other readers would take either."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim

CODE = "corrupt.header"


def attack(victim: Victim) -> None:
    data = bytearray(victim.data(1).read_bytes())
    data[:4096] = data[:4096].replace(b'"model/scale@', b'"model/weigh@').replace(b'"model/weigh@', b'"model/scale@')
    at = data.index(b"model/weight@")
    data[at : at + 13] = b"model/scale@2"
    victim.data(1).write_bytes(data)
