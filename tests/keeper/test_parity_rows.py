"""Keepers that make parity of each other's slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.keeper import parity_rows, peer_memory, peer_session
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import give_up_generation, protected_ids
from holdfast.node_memory.limits import MemoryLimit
from holdfast.node_memory.parity_records import parity_in, record_of
from holdfast.node_memory.peering import peer_trouble, trouble_elsewhere
from holdfast.node_memory.slots import Slot, SlotState, parity_names
from holdfast.peers.peer_messages import Declined, OfferParity
from holdfast.protection.erasure import STRIP_NBYTES, add_multiple
from holdfast.store.base import Bytes
from tests.keeper.parity_nodes import RETRIES, ParityNodes, Snapshot
from tests.support.nursery import until

MIB = 1 << 20
#: Unlike nodes: two ranks, one rank, one with little, a rank without data beside another, and one of two blocks and a
#: bit.
SIZES = ((3 * MIB + 5, MIB), (2 * MIB,), (1000,), (0, MIB + 7), (2 * MIB + 100,))

Made = Callable[..., ParityNodes]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes nodes that know each other."""
    with ExitStack() as stack:

        def make(losses: int, sizes: Sequence[Sequence[int]] = SIZES) -> ParityNodes:
            nodes = ParityNodes(tmp_path, stack, sizes, losses)
            nodes.meet()
            return nodes

        yield make


def test_saves_do_not_wait_for_parity_that_a_node_makes_too_slowly(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only copies had a limit, so saves waited for as long as one node took to offer its part, or to read others'."""
    monkeypatch.setattr(peer_session, "_PATIENCE_S", 0.2)
    nodes = made(1)
    nodes.look()  # so that the late one knows the others
    snapshot = Snapshot(nodes, 1).stage(nodes)
    late = 2
    told = "step 1 is not protected yet: its parity is not complete on all nodes of the group."
    until(lambda: nodes.look(late) and peer_trouble(nodes.folders[0]) == told)
    nodes.protect(snapshot)
    until(lambda: nodes.look() and not any(map(peer_trouble, nodes.folders)))
    assert not peer_trouble(nodes.folders[0])


def test_parity_that_is_late_names_the_node_that_refuses_it(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, all nodes said only that parity is not complete on all nodes of the group."""
    monkeypatch.setattr(peer_session, "_PATIENCE_S", 0.2)
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes)
    with monkeypatch.context() as patched:
        patched.setattr(nodes.keepers[2]._rows, "offer", lambda _: Declined("there is no room"))
        end_s = time.monotonic() + 1
        until(lambda: nodes.look() and time.monotonic() > end_s)
        for number in (0, 1):
            assert "there is no room" in peer_trouble(nodes.folders[number])
        until(lambda: nodes.look() and "there is no room" in trouble_elsewhere(nodes.folders[2]))
    nodes.protect(snapshot)


def rows_in(nodes: ParityNodes, number: int) -> list[Slot]:
    folder = nodes.folders[number]
    return [nodes.stack.enter_context(Slot(folder, name)) for name in parity_names(folder)]


def rows_of(nodes: ParityNodes, number: int, snapshot: Snapshot) -> list[Slot]:
    rows = rows_in(nodes, number)
    return [row for row in rows if row.record.contents and row.record.contents.checkpoint_id == snapshot.id]


def assert_is_parity(row: Slot, snapshot: Snapshot) -> None:
    record = record_of(row)
    striping, files = record.group.striping, {}
    for slot in snapshot.slots:
        contents = slot.record.contents
        assert contents is not None
        files[contents.file] = slot.data[: contents.nbytes]
    expected = np.zeros(striping.row_nbytes(record.stripe, record.row), np.uint8)
    for number in range(striping.num_data):
        nbytes = striping.row_nbytes(record.stripe, number)
        parts = [data for _, data in striping.row_parts(record.stripe, number, 0, nbytes)]
        data: Bytes = np.concatenate(
            [files[file][start : start + length] for file, start, length in parts] or [np.empty(0, np.uint8)]
        )
        factor = striping.data_factors(record.row)[number]
        for at in range(0, nbytes, STRIP_NBYTES):
            add_multiple(expected[at : at + STRIP_NBYTES], data[at : at + STRIP_NBYTES], factor)
    assert parity_in(row).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("losses", "num_nodes"),
    [pytest.param(1, 2, marks=pytest.mark.slow), (1, 5), pytest.param(2, 3, marks=pytest.mark.slow), (2, 5)],
)
def test_each_node_keeps_parity_bit_for_bit_and_all_hear_that_the_checkpoint_is_protected(
    made: Made, losses: int, num_nodes: int
) -> None:
    nodes = made(losses, SIZES[:num_nodes])
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    for number in range(num_nodes):
        rows = rows_in(nodes, number)
        assert [row.state for row in rows] == [SlotState.HELD] * losses
        for row in rows:
            assert_is_parity(row, snapshot)
        assert peer_trouble(nodes.folders[number]) == ""


def test_a_segment_of_several_pieces_is_added_whole(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rows, "PIECE_NBYTES", MIB)
    nodes = made(2, ((5 * MIB + 17, MIB), (4 * MIB,), (MIB,)))
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    for number in range(3):
        for row in rows_in(nodes, number):
            assert_is_parity(row, snapshot)


def test_a_node_without_data_keeps_parity_too(made: Made) -> None:
    nodes = made(1, ((MIB,), (MIB,), (0,)))
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    (row,) = rows_in(nodes, 2)
    assert_is_parity(row, snapshot)


def test_nothing_is_protected_until_all_nodes_have_sealed_their_slots(made: Made) -> None:
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes, only=(0, 1, 2, 3))
    for _ in range(20):
        nodes.look()
    assert not any(rows_in(nodes, number) for number in range(5))
    snapshot.stage(nodes, only=(4,))
    nodes.protect(snapshot)


@pytest.mark.parametrize("at", [-1, pytest.param(0, marks=pytest.mark.slow)], ids=["data", "header"])
def test_parity_is_made_of_no_slot_that_changed_after_it_was_sealed(made: Made, at: int) -> None:
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes, only=(1, 2, 3, 4))
    until(lambda: nodes.look() and all(slot.refresh().state != SlotState.STAGED for slot in snapshot.slots))
    contents = snapshot.slots[0].record.contents
    assert contents is not None
    snapshot.slots[0].data[at % contents.nbytes] ^= 1
    snapshot.stage(nodes, only=(0,))
    until(lambda: nodes.look() and any("has changed on the way" in peer_trouble(folder) for folder in nodes.folders))
    assert not any(protected_ids(folder) for folder in nodes.folders)
    snapshot.slots[0].data[at % contents.nbytes] ^= 1
    nodes.protect(snapshot)
    for number in range(5):
        for row in rows_of(nodes, number, snapshot):
            assert_is_parity(row, snapshot)
    until(lambda: nodes.look() and not any(peer_trouble(folder) for folder in nodes.folders))


def test_a_holder_without_memory_delays_protection_until_it_has_some(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (peer_session, parity_rows):
        monkeypatch.setattr(module, "_RETRIES", RETRIES)
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes)
    with monkeypatch.context() as patched:
        patched.setattr(peer_memory, "rooms", lambda _: [MemoryLimit(0, "a limit")])
        patched.setattr(peer_memory, "give_way", lambda *_: [])  # nobody claims the slots
        until(lambda: nodes.look() and all("a limit leaves 0" in peer_trouble(folder) for folder in nodes.folders))
        assert not any(row.state == SlotState.HELD for number in range(5) for row in rows_in(nodes, number))
    nodes.protect(snapshot)
    until(lambda: nodes.look() and not any(peer_trouble(folder) for folder in nodes.folders))


def test_an_offer_of_parity_before_the_table_of_peers_has_arrived_is_declined_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        nodes = ParityNodes(tmp_path, stack, SIZES, 1)
        snapshot = Snapshot(nodes, 1)
        reply = nodes.keepers[1]._rows.offer(OfferParity(snapshot.id, 0, ()))
        assert isinstance(reply, Declined)
        assert "does not know of it yet" in reply.reason
        nodes.meet()
        nodes.protect(snapshot.stage(nodes))
    assert not [record for record in caplog.records if record.exc_info]


def test_a_keeper_that_is_restarted_keeps_complete_rows_and_makes_others_anew(made: Made) -> None:
    nodes = made(1)
    first = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(first)
    (kept,) = rows_in(nodes, 1)
    second = Snapshot(nodes, 2).stage(nodes, only=(0, 1, 2, 3))
    until(lambda: nodes.look() and all(slot.refresh().state != SlotState.STAGED for slot in second.slots))
    with Slot.create(nodes.folders[1], rank=0, nbytes=kept.nbytes, kind=kept.kind) as torn:
        assert torn.take()
        torn.advance(msgspec.structs.replace(torn.record, state=SlotState.WRITING, contents=kept.record.contents))
    nodes.restart(1)
    second.stage(nodes, only=(4,))
    nodes.protect(second)
    assert kept.refresh().state == SlotState.HELD
    assert_is_parity(kept, first)
    assert len(rows_in(nodes, 1)) == 2
    (new,) = rows_of(nodes, 1, second)
    assert_is_parity(new, second)


@pytest.mark.slow
def test_a_mark_that_was_lost_comes_again_without_parity_being_made_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    monkeypatch.setattr(parity_rows, "add_multiple", None)  # would fail
    for number, folder in enumerate(nodes.folders):
        folder.remove(f"protected-{snapshot.id}")
        nodes.restart(number)
    nodes.protect(snapshot)
    assert all(protected_ids(folder) == {snapshot.id} for folder in nodes.folders)


@pytest.mark.slow
def test_a_newer_generation_takes_the_rows_of_the_one_before_the_last(made: Made) -> None:
    nodes = made(2)
    snapshots = []
    for seq in range(1, 5):
        snapshots.append(Snapshot(nodes, seq).stage(nodes))
        nodes.protect(snapshots[-1])
    for number in range(5):
        assert len(rows_in(nodes, number)) == 4
        for snapshot in snapshots[-2:]:
            rows = rows_of(nodes, number, snapshot)
            assert len(rows) == 2
            for row in rows:
                assert_is_parity(row, snapshot)


def test_a_keeper_of_parity_does_not_grow_with_the_number_of_saves(made: Made) -> None:
    """It kept the record of each row that it ever held: kilobytes for each rank of the group."""
    nodes = made(1, ((MIB,), (MIB,), (MIB,)))
    for seq in range(1, 6):
        nodes.protect(Snapshot(nodes, seq).stage(nodes))
    nodes.look()
    for keeper in nodes.keepers:
        assert len(keeper._rows._records) <= 2


def test_the_protected_generation_survives_newer_ones_that_are_never_complete(made: Made) -> None:
    nodes = made(1)
    protected = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(protected)
    for seq in (2, 3):
        partial = Snapshot(nodes, seq).stage(nodes, only=(0, 1, 2, 3))
        until(
            lambda slots=partial.slots: nodes.look() and all(slot.refresh().state != SlotState.STAGED for slot in slots)  # type: ignore[misc]
        )
        for _ in range(5):
            nodes.look()
    for number in range(5):
        (row,) = rows_of(nodes, number, protected)
        assert_is_parity(row, protected)
    whole = Snapshot(nodes, 4).stage(nodes)
    nodes.protect(whole)
    for number in range(5):
        (row,) = rows_of(nodes, number, protected)
        assert_is_parity(row, protected)


def test_parity_of_a_checkpoint_that_was_given_up_is_freed(made: Made) -> None:
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    give_up_generation(nodes.folders[1], snapshot.id)
    (row,) = rows_in(nodes, 1)
    until(lambda: nodes.look() and row.refresh().state == SlotState.FREE)


def test_offers_that_no_partner_makes_are_refused(made: Made) -> None:
    nodes = made(1)
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    row = rows_in(nodes, 1)[0]
    rows, group = nodes.keepers[1]._rows, record_of(row).group
    slot = group.nodes[0].slots[0]
    wrong_part = msgspec.structs.replace(slot.files[0], nbytes=5)
    assert Sealing(snapshot.generation).layout(0).nbytes == slot.files[0].nbytes
    assert isinstance(rows.offer(OfferParity(snapshot.id, 9, ())), Declined)
    for offer in (
        OfferParity(snapshot.id, 0, ()),
        OfferParity(snapshot.id, 0, group.nodes[0].slots[:1]),
        OfferParity(snapshot.id, 0, group.nodes[1].slots),
        OfferParity(snapshot.id, 0, (*group.nodes[0].slots, slot)),
        OfferParity(snapshot.id, 0, (msgspec.structs.replace(slot, files=(wrong_part,)), group.nodes[0].slots[1])),
        OfferParity(snapshot.id, 0, (msgspec.structs.replace(slot, digests=("0" * 32,) * 2), group.nodes[0].slots[1])),
    ):
        with pytest.raises(ValueError, match=r"offer|layout"):
            rows.offer(offer)
