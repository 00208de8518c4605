"""The manifest says that it lists 2^32 - 1 tensors, in 100 bytes."""

from __future__ import annotations

import msgspec

from tests.faults.attacks.victim import Victim

CODE = "corrupt.manifest"


def attack(victim: Victim) -> None:
    packed = msgspec.msgpack.encode({"checkpoint_id": "0" * 16})[1:]
    victim.set_packed(b"\x82" + packed + b"\xa5names\xdd\xff\xff\xff\xff\xa1a")
