"""Two keepers, of two nodes, that hold copies of each other's slots."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest

from holdfast.errors import HoldfastError, StorageError
from holdfast.keeper import daemon, peer_memory, peer_session, sending
from holdfast.keeper.copies import PeerCopies
from holdfast.keeper.daemon import Keeper
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.peer_memory import KEPT
from holdfast.node_memory.generations import (
    encode_generation,
    give_up_generation,
    protected_ids,
    remove_generation,
    unmark_protected,
)
from holdfast.node_memory.limits import MemoryLimit
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import (
    PeerNode,
    PeerSecret,
    PeerTable,
    digest_of,
    forget_peers,
    note_peer_trouble,
    note_secret,
    note_table,
    noted_port,
    peer_trouble,
)
from holdfast.node_memory.slots import Slot, SlotFile, SlotKind, SlotRecord, SlotState, copy_names
from holdfast.peers.peer_messages import CopyKept, CopyWanted, Declined, OfferCopy, PutGeneration
from holdfast.run.history import Run
from tests.keeper.parity_nodes import RETRIES
from tests.keeper.test_keeper_promises import Later, looked
from tests.keeper.test_persist import CHECKPOINT, Saved, assert_loads
from tests.keeper.test_persist import folders as _folders
from tests.keeper.test_persist import run as _run
from tests.support.nursery import until

run, folders = _run, _folders

SECRET = b"s" * 32


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def saved(run: Run, folders: list[NodeFolder], stack: ExitStack) -> Saved:
    """A checkpoint of two ranks, one on each node, staged."""
    return Saved(run, folders, stack)


def keepers_of(folders: list[NodeFolder], stack: ExitStack) -> list[Keeper]:
    """A keeper of each node, which know each other."""
    keepers = [Keeper(folder) for folder in folders]
    for keeper in keepers:
        stack.callback(keeper.close)
    meet(folders, keepers)
    return keepers


def meet(folders: list[NodeFolder], keepers: list[Keeper]) -> None:
    for folder, keeper in zip(folders, keepers, strict=True):
        note_secret(folder, PeerSecret(SECRET, "127.0.0.1"))
        keeper.look()
    ports = [noted_port(folder) for folder in folders]
    nodes = tuple(PeerNode(str(number), f"127.0.0.1:{port.port}") for number, port in enumerate(ports) if port)
    for number, folder in enumerate(folders):
        note_table(folder, PeerTable(digest_of(SECRET), number, nodes, ((1,), (0,))))


def look(*keepers: Keeper) -> bool:
    for keeper in keepers:
        keeper.look()
    return True


def copy_in(folder: NodeFolder, stack: ExitStack) -> Slot:
    (name,) = copy_names(folder)
    return stack.enter_context(Slot(folder, name))


def test_each_node_gets_a_copy_bit_for_bit_and_both_hear_that_the_checkpoint_is_protected(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))
    for slot, folder in zip(saved.slots, reversed(folders), strict=True):
        copy = copy_in(folder, stack)
        contents = copy.record.contents
        assert contents is not None
        assert (copy.state, copy.rank) == (SlotState.HELD, slot.rank)
        assert copy.record.digests == slot.refresh().digests
        assert copy.data[: contents.nbytes].tobytes() == slot.data[: contents.nbytes].tobytes()
        assert peer_trouble(folder) == ""


def test_a_slot_that_changed_after_it_was_sealed_becomes_no_copy(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    for folder in folders:
        forget_peers(folder)
    until(lambda: look(*keepers) and all(slot.refresh().state != SlotState.STAGED for slot in saved.slots))
    contents = saved.slots[0].record.contents
    assert contents is not None
    saved.slots[0].data[contents.nbytes - 1] ^= 1
    meet(folders, keepers)
    until(lambda: look(*keepers) and "bytes of it changed" in peer_trouble(folders[0]))
    assert copy_in(folders[1], stack).state == SlotState.FREE
    assert protected_ids(folders[0]) == set()


def test_a_peer_without_memory_delays_protection_until_it_has_some(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_session, "_RETRIES", RETRIES)
    keepers = keepers_of(folders, stack)
    with monkeypatch.context() as patched:
        patched.setattr(peer_memory, "rooms", lambda _: [MemoryLimit(0, "a limit")])
        until(lambda: look(*keepers) and "a limit leaves 0" in peer_trouble(folders[0]))
        until(lambda: look(*keepers) and not copy_names(folders[0]))  # a slot that is refused exists for a moment
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    until(lambda: look(*keepers) and not any(peer_trouble(folder) for folder in folders))
    assert all(copy_in(folder, stack).state == SlotState.HELD for folder in folders)


def test_a_full_memory_ends_no_keeper_which_says_later_what_it_could_not_note(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first note that the memory of the node did not take, as of a trouble with a peer, ended the keeper."""
    write, create = NodeFolder.write, NodeFolder.create
    full, refused = set(folders), set[str]()

    def written(self: NodeFolder, name: str, data: bytes) -> None:
        require_room(self, name)
        write(self, name, data)

    def created(self: NodeFolder, name: str) -> int:
        require_room(self, name)
        return create(self, name)

    def require_room(folder: NodeFolder, name: str) -> None:
        if folder in full and name.startswith(("peers.port", "peers.trouble", "protected-")):
            refused.add(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NodeFolder, "write", written)
    monkeypatch.setattr(NodeFolder, "create", created)
    keepers = [stack.enter_context(closing(Keeper(folder))) for folder in folders]
    for folder, keeper in zip(folders, keepers, strict=True):
        note_secret(folder, PeerSecret(SECRET, "127.0.0.1"))
        keeper.look()
        assert noted_port(folder) is None
    full.clear()
    meet(folders, keepers)
    full.update(folders)
    with monkeypatch.context() as patched:
        patched.setattr(peer_memory, "rooms", lambda _: [MemoryLimit(0, "a limit")])
        refused.clear()
        until(lambda: look(*keepers) and "peers.trouble" in refused)
        full.clear()
        until(lambda: look(*keepers) and "a limit leaves 0" in peer_trouble(folders[0]))
    full.update(folders)
    until(lambda: look(*keepers) and all(len(copy_names(folder)) == 1 for folder in folders))
    until(lambda: look(*keepers) and all(copy_in(folder, stack).state == SlotState.HELD for folder in folders))
    for _ in range(5):
        look(*keepers)
    assert not any(protected_ids(folder) for folder in folders)
    full.clear()
    until(lambda: look(*keepers) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))


def test_a_generation_that_finds_no_room_on_a_peer_is_refused_with_the_cause_and_what_to_do(
    saved: Saved, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender heard of an OSError, and had to look for the log of the peer, in that full memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    remove_generation(folders[1], CHECKPOINT)
    generations = PeerGenerations(folders[1], lambda _: None)
    generations.expect(CHECKPOINT)
    data = encode_generation(saved.generation)
    monkeypatch.setattr(NodeFolder, "write", full)
    with pytest.raises(StorageError, match="No space left on device") as raised:
        generations.learn(PutGeneration(CHECKPOINT, len(data)), data)
    assert "Make room there" in raised.value.action


def test_peers_take_memory_for_copies_before_the_first_save(
    run: Run, folders: list[NodeFolder], stack: ExitStack
) -> None:
    """They took it when the first slot was offered, so the first protection took seconds per GiB."""

    def blocks(name: str) -> int:
        return os.stat(folders[1].path / name).st_blocks * 512

    slot = stack.enter_context(Slot.create(folders[0], rank=7, nbytes=1 << 20))
    assert slot.take()
    slot.reserve()
    slot.let_go()
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and sum(map(blocks, copy_names(folders[1]))) >= 2 * slot.nbytes)
    copies = [stack.enter_context(Slot(folders[1], name)) for name in copy_names(folders[1])]
    assert [(each.state, each.rank, each.nbytes) for each in copies] == [(SlotState.FREE, 7, slot.nbytes)] * 2
    assert not copy_names(folders[0])


def test_a_copy_that_was_being_received_when_its_keeper_died_is_free(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    contents = saved.slots[0].record.contents
    for state in (SlotState.WRITING, SlotState.STAGED):
        with Slot.create(folders[1], rank=0, nbytes=saved.slots[0].nbytes, kind=SlotKind.COPY) as slot:
            assert slot.take()
            slot.advance(SlotRecord(SlotState.WRITING, contents))
            if state == SlotState.STAGED:
                slot.advance(SlotRecord(SlotState.STAGED, contents))
            name = slot.name
        PeerCopies(folders[1], PeerGenerations(folders[1], lambda _: None)).close()
        with Slot(folders[1], name) as slot:
            assert slot.state == SlotState.FREE


def test_the_next_keeper_listens_at_the_same_port_and_nothing_is_sent_again(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    port = noted_port(folders[1])
    keepers[1].close()
    other = Keeper(folders[1])
    stack.callback(other.close)
    until(lambda: looked(other) and noted_port(folders[1]) == port)
    monkeypatch.setattr(sending, "_send_ranges", None)  # would fail
    for folder in folders:
        folder.remove(f"protected-{CHECKPOINT}")
    until(lambda: look(keepers[0], other) and all(protected_ids(folder) for folder in folders))
    assert noted_port(folders[1]) == port


def test_the_copy_of_a_lost_node_is_written_to_the_run_when_its_file_does_not_come(
    run: Run, saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PATIENCE_S", 0.2)
    store = Path(run.storage.location.url)
    store.rename(store.with_name("away"))
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    keepers[0].close()  # with its node
    store.with_name("away").rename(store)
    until(lambda: looked(keepers[1]) and saved.slots[1].refresh().state == SlotState.COMMITTED)
    assert_loads(run, saved)
    until(lambda: looked(keepers[1]) and copy_in(folders[1], stack).state == SlotState.COMMITTED)


def test_a_node_holds_two_copies_of_a_rank_and_fills_the_older_one_anew(
    run: Run, saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    newest: Saved | Later = saved
    for _ in range(3):
        newest = _later(newest, folders, stack)
        protected = partial(_is_protected, newest, folders)
        until(lambda protected=protected: look(*keepers) and protected())  # type: ignore[misc]
    for folder in folders:
        with ExitStack() as held:
            slots = [held.enter_context(Slot(folder, name)) for name in copy_names(folder)]
            ids = {slot.record.contents.checkpoint_id for slot in slots if slot.record.contents is not None}
        assert len(slots) == 2
        assert newest.generation.checkpoint_id in ids


def _is_protected(saved: Saved | Later, folders: list[NodeFolder]) -> bool:
    return all(saved.generation.checkpoint_id in protected_ids(folder) for folder in folders)


def _later(saved: Saved | Later, folders: list[NodeFolder], stack: ExitStack) -> Later:
    """A checkpoint like `saved` at the next place, each part on its own node."""
    later = Later(saved, folders[0], stack)
    other = Later(saved, folders[1], stack)
    later.slots[1].remove()
    other.slots[0].remove()
    later.slots = [later.slots[0], other.slots[1]]
    return later


def test_a_copy_of_a_checkpoint_that_was_given_up_is_freed(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    until(
        lambda: look(*keepers) and bool(copy_names(folders[1])) and copy_in(folders[1], stack).state == SlotState.HELD
    )
    give_up_generation(folders[1], CHECKPOINT)
    until(lambda: looked(keepers[1]) and copy_in(folders[1], stack).state == SlotState.FREE)


def offer_of(slot: Slot) -> OfferCopy:
    contents = slot.record.contents
    assert contents is not None
    return OfferCopy(contents, ("0" * 32,), slot.rank)


def test_offers_that_no_keeper_makes_are_refused(saved: Saved, folders: list[NodeFolder], stack: ExitStack) -> None:
    held = PeerCopies(folders[1], PeerGenerations(folders[1], lambda _: None))
    stack.callback(held.close)
    offer = offer_of(saved.slots[0])
    contents = offer.contents
    second = SlotFile(1, 0, 10, 20)
    bad = (
        msgspec.structs.replace(offer, digests=()),
        msgspec.structs.replace(offer, contents=msgspec.structs.replace(contents, nbytes=contents.data_start - 1)),
        msgspec.structs.replace(offer, contents=msgspec.structs.replace(contents, nbytes=1 << 60)),
        msgspec.structs.replace(
            offer, contents=msgspec.structs.replace(contents, second=second), digests=("0" * 32, "0" * 32)
        ),
    )
    for each in bad:
        with pytest.raises((ValueError, HoldfastError)):
            held.offer(each)
    assert copy_names(folders[1]) == []


def test_a_second_offer_while_the_first_is_being_sent_is_declined(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    held = PeerCopies(folders[1], PeerGenerations(folders[1], lambda _: None))
    stack.callback(held.close)
    offer = offer_of(saved.slots[0])
    first = held.offer(offer)
    assert isinstance(first, CopyWanted)
    assert first.needs_generation is False  # this node has a part of it
    again = held.offer(offer)  # no connection feeds the first any more
    assert isinstance(again, CopyWanted)
    assert len(copy_names(folders[1])) == 1
    assert not isinstance(held.finish(first.token), CopyKept)
    assert not isinstance(held.finish(again.token), CopyKept)
    assert copy_in(folders[1], stack).state == SlotState.FREE


def test_a_peer_that_takes_a_copy_slowly_does_not_hold_up_saves(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = keepers_of(folders, stack)
    monkeypatch.setattr(peer_session, "_PATIENCE_S", 0.3)
    go_on = Event()
    stack.callback(go_on.set)
    offer = PeerCopies.offer
    monkeypatch.setattr(PeerCopies, "offer", lambda self, each: (go_on.wait(30), offer(self, each))[1])
    until(lambda: look(*keepers) and "takes it slowly" in peer_trouble(folders[0]))
    go_on.set()
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    until(lambda: look(*keepers) and not any(peer_trouble(folder) for folder in folders))
    assert copy_in(folders[1], stack).state == SlotState.HELD


def test_a_slot_that_was_given_up_is_freed_although_a_lost_peer_does_not_take_it(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.slots[1].remove()  # so the checkpoint is never durable
    keepers = keepers_of(folders, stack)
    go_on = Event()
    stack.callback(go_on.set)
    monkeypatch.setattr(PeerCopies, "offer", lambda *_: go_on.wait(30))
    until(lambda: looked(keepers[0]) and keepers[0].owes and keepers[0]._protection.is_sending)
    assert saved.slots[0].refresh().state == SlotState.SEALED
    give_up_generation(folders[0], CHECKPOINT)
    until(lambda: looked(keepers[0]) and saved.slots[0].refresh().state == SlotState.FREE, timeout_s=10)


def test_the_nodes_of_a_new_job_protect_what_those_of_the_last_one_protected(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    copy_in(folders[1], stack).remove()  # with the node that had it
    forget_peers(folders[0])
    forget_peers(folders[1])
    until(lambda: look(*keepers))
    meet(folders, keepers)
    until(lambda: look(*keepers) and bool(copy_names(folders[1])) and all(protected_ids(folder) for folder in folders))
    assert copy_in(folders[1], stack).record.digests == saved.slots[0].refresh().digests


def test_the_trouble_of_an_earlier_keeper_does_not_outlive_it(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    note_peer_trouble(folders[0], "the peer is away")
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and peer_trouble(folders[0]) == "")
    until(lambda: look(*keepers) and all(protected_ids(folder) for folder in folders))
    assert peer_trouble(folders[0]) == ""


def test_a_node_that_missed_the_mark_of_protection_gets_it_when_it_says_again_that_its_copies_are_kept(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))
    for restarted in (False, True):
        if restarted:  # the next keeper of the first node has counted nothing
            keepers[0].close()
            keepers[0] = Keeper(folders[0])
            stack.callback(keepers[0].close)
        unmark_protected(folders[1], CHECKPOINT)  # as if the message had been lost
        until(lambda: look(*keepers) and protected_ids(folders[1]) != set())
        assert protected_ids(folders[1]) == {CHECKPOINT}


def test_saves_do_not_wait_for_ever_for_a_mark_because_another_node_cannot_be_protected(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_session, "_PATIENCE_S", 0.2)
    keepers = keepers_of(folders, stack)
    offer = keepers[0]._copies.offer
    with monkeypatch.context() as patched:  # the first node has no room, and the second one has
        patched.setattr(keepers[0]._copies, "offer", lambda _: Declined("there is no room"))
        until(lambda: look(*keepers) and "there is no room" in peer_trouble(folders[1]))
        until(lambda: look(*keepers) and "does not say that all nodes have theirs" in peer_trouble(folders[0]))
        assert not protected_ids(folders[0])
    assert keepers[0]._copies.offer == offer
    until(lambda: look(*keepers) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))
    until(lambda: look(*keepers) and not any(peer_trouble(folder) for folder in folders))


def steps_in(folder: NodeFolder, rank: int) -> set[str]:
    """The ids of the checkpoints of which a node has whole copies of `rank`."""
    found = set()
    with ExitStack() as stack:
        for name in copy_names(folder):
            slot = stack.enter_context(Slot(folder, name))
            if slot.rank == rank and slot.state in KEPT and slot.record.contents is not None:
                found.add(slot.record.contents.checkpoint_id)
    return found


def test_the_copy_of_the_protected_checkpoint_stays_while_newer_ones_cannot_be_protected(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second unprotected one took its place, though a loss of the owner was to leave the protected one."""
    monkeypatch.setattr(peer_session, "_MARK_S", 0.2)
    keepers = keepers_of(folders, stack)
    until(lambda: look(*keepers) and _is_protected(saved, folders))
    later: Saved | Later = saved
    id_ = CHECKPOINT
    with monkeypatch.context() as patched:
        patched.setattr(keepers[0]._copies, "offer", lambda _: Declined("there is no room"))
        for _ in range(3):
            later = _later(later, folders, stack)
            id_ = later.generation.checkpoint_id
            until(lambda id_=id_: look(*keepers) and id_ in steps_in(folders[1], 0))  # type: ignore[misc]
            assert CHECKPOINT in steps_in(folders[1], 0)
        assert len(copy_names(folders[1])) == 3
    until(lambda: look(*keepers) and _is_protected(later, folders))
    until(lambda: look(*keepers) and len(copy_names(folders[1])) == 2)
    assert id_ in steps_in(folders[1], 0)
