"""Each file is read where the restore ends soonest."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.catalogue import Tier
from holdfast.recovery.source_plan import ORDINARY_RATES, FileSource, LostFile, Rates, plan_sources

OWN, PEER, DISK = Tier.NODE_MEMORY, Tier.PEER_MEMORY, Tier.NODE_DISK
GIB = 1 << 30


def lost_files(tiers: Sequence[Tier], *, least: int = 0) -> st.SearchStrategy[list[LostFile]]:
    """Files of up to four nodes."""
    holders = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(tiers), min_size=least)
    return st.lists(st.builds(LostFile, st.integers(0, 100), holders), max_size=6)


def busy_s(files: Sequence[LostFile], nodes: Sequence[str], rates: Rates) -> Counter[str]:
    """The seconds that each node sends files to others, if the files are read on these nodes."""
    busy: Counter[str] = Counter()
    for file, node in zip(files, nodes, strict=True):
        busy[node] += rates.seconds(file.nbytes, file.holders[node])  # type: ignore[assignment]  # seconds, not counts
    return busy


@given(lost_files([OWN, PEER, DISK]))
def test_each_file_that_is_held_has_a_source_that_holds_it(files: list[LostFile]) -> None:
    for file, source in zip(files, plan_sources(files), strict=True):
        assert (source is None) == (not file.holders)
        if source is not None:
            assert file.holders[source.node] is source.tier


@given(lost_files([OWN, PEER, DISK]))
def test_a_file_in_the_memory_of_the_node_that_wrote_it_is_read_there(files: list[LostFile]) -> None:
    for file, source in zip(files, plan_sources(files), strict=True):
        if OWN in file.holders.values():
            assert source is not None
            assert source.tier is OWN


@given(lost_files([PEER], least=1))
def test_the_busiest_node_is_not_much_busier_than_it_must_be(files: list[LostFile]) -> None:
    rates = Rates(network=1.0, disk=1.0)
    sources = [source.node for source in plan_sources(files, rates) if source is not None]
    found = max(busy_s(files, sources, rates).values(), default=0)
    every = itertools.product(*(file.holders for file in files))
    best = min(max(busy_s(files, nodes, rates).values(), default=0) for nodes in every)
    assert found <= best * (1 + log2(4))  # the bound of greedy plans (Azar, Naor, Rom 1995)


@given(lost_files([PEER, DISK], least=1))
def test_no_move_of_a_file_off_the_busiest_node_ends_the_restore_sooner(files: list[LostFile]) -> None:
    sources = [source.node for source in plan_sources(files) if source is not None]
    busy = busy_s(files, sources, ORDINARY_RATES)
    most = max(busy.values(), default=0)
    for number, node in enumerate(sources):
        if sum(each == most for each in busy.values()) == 1 and busy[node] == most:
            for other in files[number].holders.keys() - {node}:
                moved = [*sources[:number], other, *sources[number + 1 :]]
                assert max(busy_s(files, moved, ORDINARY_RATES).values()) >= most * (1 - 1e-9)


def test_an_empty_file_is_read_on_the_node_that_wrote_it() -> None:
    assert plan_sources([LostFile(0, {"a": PEER, "b": OWN})]) == [FileSource("b", OWN)]


def test_two_holders_of_the_copies_of_a_lost_node_share_the_work() -> None:
    sources = plan_sources([LostFile(GIB, {"a": PEER, "b": PEER})] * 8)
    assert Counter(source.node for source in sources if source is not None) == {"a": 4, "b": 4}


def test_large_files_are_placed_before_small_ones() -> None:
    files = [LostFile(nbytes, {"a": PEER, "b": PEER}) for nbytes in (1, 1, 2, 4)]
    sources = [source.node for source in plan_sources(files) if source is not None]
    assert Counter(busy_s(files, sources, Rates(1.0, 1.0))) == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("held", "end_s"),
    [
        pytest.param([(1, "ca"), (1, "abc"), (1, "c")], 1, id="fewest holders first"),
        pytest.param([(1, "c"), (3, "ca"), (4, "ac")], 4, id="large ones first"),
        pytest.param([(3, "ba"), (2, "acb"), (6, "bc"), (6, "ab")], 6, id="a file that moved is sent once"),
    ],
)
def test_no_node_has_to_send_more_than_it_must(held: list[tuple[int, str]], end_s: int) -> None:
    files = [LostFile(nbytes, dict.fromkeys(nodes, PEER)) for nbytes, nodes in held]
    rates = Rates(network=1.0, disk=1.0)
    sources = [source.node for source in plan_sources(files, rates) if source is not None]
    assert max(busy_s(files, sources, rates).values()) == end_s


def test_a_disk_helps_a_peer_in_proportion_to_its_rate() -> None:
    files = [LostFile(GIB, {"peer": PEER, "rebooted": DISK})] * 12
    sources = plan_sources(files, Rates(network=10e9, disk=2e9))
    assert Counter(sources) == {FileSource("peer", PEER): 10, FileSource("rebooted", DISK): 2}
    assert Counter(plan_sources(files, Rates(network=1e9, disk=100e9))) == {FileSource("rebooted", DISK): 12}


def test_a_node_that_has_sent_slowly_gets_few_files() -> None:
    files = [LostFile(GIB, {"slow": PEER, "fast": PEER, "new": PEER})] * 21
    sources = plan_sources(files, measured={"slow": 1e8, "fast": 1e9, "other": 1e9})
    assert Counter(source.node for source in sources if source is not None) == {"slow": 1, "fast": 10, "new": 10}


def test_the_plan_of_2048_nodes_with_two_copies_takes_less_than_half_a_second() -> None:
    files = []
    for file in range(8960):
        node = file * 2048 // 8960
        peers: dict[str, Tier] = {f"{(node + jump) % 2048}": PEER for jump in (683, 1366)}
        files.append(LostFile(GIB + file, peers if node % 20 == 0 else {f"{node}": OWN} | peers))
    started = time.thread_time()
    sources = plan_sources(files)
    assert time.thread_time() - started < 0.5
    sent = Counter(source.node for source in sources if source is not None and source.tier is PEER)
    assert max(sent.values()) <= 3, "a lost node has four or five files, on two nodes"
