"""Keepers that rebuild slots of lost nodes together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import msgspec
import pytest

from holdfast.keeper import rebuilding
from holdfast.keeper.pacing import LinkPace
from holdfast.node_memory.parity_records import ParityGroup
from holdfast.node_memory.peering import PacingRules
from holdfast.node_memory.slots import Contents, Slot, SlotState, copy_names, parity_names
from holdfast.peers.peer_messages import (
    CopyKept,
    CopyWanted,
    Declined,
    GetSum,
    NodesFailed,
    OfferCopy,
    PeerReply,
    RebuildCopy,
    SumHop,
    SumPart,
)
from holdfast.peers.transport import PutPiece
from tests.keeper.parity_nodes import ParityNodes, Snapshot

MIB = 1 << 20
SIZES = ((3 * MIB + 5, MIB), (2 * MIB,), (1000,), (0, MIB + 7), (2 * MIB + 100,))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def protected(
    path: Path, stack: ExitStack, losses: int, sizes: Sequence[Sequence[int]] = SIZES
) -> tuple[ParityNodes, Snapshot]:
    nodes = ParityNodes(path, stack, sizes, losses)
    nodes.meet()
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    nodes.look()
    return nodes, snapshot


def rebuilt(
    nodes: ParityNodes, snapshot: Snapshot, lost: Sequence[int], receiver: int, group: ParityGroup
) -> list[PeerReply]:
    """Rebuild all slots of lost nodes, and compare those that succeed."""
    replies = []
    for file, rank in enumerate(snapshot.ranks):
        if nodes.node_of(rank) in lost:
            replies.append(nodes.rebuild(snapshot, file, lost, receiver, group))
            if isinstance(replies[-1], CopyKept):
                assert_same(nodes, snapshot, file, receiver)
    return replies


def assert_same(nodes: ParityNodes, snapshot: Snapshot, file: int, receiver: int) -> None:
    folder, original = nodes.folders[receiver], snapshot.slots[file]
    for name in copy_names(folder):
        with Slot(folder, name) as copy:
            contents = copy.record.contents
            if contents is not None and contents.file == file:
                assert copy.state == SlotState.HELD
                assert copy.rank == original.rank
                start = contents.data_start
                assert copy.data[:start].tobytes() == original.data[:start].tobytes()
                assert copy.data[start : contents.nbytes].tobytes() == snapshot.data[file]
                return
    pytest.fail(f"node {receiver} has no copy of file {file}")


@pytest.mark.parametrize(
    ("losses", "num_nodes"),
    [pytest.param(1, 2, marks=pytest.mark.slow), (1, 5), (2, 3), pytest.param(2, 5, marks=pytest.mark.slow)],
)
def test_each_pattern_of_lost_nodes_is_rebuilt_bit_for_bit_at_survivors_and_at_a_new_node(
    tmp_path: Path, stack: ExitStack, losses: int, num_nodes: int
) -> None:
    nodes, snapshot = protected(tmp_path, stack, losses, SIZES[:num_nodes])
    new = nodes.add_stranger()
    group = nodes.group_of(snapshot, 0)
    for num_lost in range(1, losses + 1):
        for lost in itertools.combinations(range(num_nodes), num_lost):
            survivors = [number for number in range(num_nodes) if number not in lost]
            for receiver in (survivors[0], survivors[-1], new):
                replies = rebuilt(nodes, snapshot, lost, receiver, group)
                assert set(replies) == {CopyKept()}, (lost, receiver)
                for name in copy_names(nodes.folders[receiver]):  # the next pattern rebuilds them again
                    nodes.folders[receiver].remove(name)
                nodes.look()


def test_what_was_really_lost_is_rebuilt_from_chains_of_several_pieces(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilding, "PIECE_NBYTES", 1 << 19)
    nodes, snapshot = protected(tmp_path, stack, 2)
    group = nodes.group_of(snapshot, 2)
    nodes.lose(0, 4)
    new = nodes.add_stranger()
    assert rebuilt(nodes, snapshot, (0, 4), new, group) == [CopyKept()] * 3
    assert rebuilt(nodes, snapshot, (0, 4), 2, group) == [CopyKept()] * 3
    assert rebuilt(nodes, snapshot, (0, 4), 2, group) == [CopyKept()] * 3  # again: it has them


def test_a_peer_that_was_started_again_since_the_last_rebuild_spoils_one_more_at_most(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Each of the connections that were left of the last rebuild spoiled another one."""
    nodes, snapshot = protected(tmp_path, stack, 1, SIZES[:3])
    group = nodes.group_of(snapshot, 0)

    def reply() -> PeerReply:
        for name in copy_names(nodes.folders[2]):
            nodes.folders[2].remove(name)
        nodes.look()
        (reply,) = rebuilt(nodes, snapshot, (1,), 2, group)
        return reply

    assert reply() == CopyKept()
    nodes.restart(0)
    nodes.look()
    assert isinstance(reply(), Declined)
    assert reply() == CopyKept()


def test_what_was_rebuilt_of_an_older_checkpoint_stays_until_a_newer_one_is_protected(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Copies of a rank that were older than the newest protected checkpoint were removed at the next look."""
    nodes, first = protected(tmp_path, stack, 1, SIZES[:3])
    nodes.protect(Snapshot(nodes, 2).stage(nodes))
    group = nodes.group_of(first, 0)
    assert rebuilt(nodes, first, (1,), 2, group) == [CopyKept()]
    for _ in range(3):
        nodes.look()
    assert_same(nodes, first, 2, 2)
    nodes.protect(Snapshot(nodes, 3).stage(nodes))
    nodes.look()
    assert copy_names(nodes.folders[2]) == []


def test_peers_read_for_parity_at_the_pace_of_copies_and_for_a_rebuild_at_once(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads for parity took the whole link, whatever training sent."""
    paced: list[int] = []
    turn = LinkPace.turn

    def noted_turn(self: LinkPace, nbytes: int, end_s: float) -> AbstractContextManager[PutPiece]:
        paced.append(nbytes)
        return turn(self, nbytes, end_s)

    monkeypatch.setattr(LinkPace, "turn", noted_turn)
    nodes = ParityNodes(tmp_path, stack, SIZES[:3], 1)
    nodes.meet(PacingRules(bytes_per_s=1e9))
    snapshot = Snapshot(nodes, 1).stage(nodes)
    nodes.protect(snapshot)
    nodes.look()
    assert sum(paced) >= sum(map(sum, SIZES[:3]))
    paced.clear()
    assert rebuilt(nodes, snapshot, (0,), 2, nodes.group_of(snapshot, 2)) == [CopyKept()] * 2
    assert paced == []


def test_damage_in_a_slot_and_in_parity_of_survivors_is_found_and_done_without(
    tmp_path: Path, stack: ExitStack
) -> None:
    nodes, snapshot = protected(tmp_path, stack, 2)
    group = nodes.group_of(snapshot, 0)
    contents = snapshot.slots[2].record.contents  # of node 1
    assert contents is not None
    snapshot.slots[2].data[contents.nbytes - 1] ^= 1
    (reply, _) = rebuilt(nodes, snapshot, (0,), 2, group)
    assert isinstance(reply, NodesFailed)
    assert (reply.numbers, reply.silent) == ((1,), ())
    assert rebuilt(nodes, snapshot, (0, 1), 2, group) == [CopyKept()] * 3
    snapshot.slots[2].data[contents.nbytes - 1] ^= 1
    for name in copy_names(nodes.folders[2]):
        nodes.folders[2].remove(name)
    nodes.look()
    for name in parity_names(nodes.folders[3]):
        with Slot(nodes.folders[3], name) as row:
            row.data[5] ^= 1
    replies = rebuilt(nodes, snapshot, (0,), 2, group)
    assert {reply.numbers for reply in replies if isinstance(reply, NodesFailed)} == {(3,)}


def test_a_survivor_that_does_not_answer_or_has_lost_its_memory_counts_as_lost(
    tmp_path: Path, stack: ExitStack
) -> None:
    nodes, snapshot = protected(tmp_path, stack, 2)
    group = nodes.group_of(snapshot, 0)
    nodes.lose(0)
    nodes.keepers[1].close()
    (reply, _) = rebuilt(nodes, snapshot, (0,), 2, group)
    assert isinstance(reply, NodesFailed)
    assert (reply.numbers, reply.silent) == ((), (1,))
    nodes.restart(1)
    nodes.look(0)
    (reply, _) = rebuilt(nodes, snapshot, (0,), 2, group)
    assert isinstance(reply, CopyKept)


def test_more_losses_than_the_parity_covers_and_chains_that_nobody_makes_are_refused(
    tmp_path: Path, stack: ExitStack
) -> None:
    nodes, snapshot = protected(tmp_path, stack, 1, SIZES[:3])
    group = nodes.group_of(snapshot, 0)
    replies = rebuilt(nodes, snapshot, (0, 1), 2, group)
    assert not any(isinstance(reply, CopyKept | NodesFailed | Declined) for reply in replies)


def test_sums_whose_sizes_do_not_fit_are_refused(tmp_path: Path, stack: ExitStack) -> None:
    nodes, snapshot = protected(tmp_path, stack, 1, SIZES[:3])
    sums, slot = nodes.keepers[0]._protection._sums, snapshot.slots[0]
    hop, limit = SumHop("", 1, 8, 8, (SumPart(0, 0, 8),)), rebuilding.PIECE_NBYTES
    assert sums.sum(GetSum(snapshot.id, 8, (hop,))).tobytes() == slot.data[:8].tobytes()
    for nbytes, *hops in (
        (7, hop),
        (9, hop),
        (8, msgspec.structs.replace(hop, nbytes=9)),
        (limit + 1, msgspec.structs.replace(hop, nbytes=limit + 1, sum_nbytes=limit + 1)),
        (8, msgspec.structs.replace(hop, sum_nbytes=9), hop),
    ):
        with pytest.raises(ValueError, match="sizes of a chain do not fit"):
            sums.sum(GetSum(snapshot.id, nbytes, tuple(hops)))
    for wrong in (
        msgspec.structs.replace(hop, parts=(SumPart(0, 0, 7),)),
        msgspec.structs.replace(hop, parts=(SumPart(0, 0, 8), SumPart(1, 0, 1))),
    ):
        with pytest.raises(ValueError, match="another size than its parts"):
            sums.sum(GetSum(snapshot.id, 8, (wrong,)))


def test_requests_to_rebuild_what_the_group_does_not_have_are_refused(tmp_path: Path, stack: ExitStack) -> None:
    nodes, snapshot = protected(tmp_path, stack, 1, SIZES[:3])
    group, keeper = nodes.group_of(snapshot, 0), nodes.keepers[2]
    addresses = (nodes.address(0), "", nodes.address(2))
    contents = snapshot.slots[2].record.contents  # of node 1, which is lost
    assert contents is not None

    def rebuild(contents: Contents, lost: tuple[int, ...], addresses: tuple[str, ...]) -> PeerReply:
        wanted = keeper._copies.offer(OfferCopy(contents, snapshot.slots[2].refresh().digests[:1], 0))
        assert isinstance(wanted, CopyWanted)
        return keeper._protection._rebuilder.rebuild(RebuildCopy(wanted.token, group, lost, addresses, 2))

    for lost, others in (((1,), addresses[:2]), ((1, 7), addresses)):
        with pytest.raises(ValueError, match="nodes of a group do not fit"):
            rebuild(contents, lost, others)
    for change in ({"nbytes": contents.nbytes - 1}, {"data_start": contents.data_start - 8}, {"file": 9}):
        with pytest.raises(ValueError, match="the group has no file"):
            rebuild(msgspec.structs.replace(contents, **change), (1,), addresses)
    assert rebuild(contents, (1,), addresses) == CopyKept()
