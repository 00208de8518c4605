"""A keeper that receives copies: what it takes from its peers, and when a copy is whole."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.errors import StorageError
from holdfast.keeper import copies as keeper_copies
from holdfast.keeper.copies import PeerCopies
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import encode_generation, mark_protected
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, copy_names
from holdfast.peers.peer_messages import (
    CopyKept,
    CopyWanted,
    Damaged,
    Declined,
    Noted,
    OfferCopy,
    PeerReply,
    PrepareCopies,
    PutGeneration,
    PutRange,
)
from holdfast.run.history import Run
from tests.keeper.test_keeper_promises import Later
from tests.keeper.test_persist import CHECKPOINT, Saved
from tests.keeper.test_persist import folders as _folders
from tests.keeper.test_persist import run as _run

run, folders = _run, _folders


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def saved(run: Run, folders: list[NodeFolder], stack: ExitStack) -> Saved:
    """A checkpoint of two ranks, one on each node, sealed."""
    saved = Saved(run, folders, stack)
    for slot in saved.slots:
        Sealing(saved.generation).seal(slot)
    return saved


@pytest.fixture
def copies(saved: Saved, folders: list[NodeFolder], stack: ExitStack) -> PeerCopies:
    """The copies of the second node, which knows the generation."""
    return copies_in(folders[1], stack)


def copies_in(folder: NodeFolder, stack: ExitStack) -> PeerCopies:
    copies = PeerCopies(folder, PeerGenerations(folder, lambda _: None))
    stack.callback(copies.close)
    return copies


def offer_of(slot: Slot) -> OfferCopy:
    contents = slot.record.contents
    assert contents is not None
    return OfferCopy(contents, tuple(filter(None, slot.record.digests)), slot.rank)


def wanted(copies: PeerCopies, offer: OfferCopy) -> int:
    """Offer a copy that the keeper wants. Returns the token."""
    reply = copies.offer(offer)
    assert isinstance(reply, CopyWanted), reply
    return reply.token


def whole(slot: Slot) -> bytes:
    contents = slot.record.contents
    assert contents is not None
    return slot.data[: contents.nbytes].tobytes()


def send(copies: PeerCopies, token: int, data: bytes, *, start: int = 0) -> None:
    sink = copies.sink(PutRange(token, start, len(data)))
    sink.memory[:] = np.frombuffer(data, np.uint8)
    sink.received(len(data))
    assert sink.finish() == Noted()


def received(copies: PeerCopies, slot: Slot) -> PeerReply:
    """Offer and send a slot."""
    token = wanted(copies, offer_of(slot))
    send(copies, token, whole(slot))
    return copies.finish(token)


def state_of(copies: PeerCopies, folder: NodeFolder) -> SlotState:
    (name,) = copy_names(folder)
    slot = copies.named(name)
    assert slot is not None
    return slot.refresh().state


def test_a_copy_that_is_being_verified_is_left_alone_by_the_keeper_that_removes_old_ones(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of a rank on a node that knows of a protected checkpoint lost its lock to the keeper's look: the
    sender heard of an AssertionError, and the memory of the copy stayed taken for as long as the keeper lived."""
    damage_of = keeper_copies._damage

    def looked_meanwhile(incoming: Any) -> str | None:
        copies.tend(())
        copies.give_back()
        return damage_of(incoming)

    mark_protected(folders[1], CHECKPOINT)
    monkeypatch.setattr(keeper_copies, "_damage", looked_meanwhile)
    assert received(copies, saved.slots[0]) == CopyKept()
    assert state_of(copies, folders[1]) == SlotState.HELD


def test_memory_that_takes_no_slot_at_all_is_named_with_what_to_do(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node heard of "[Errno 28] No space left on device", and not of which memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NodeFolder, "create_unnamed", full)
    reply = copies.offer(offer_of(saved.slots[0]))
    assert isinstance(reply, Declined)
    assert f"'{folders[1].path}' cannot be used: No space left on device. Make room there" in reply.reason


def test_a_copy_that_came_in_several_ranges_is_kept_and_not_wanted_again(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder]
) -> None:
    slot, data = saved.slots[0], whole(saved.slots[0])
    contents = slot.record.contents
    assert contents is not None
    cuts = [0, 3, contents.data_start + 5, len(data)]  # within the header, and within a block
    token = wanted(copies, offer_of(slot))
    for start, stop in itertools.pairwise(cuts):
        send(copies, token, data[start:stop], start=start)
    assert copies.finish(token) == CopyKept()
    assert state_of(copies, folders[1]) == SlotState.HELD
    (held,) = copies.held(CHECKPOINT)
    assert whole(held) == data
    assert copies.offer(offer_of(slot)) == CopyKept()
    other = msgspec.structs.replace(offer_of(slot), digests=("0" * 32,))
    assert isinstance(copies.offer(other), CopyWanted)


def test_bytes_beyond_the_copy_are_refused_and_the_copy_goes_on(saved: Saved, copies: PeerCopies) -> None:
    token, data = wanted(copies, offer_of(saved.slots[0])), whole(saved.slots[0])
    for start, nbytes in ((0, 1 << 30), (1 << 30, 1), (-1, 2), (5, -1)):
        with pytest.raises(ValueError, match="outside of the slot"):
            copies.sink(PutRange(token, start, nbytes))
    with pytest.raises(StorageError, match="does not receive that copy"):
        copies.sink(PutRange(token ^ 1, 0, 1))
    send(copies, token, data)
    assert copies.finish(token) == CopyKept()


def test_no_bytes_are_taken_before_the_generation_says_what_they_are(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack
) -> None:
    folders[1].remove(f"generation-{CHECKPOINT}")
    copies, slot = copies_in(folders[1], stack), saved.slots[0]
    data = encode_generation(saved.generation)
    put = PutGeneration(CHECKPOINT, len(data))

    def send_generation() -> PeerReply:
        sink = copies.sink(put)
        sink.memory[:] = np.frombuffer(data, np.uint8)
        return sink.finish()

    assert isinstance(send_generation(), Declined)  # nothing of it was offered
    reply = copies.offer(offer_of(slot))
    assert isinstance(reply, CopyWanted)
    assert reply.needs_generation
    with pytest.raises(StorageError, match="does not receive that copy"):
        copies.sink(PutRange(reply.token, 0, 1))
    with pytest.raises(StorageError, match="does not receive that copy"), copies.filling(reply.token):
        pass
    assert copies.finish(reply.token) == Damaged("it was not sent as a whole")
    assert send_generation() == Noted()
    send(copies, reply.token, whole(slot))
    assert copies.finish(reply.token) == CopyKept()


def test_a_copy_is_not_whole_while_a_range_is_on_the_way(saved: Saved, copies: PeerCopies) -> None:
    token, data = wanted(copies, offer_of(saved.slots[0])), whole(saved.slots[0])
    send(copies, token, data)
    sink = copies.sink(PutRange(token, 0, 4))
    assert copies.finish(token) == Damaged("it was not sent as a whole")
    assert isinstance(copies.offer(offer_of(saved.slots[0])), Declined)  # it is being sent
    sink.memory[:] = np.frombuffer(data[:4], np.uint8)
    sink.finish()
    assert copies.finish(token) == CopyKept()


def test_a_range_whose_connection_broke_is_sent_again_by_a_new_offer(saved: Saved, copies: PeerCopies) -> None:
    token = wanted(copies, offer_of(saved.slots[0]))
    copies.sink(PutRange(token, 0, 4)).abort()
    assert received(copies, saved.slots[0]) == CopyKept()
    assert copies.finish(token) == Damaged("it was not sent as a whole")


def test_each_byte_that_changed_on_the_way_is_found(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder]
) -> None:
    slot, data = saved.slots[0], whole(saved.slots[0])
    contents = slot.record.contents
    assert contents is not None
    for at in (0, 20, contents.data_start - 1, contents.data_start, len(data) - 1):
        token = wanted(copies, offer_of(slot))
        send(copies, token, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        reply = copies.finish(token)
        assert isinstance(reply, Damaged), at
        assert "changed on the way" in reply.reason
        assert state_of(copies, folders[1]) == SlotState.FREE
    assert copies.held(CHECKPOINT) == []


def test_a_copy_of_another_layout_than_the_manifest_says_is_refused(saved: Saved, copies: PeerCopies) -> None:
    offer = offer_of(saved.slots[0])
    contents = offer.contents
    for change in ({"data_start": contents.data_start - 8}, {"nbytes": contents.nbytes - 1}):
        token = wanted(copies, msgspec.structs.replace(offer, contents=msgspec.structs.replace(contents, **change)))
        send(copies, token, whole(saved.slots[0])[: change.get("nbytes")])
        assert copies.finish(token) == Damaged("it has another layout than its manifest says")


def test_copies_of_two_ranks_are_received_at_the_same_time(saved: Saved, copies: PeerCopies) -> None:
    first, second = (wanted(copies, offer_of(slot)) for slot in saved.slots)
    for token, slot in ((second, saved.slots[1]), (first, saved.slots[0])):
        send(copies, token, whole(slot))
        assert copies.finish(token) == CopyKept()


def test_a_reception_that_no_connection_feeds_any_more_ends(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = wanted(copies, offer_of(saved.slots[0]))
    sink = copies.sink(PutRange(token, 0, 4))
    copies.tend(())
    assert state_of(copies, folders[1]) == SlotState.WRITING
    monkeypatch.setattr(keeper_copies, "_DEAD_S", 0.0)
    copies.tend(())
    assert state_of(copies, folders[1]) == SlotState.WRITING  # a connection feeds it
    sink.abort()
    copies.tend(())
    assert state_of(copies, folders[1]) == SlotState.FREE
    assert copies.finish(token) == Damaged("it was not sent as a whole")


def test_a_copy_that_is_dropped_is_free(saved: Saved, copies: PeerCopies, folders: list[NodeFolder]) -> None:
    token = wanted(copies, offer_of(saved.slots[0]))
    assert isinstance(copies.drop(token), Damaged)
    assert state_of(copies, folders[1]) == SlotState.FREE
    assert received(copies, saved.slots[0]) == CopyKept()
    assert len(copy_names(folders[1])) == 1


def test_what_is_being_received_stays_though_it_looks_old(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder]
) -> None:
    """The first copy of a rank, while the node knows a protected checkpoint of which that rank has no copy here."""
    mark_protected(folders[1], CHECKPOINT)
    token = wanted(copies, offer_of(saved.slots[0]))
    copies.tend(())
    copies.give_back()
    send(copies, token, whole(saved.slots[0]))
    assert copies.finish(token) == CopyKept()


@pytest.mark.parametrize("look", ["tend", "give back"])
def test_a_look_of_the_keeper_while_an_offer_takes_a_slot_leaves_it_the_slot(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """The look released the lock of the slot. The complete copy was refused, and its slot was never freed."""
    mark_protected(folders[1], CHECKPOINT)
    offer = offer_of(saved.slots[0])
    assert copies.prepare(PrepareCopies(0, len(whole(saved.slots[0])), 1)) == Noted()

    def expect(*_: object) -> None:
        copies.tend(()) if look == "tend" else copies.give_back()

    monkeypatch.setattr(PeerGenerations, "expect", expect)
    token = wanted(copies, offer)
    send(copies, token, whole(saved.slots[0]))
    assert copies.finish(token) == CopyKept()


def test_a_copy_of_a_file_that_its_checkpoint_does_not_have_frees_its_slot(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder]
) -> None:
    """Its slot stayed as it was while it was received, until the keeper ended."""
    offer = offer_of(saved.slots[0])
    token = wanted(copies, msgspec.structs.replace(offer, contents=msgspec.structs.replace(offer.contents, file=99)))
    send(copies, token, whole(saved.slots[0]))
    with pytest.raises(IndexError):
        copies.finish(token)
    assert state_of(copies, folders[1]) == SlotState.FREE


def later_than(saved: Saved | Later, folder: NodeFolder, stack: ExitStack) -> Later:
    """A later checkpoint, sealed, whose slots all lie in `folder`."""
    later = Later(saved, folder, stack)
    for slot in later.slots:
        Sealing(later.generation).seal(slot)
    return later


def test_copies_that_are_owed_to_the_run_stay_and_others_make_way(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], stack: ExitStack
) -> None:
    """The ranks have no part of the newest protected checkpoint, so they live no more."""
    for slot in saved.slots:
        assert received(copies, slot) == CopyKept()
    owed, other = sorted(copies.held(CHECKPOINT), key=lambda slot: slot.rank)
    owed.promote(CHECKPOINT)
    assert [slot.name for slot in copies.owed] == [owed.name]
    copies.tend(())
    assert {owed.name, other.name} == set(copy_names(folders[1]))
    mark_protected(folders[1], later_than(saved, folders[1], stack).generation.checkpoint_id)
    copies.tend(())
    assert copy_names(folders[1]) == [owed.name]
    copies.give_back()
    copies.tend([CHECKPOINT])
    assert copy_names(folders[1]) == [owed.name]
    assert owed.refresh().state == SlotState.SEALED


def test_memory_that_copies_do_not_need_is_given_back(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder]
) -> None:
    assert received(copies, saved.slots[0]) == CopyKept()
    copies.give_back()
    assert copy_names(folders[1]) == []
    assert received(copies, saved.slots[0]) == CopyKept()


def test_a_copy_that_somebody_removed_is_forgotten(saved: Saved, copies: PeerCopies, folders: list[NodeFolder]) -> None:
    assert received(copies, saved.slots[0]) == CopyKept()
    (name,) = copy_names(folders[1])
    folders[1].remove(name)
    copies.tend(())
    assert copies.named(name) is None
    assert received(copies, saved.slots[0]) == CopyKept()


def test_the_newest_protected_copy_is_not_filled_anew_nor_one_that_is_owed(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], stack: ExitStack
) -> None:
    mark_protected(folders[1], CHECKPOINT)
    assert received(copies, saved.slots[0]) == CopyKept()
    (first,) = copies.held(CHECKPOINT)
    later = later_than(saved, folders[1], stack)
    assert received(copies, later.slots[0]) == CopyKept()
    assert first.refresh().state == SlotState.HELD
    assert len(copy_names(folders[1])) == 2
    mark_protected(folders[1], later.generation.checkpoint_id)
    first.promote(CHECKPOINT)  # old, and owed to the run
    third = Later(later, folders[1], stack)
    Sealing(third.generation).seal(third.slots[0])
    assert received(copies, third.slots[0]) == CopyKept()
    assert first.refresh().contents == saved.slots[0].record.contents
    assert len(copy_names(folders[1])) == 3


def test_copies_that_are_owed_to_the_run_do_not_make_others_more_and_more(
    saved: Saved, copies: PeerCopies, folders: list[NodeFolder], stack: ExitStack
) -> None:
    """While nothing got protected, each newer copy of the rank took memory anew, until the node had none."""
    assert received(copies, saved.slots[0]) == CopyKept()
    (owed,) = copies.held(CHECKPOINT)
    owed.promote(CHECKPOINT)
    later: Saved | Later = saved
    for _ in range(5):
        later = later_than(later, folders[1], stack)
        assert received(copies, later.slots[0]) == CopyKept()
    assert owed.refresh().state == SlotState.SEALED
    assert len(copy_names(folders[1])) == 3
