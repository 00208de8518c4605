"""The errors of saves that failed or are not durable yet: each tells the cause and the next action."""

from __future__ import annotations

import pytest

from holdfast.checkpointer.save_errors import skipped_in_memory, stopped, too_slow, unless_known
from holdfast.checkpointer.snapshot_messages import MemoryStatus, SnapshotRoom
from holdfast.format.records import Place
from holdfast.signing import KEYS, signed


def test_the_last_failure_is_printed_in_lines() -> None:
    last = "[timeout.slot] no slot is free.\n  The last attempt failed: the disk is full.\nFree space."
    lines = str(stopped(7, "2 saves in a row made no checkpoint", "the newest is 9 s old", last)).splitlines()
    assert lines[1:4] == [
        "  The last failure: [timeout.slot] no slot is free.",
        "  The last attempt failed: the disk is full.",
        "  Free space.",
    ]


def test_a_keeper_without_the_key_of_its_job_is_not_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    with pytest.raises(Exception, match="holdfast node RUN --stop") as caught:
        signed(b"{")
    assert "Do what the error of the last attempt says" in unless_known(str(caught.value), "Wait longer.")
    assert unless_known("[storage.unavailable] the store is away.", "Wait longer.") == "Wait longer."


@pytest.mark.parametrize(
    ("world_size", "named"), [(1, "rank 0 "), (2, "ranks 0, 1 "), (9, "ranks 0, 1, 2, 3, 4, 5, 6, 7 ... ")]
)
def test_ranks_without_a_free_slot_are_named_in_a_sentence(world_size: int, named: str) -> None:
    full = MemoryStatus(None, is_free=False, oldest=None, given_up=(), is_as_before=True)
    found = SnapshotRoom.of([full] * world_size, "run")
    assert f"No slot of {named}became free" in str(too_slow(found, 60))
    assert f"the snapshots of {named}are not durable yet" in found.why_full
    assert f"no slot of {named}is free" in str(skipped_in_memory(3, found))


def test_a_save_that_waits_for_copies_on_other_nodes_does_not_say_that_it_waits_for_storage() -> None:
    durable = MemoryStatus(None, is_free=False, oldest=Place(1, 3), given_up=(), is_as_before=True)
    unprotected = MemoryStatus(
        None, is_free=False, oldest=Place(1, 3), given_up=(), is_as_before=True, awaits_peers=True
    )
    found = SnapshotRoom.of([durable, unprotected], "run")
    assert found.why_full == "the newest snapshots of ranks 0, 1 are not protected by other nodes yet"
