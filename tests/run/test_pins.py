"""Pins of users and leases of readers keep a checkpoint from being deleted, and do not stay in the way for ever."""

from __future__ import annotations

import time

import pytest

from holdfast.errors import ConfigurationError, NotFoundError, StorageError
from holdfast.format import records
from holdfast.format.hold_records import (
    HoldName,
    Lease,
    Pin,
    RemovalNotice,
    lease_key,
    notice_key,
    parse_hold_name,
    pin_key,
)
from holdfast.format.records import Place
from holdfast.format.tombstones import Removed, removed_key
from holdfast.run import holds
from holdfast.run.history import Run
from holdfast.run.holds import CLOCKS_S, Holds, await_removals, create_lease, delete_ended, removal_announced
from holdfast.run.pins import pin_checkpoint, unpin_checkpoint
from holdfast.run.removal import remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, names, save

PLACE = Place(1, 2)
TOKEN = "0123456789abcdef"


@pytest.fixture
def run() -> Run:
    """A run with the steps 10, 20, 30."""
    run = Run.create(MemoryStore())
    begin(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), seq * 10)
    return run


def refused(run: Run, place: Place) -> str:
    """The code of the error that a removal of the checkpoint at `place` raises; its files are all there still."""
    commit = run.find(place=place)
    before = names(run, commit.checkpoint)
    with pytest.raises(ConfigurationError) as caught:
        remove_checkpoint(run, commit)
    assert names(run, commit.checkpoint) == before
    assert run.is_committed(place)
    return caught.value.code


def test_the_name_of_each_record_says_what_it_holds() -> None:
    lease = Lease(place=PLACE, until=1_700_000_000.9, holder="me")
    notice = RemovalNotice(place=PLACE, created=1_600_000_000.0, holder="me")
    keys = pin_key(PLACE), lease_key(lease, TOKEN), notice_key(notice, TOKEN)
    assert keys == (
        "pins/9999999998-9999999997.json",
        "pins/9999999998-9999999997.until-1700000000-0123456789abcdef.json",
        "pins/9999999998-9999999997.removing-1600000000-0123456789abcdef.json",
    )
    assert [parse_hold_name(key.removeprefix("pins/")) for key in keys] == [
        HoldName("pin", PLACE, 0),
        HoldName("until", PLACE, 1_700_000_000),
        HoldName("removing", PLACE, 1_600_000_000),
    ]
    for record in (Pin(place=PLACE, created=1.0), lease, notice):
        assert records.decode(records.encode(record), type(record), path="x") == record


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "9999999999-9999999997.json",
        "9999999999-9999999997.until-1700000000-0123456789abcdef.json",
        "9999999998-9999999997.until-1700000000.json",
        "9999999998-9999999997.since-1700000000-0123456789abcdef.json",
    ],
)
def test_other_names_hold_nothing(name: str) -> None:
    assert parse_hold_name(name) is None


def test_a_pinned_checkpoint_is_not_deleted_until_it_is_unpinned(run: Run) -> None:
    commit = run.find(place=PLACE)
    assert pin_checkpoint(run, commit)
    assert not pin_checkpoint(run, commit), "a second pin changes nothing"
    assert refused(run, PLACE) == "config.pinned"
    assert unpin_checkpoint(run, PLACE)
    assert not unpin_checkpoint(run, PLACE)
    remove_checkpoint(run, commit)
    assert not run.is_committed(PLACE)
    assert run.storage.list("pins") == []


def test_a_removed_checkpoint_cannot_be_pinned(run: Run) -> None:
    commit = run.find(place=PLACE)
    remove_checkpoint(run, commit)
    with pytest.raises(NotFoundError, match="was deleted before it could be pinned") as caught:
        pin_checkpoint(run, commit)
    assert caught.value.code == "not_found.removed"
    assert run.storage.list("pins") == []


def test_a_checkpoint_is_not_deleted_while_a_reader_has_a_lease(run: Run) -> None:
    key = create_lease(run.storage, PLACE, lasting_s=60.0)
    assert refused(run, PLACE) == "config.in_use"
    assert refused(run, PLACE) == "config.in_use"
    run.storage.delete(key)
    remove_checkpoint(run, run.find(place=PLACE))
    assert not run.is_committed(PLACE)


def test_the_lease_of_a_dead_reader_ends_when_clocks_may_differ_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_lease(run.storage, PLACE, lasting_s=60.0)
    now = time.time()
    monkeypatch.setattr("holdfast.run.holds.time.time", lambda: now + 60.0 + CLOCKS_S - 2)
    assert refused(run, PLACE) == "config.in_use"
    monkeypatch.setattr("holdfast.run.holds.time.time", lambda: now + 60.0 + CLOCKS_S + 2)
    remove_checkpoint(run, run.find(place=PLACE))
    found = Holds.of(run.storage)
    assert (len(found.leases), len(found.ended)) == (0, 1)
    delete_ended(run.storage, found)
    assert run.storage.list("pins") == []


def test_a_reader_that_comes_right_after_the_tombstone_keeps_the_files(run: Run) -> None:
    commit = run.find(place=PLACE)
    run.storage.create(removed_key(PLACE), records.encode(Removed(place=PLACE, checkpoint=commit.checkpoint)))
    key = create_lease(run.storage, PLACE, lasting_s=60.0)
    before = names(run, commit.checkpoint)
    with pytest.raises(ConfigurationError, match="a reader uses it") as caught:
        remove_checkpoint(run, commit)
    assert caught.value.code == "config.in_use"
    assert names(run, commit.checkpoint) == before
    run.storage.delete(key)
    remove_checkpoint(run, commit)
    assert names(run, commit.checkpoint) == []


def test_a_notice_of_a_dead_process_delays_but_does_not_prevent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), removal_announced(run.storage, PLACE):
        raise KeyboardInterrupt
    assert run.storage.list("pins") == [], "a process that lives takes its notice back"
    notice = RemovalNotice(place=PLACE, created=records.now(), holder="a dead process")
    run.storage.create(notice_key(notice, TOKEN), records.encode(notice))
    monkeypatch.setattr(holds, "PATIENCE_S", 60.0)
    begun_s = time.monotonic()
    await_removals(run.storage, Place(1, 1))
    assert time.monotonic() - begun_s < 30, "notices of other checkpoints do not matter"
    monkeypatch.setattr(holds, "PATIENCE_S", 0.5)
    begun_s = time.monotonic()
    await_removals(run.storage, PLACE)
    assert 0.5 <= time.monotonic() - begun_s < 30
    remove_checkpoint(run, run.find(place=PLACE))
    assert not run.is_committed(PLACE)


def test_a_removal_that_took_too_long_after_its_notice_gives_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "NOTICE_S", -1.0)
    with pytest.raises(StorageError, match="was not removed") as caught:
        remove_checkpoint(run, run.find(place=PLACE))
    assert caught.value.retryable
    assert run.is_committed(PLACE)
    assert run.storage.list("pins") == []


def test_a_rollback_waits_for_an_announced_removal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr("holdfast.run.history.await_removals", lambda _, place: waited.append(place))
    rollback(run, PLACE)
    assert waited == [PLACE]
