"""Stripes of files of unlike sizes, and the chains that rebuild what lost nodes had."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.format.container import BLOCK_NBYTES
from holdfast.protection.chains import LostRange, RebuildChain, rebuild_chains, whole_line
from holdfast.protection.erasure import STRIP_NBYTES
from holdfast.protection.footprint import footprint
from holdfast.protection.policies import Parity
from holdfast.protection.stripes import FileRange, LineFile, NodeLine, Striping
from tests.protection.parity_cluster import HEADER_NBYTES, ParityCluster

#: Sizes of files: empty ones, some of a few bytes, and some of several strips and blocks.
NBYTES = st.one_of(
    st.integers(0, 3), st.integers(0, 5000), st.integers(STRIP_NBYTES - 9, STRIP_NBYTES + 9), st.integers(0, 5 << 20)
)
FILES = st.lists(NBYTES, max_size=4)


@st.composite
def clusters(draw: st.DrawFn) -> ParityCluster:
    losses = draw(st.integers(1, 2))
    files = draw(st.lists(FILES, min_size=losses + 1, max_size=8))
    sizes = {f"node{number}": each for number, each in enumerate(files)}
    return ParityCluster(sizes, losses, seed=draw(st.integers(0, 1000)))


def even(num_nodes: int, losses: int, nbytes: int) -> ParityCluster:
    return ParityCluster({f"node{number}": [nbytes] for number in range(num_nodes)}, losses)


def even_stripes(num_nodes: int, losses: int, nbytes: int) -> Striping:
    lines = (NodeLine(f"node{number}", (LineFile(number, HEADER_NBYTES, nbytes),)) for number in range(num_nodes))
    return Striping(tuple(lines), losses)


def loads(chains: Sequence[RebuildChain]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that each node sends and receives."""
    sent, received = Counter[str](), Counter[str]()
    for chain in chains:
        for sender, receiver, nbytes in chain.transfers:
            sent[sender] += nbytes
            received[receiver] += nbytes
    return sent, received


@settings(max_examples=40)
@given(clusters(), st.data())
def test_files_of_lost_nodes_come_back_bit_by_bit_at_any_receiver(cluster: ParityCluster, data: st.DataObject) -> None:
    striping = cluster.striping
    for lost in combinations(cluster.nodes, striping.losses):
        receivers = st.sampled_from([f"new-{lost[0]}", *(node for node in cluster.nodes if node not in lost)])
        wanted = [each for owner in lost for each in whole_line(striping, owner, data.draw(receivers))]
        found = cluster.rebuilt(lost, wanted)
        for owner in lost:
            for file in striping.line(owner).files:
                pieces = sorted((part, piece) for part, piece in found.items() if part.file == file.file)
                assert b"".join(piece.tobytes() for _, piece in pieces) == cluster.files[file.file].tobytes()


@settings(max_examples=40)
@given(clusters(), st.data())
def test_any_range_of_a_lost_file_comes_back_alone(cluster: ParityCluster, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(list(combinations(cluster.nodes, cluster.striping.losses))))
    files = [(owner, each.file, each.nbytes) for owner in lost for each in cluster.striping.line(owner).files]
    owner, file, size = data.draw(st.sampled_from(files or [("", 0, 0)]))
    assume(size)
    start = data.draw(st.integers(0, size - 1))
    nbytes = data.draw(st.integers(1, size - start))
    found = cluster.rebuilt(lost, [LostRange(owner, FileRange(file, start, nbytes), "new")])
    pieces = b"".join(piece.tobytes() for _, piece in sorted(found.items()))
    assert pieces == cluster.files[file][start : start + nbytes].tobytes()


@settings(max_examples=25)
@given(clusters())
def test_a_chain_gives_what_one_node_would_make_of_all_rows(cluster: ParityCluster) -> None:
    lost = cluster.nodes[: cluster.striping.losses]
    for chain in rebuild_chains(cluster.striping, lost, whole_line(cluster.striping, lost[0], "new")):
        direct = cluster.directly(chain).tobytes()
        assert cluster.along(chain).tobytes() == direct
        assert cluster.along(chain, piece_nbytes=3 * STRIP_NBYTES).tobytes() == direct


@settings(max_examples=25)
@given(clusters())
def test_a_rebuild_moves_at_most_the_group_size_times_the_lost_bytes(cluster: ParityCluster) -> None:
    """One loss: less than that. Two: all of each strip counts, since its last bytes depend on its first."""
    striping = cluster.striping
    for owner in cluster.nodes:
        chains = rebuild_chains(striping, [owner], whole_line(striping, owner, "new"))
        moved = sum(nbytes for chain in chains for _, _, nbytes in chain.transfers)
        assert moved <= striping.num_data * striping.line(owner).nbytes
    for lost in combinations(cluster.nodes, 2) if striping.losses == 2 else ():
        for owner in lost:
            chains = rebuild_chains(striping, lost, whole_line(striping, owner, "new"))
            moved = sum(nbytes for chain in chains for _, _, nbytes in chain.transfers)
            assert moved <= striping.num_data * (striping.line(owner).nbytes + len(chains) * STRIP_NBYTES)


@settings(max_examples=25)
@given(clusters())
def test_each_byte_is_sent_to_as_many_holders_as_nodes_may_be_lost(cluster: ParityCluster) -> None:
    striping = cluster.striping
    for node in cluster.nodes:
        sent = Counter[tuple[int, int]]()
        for share in striping.shares(node):
            assert share.holder != node
            assert share.nbytes == sum(data.nbytes for _, data in share.parts)
            for _, data in share.parts:
                sent[data.file, data.start] += data.nbytes
        assert sum(sent.values()) == striping.losses * striping.line(node).nbytes
        holders = {(share.row, share.holder) for share in striping.shares(node)}
        assert len(holders) == len(list(striping.shares(node)))


@given(clusters())
def test_parity_takes_the_share_of_the_longest_line_that_the_policy_says(cluster: ParityCluster) -> None:
    """And a block at most, since lines are cut where blocks end."""
    striping = cluster.striping
    longest = max(line.nbytes for line in striping.lines)
    for node in cluster.nodes:
        held = sum(row.nbytes for (stripe, row_), row in cluster.parity.items() if striping.node(stripe, row_) == node)
        assert striping.held_nbytes(node) == held
        assert held <= striping.losses * (longest / striping.num_data + BLOCK_NBYTES + 8)


@given(clusters())
def test_segments_end_where_headers_blocks_and_files_end(cluster: ParityCluster) -> None:
    for line in cluster.striping.lines:
        ends, start = {0}, 0
        for _, data_start, nbytes in line.files:
            ends |= {start, start + nbytes, *range(start + data_start, start + nbytes, BLOCK_NBYTES)}
            start += nbytes
        cuts = cluster.striping.cuts(line.node)
        assert (cuts[0], cuts[-1]) == (0, line.nbytes)
        assert list(cuts) == sorted(cuts)
        assert ends.issuperset(cuts)


@pytest.mark.parametrize(("num_nodes", "losses"), [(4, 1), (8, 1), (6, 2), (8, 2)])
def test_survivors_send_and_receive_alike(num_nodes: int, losses: int) -> None:
    nbytes = 4 << 30
    striping = even_stripes(num_nodes, losses, nbytes)
    sent, received = loads(rebuild_chains(striping, ["node3"], whole_line(striping, "node3", "new")))
    assert received["new"] == nbytes == max(received.values())
    del received["new"]
    segment = nbytes / striping.num_data + BLOCK_NBYTES
    assert len(sent) == num_nodes - 1
    assert max(sent.values()) - min(sent.values()) <= segment
    assert max(received.values()) - min(received.values()) <= 2 * segment


@pytest.mark.parametrize("policy", [Parity(1), Parity(2), Parity(1, group=8), Parity(2, group=8)])
def test_stripes_cost_what_the_footprint_of_the_policy_says(policy: Parity) -> None:
    """But for the blocks at which lines are cut."""
    num_nodes, nbytes = policy.group_size(8), 8 << 30
    expected = footprint(policy, num_nodes=num_nodes, nbytes=nbytes, generations=1)
    striping = even_stripes(num_nodes, policy.losses, nbytes)
    sent, received = loads(rebuild_chains(striping, ["node1"], whole_line(striping, "node1", "new")))
    blocks = 2 * num_nodes * BLOCK_NBYTES
    assert abs(nbytes + striping.held_nbytes("node0") - expected.memory_nbytes) <= blocks
    assert sum(share.nbytes for share in striping.shares("node0")) == expected.sent_nbytes
    assert abs(sum(sent.values()) - expected.rebuilt_nbytes) <= num_nodes * blocks
    assert abs(max([*sent.values(), *received.values()]) - expected.link_nbytes) <= blocks


def test_a_survivor_that_wants_the_bytes_is_the_last_of_each_chain_and_sends_nothing() -> None:
    striping = even_stripes(6, 2, 64 << 20)
    chains = rebuild_chains(striping, ["node3"], whole_line(striping, "node3", "node1"))
    sent, received = loads(chains)
    assert sent["node1"] == 0
    assert (64 << 20) - 2 * BLOCK_NBYTES <= received["node1"] <= 64 << 20  # the longest rows may be its own
    assert sum("node1" in [hop.node for hop in chain.hops] for chain in chains) == 3
    assert all(hop.node != "node1" for chain in chains for hop in chain.hops[:-1])


def test_no_node_sends_zeros_of_shorter_rows() -> None:
    """Segments: of a, its header and its block; of b and c, their headers, nothing, and their blocks."""
    cluster = ParityCluster({"a": [9000], "b": [5000], "c": [4097], "d": []}, 1)
    chains = rebuild_chains(cluster.striping, ["a"], whole_line(cluster.striping, "a", "new"))
    assert [[(hop.node, hop.nbytes, hop.sum_nbytes) for hop in chain.hops] for chain in chains] == [
        [("c", 1, 1), ("d", 4096, 4096)],
        [("b", 904, 904), ("c", 4904, 4904)],
    ]


def test_bytes_of_a_corrupt_survivor_change_what_is_rebuilt() -> None:
    """So that the digests of the file show it."""
    cluster = even(6, 2, (9 << 20) + 100)
    lost = ("node1", "node4")
    wanted = [each for owner in lost for each in whole_line(cluster.striping, owner, f"new-{owner}")]
    whole = {data: piece.tobytes() for data, piece in cluster.rebuilt(lost, wanted).items()}
    for file in (0, 2, 3, 5):
        cluster.files[file][::100_000] ^= 1  # some bytes of each segment
        damaged = {data: piece.tobytes() for data, piece in cluster.rebuilt(lost, wanted).items()}
        cluster.files[file][::100_000] ^= 1
        assert {data.file for data in whole if whole[data] != damaged[data]} == {1, 4}
    for parity in cluster.parity.values():
        parity[5] ^= 1
    damaged = {data: piece.tobytes() for data, piece in cluster.rebuilt(lost, wanted).items()}
    assert any(whole[data] != damaged[data] for data in whole)


def test_more_losses_than_parity_covers_are_refused_with_the_nodes() -> None:
    cluster = even(4, 1, 1000)
    with pytest.raises(ValueError, match="node0, node2 are lost, but the parity of their group covers 1"):
        rebuild_chains(cluster.striping, ["node0", "node2"], whole_line(cluster.striping, "node0", "new"))


def test_nodes_that_are_not_lost_have_nothing_to_rebuild() -> None:
    striping = even_stripes(4, 1, 1000)
    for owner in ("node1", "another"):
        with pytest.raises(ValueError, match=f"node {owner} is not lost"):
            rebuild_chains(striping, ["node0", "another"], [LostRange(owner, FileRange(1, 0, 10), "new")])


def test_a_range_that_the_owner_does_not_have_is_refused() -> None:
    cluster = even(4, 1, 1000)
    for data in (FileRange(1, 0, 10), FileRange(0, 991, 10), FileRange(0, -1, 10), FileRange(0, 5, -1)):
        with pytest.raises(ValueError, match="node node0 has no FileRange"):
            rebuild_chains(cluster.striping, ["node0"], [LostRange("node0", data, "new")])


@pytest.mark.parametrize(
    ("nodes", "losses", "message"),
    [
        (["a", "b", "c"], 3, "losses is 3"),
        (["a", "b"], 2, "a group has 3 to 257 nodes, not 2"),
        ([str(number) for number in range(258)], 2, "not 258"),
        (["a", "b", "a"], 1, "a node is twice"),
    ],
)
def test_groups_without_parity_are_refused(nodes: list[str], losses: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Striping(tuple(NodeLine(node, ()) for node in nodes), losses)


def test_a_recovery_of_2048_nodes_is_planned_within_a_second() -> None:
    """8,960 files on 2,048 nodes in groups of eight, of which 5 % are lost, at most two of a group."""
    started_s = time.process_time()
    num_chains = 0
    for group in range(256):
        nodes = range(8 * group, 8 * group + 8)
        lines = tuple(
            NodeLine(str(node), tuple(LineFile(file, 4096, (1 << 30) + file) for file in range(node, 8960, 2048)))
            for node in nodes
        )
        striping = Striping(lines, 2)
        lost = [str(node) for node in nodes if node % 20 == 0]
        for owner in lost:
            num_chains += len(rebuild_chains(striping, lost, whole_line(striping, owner, "new")))
    assert num_chains == 6 * 103
    assert time.process_time() - started_s < 1
