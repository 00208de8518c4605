"""Epoch 2 was opened from epoch 1, and epoch 1 from epoch 2."""

from __future__ import annotations

from holdfast.format import records
from tests.faults.attacks.victim import Victim, change_record

CODE = "corrupt.record"


def attack(victim: Victim) -> None:
    victim.commit.rename(victim.path / records.commit_key(records.Place(1, 2)))
    second = victim.path / records.epoch_key(2)
    second.write_bytes(victim.epoch.read_bytes())
    change_record(second, lambda epoch: epoch.update(epoch=2, opened_from={"epoch": 1, "seq": 1}, why="resume"))
    change_record(victim.epoch, lambda epoch: epoch.update(opened_from={"epoch": 2, "seq": 9}, why="resume"))
    commit = victim.path / records.commit_key(records.Place(1, 1))
    commit.write_bytes((victim.path / records.commit_key(records.Place(1, 2))).read_bytes())
    change_record(commit, lambda tree: tree.update(place={"epoch": 1, "seq": 2}))
