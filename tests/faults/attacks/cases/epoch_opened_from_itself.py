"""Epoch 1 was opened from epoch 1, whose commits are gone: its lineage has no end."""

from __future__ import annotations

from tests.faults.attacks.victim import Victim, change_record

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.commit.unlink()
    change_record(victim.epoch, lambda epoch: epoch.update(opened_from={"epoch": 1, "seq": 1}, why="resume"))
