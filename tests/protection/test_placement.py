"""Copies and parity lie where losses of nodes and of failure domains spare enough of them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError
from holdfast.protection import Copies, Parity
from holdfast.protection.cards import NodeCard
from holdfast.protection.placement import CopyPlacement, ParityPlacement, place_copies, place_parity


def cards(
    num_nodes: int, *, domains: Sequence[tuple[str, ...]] = (), groups: Sequence[tuple[str, ...]] = ()
) -> list[NodeCard]:
    """Cards of nodes with eight ranks each."""
    return [
        NodeCard(
            f"node-{number}",
            f"host-{number}",
            tuple(range(8 * number, 8 * number + 8)),
            domains[number] if domains else (),
            groups[number] if groups else (),
        )
        for number in range(num_nodes)
    ]


def racks(*sizes: int) -> list[tuple[str, ...]]:
    """The racks of nodes, of which there are so many in each."""
    return [(f"rack-{rack}",) for rack, size in enumerate(sizes) for _ in range(size)]


def mesh(num_stages: int, num_replicas: int) -> list[tuple[str, ...]]:
    """The pipeline and data groups of nodes, one stage after the other."""
    return [(f"data-{stage}", f"pipe-{copy}") for stage in range(num_stages) for copy in range(num_replicas)]


@st.composite
def jobs(draw: st.DrawFn) -> list[NodeCard]:
    num_nodes = draw(st.integers(2, 24))
    depth = draw(st.integers(0, 2))
    labels = st.sampled_from("abcdefgh"[: draw(st.integers(1, 8 if depth < 2 else 3))])
    domains = [tuple(draw(st.lists(labels, min_size=depth, max_size=depth))) for _ in range(num_nodes)]
    groups = [tuple(draw(st.lists(labels, max_size=3))) for _ in range(num_nodes)]
    return cards(num_nodes, domains=domains, groups=groups)


def placed(nodes: list[NodeCard], n: int) -> CopyPlacement | None:
    try:
        return place_copies(nodes, n)
    except ConfigurationError:
        return None


def sizes_of_domains(nodes: list[NodeCard]) -> list[list[int]]:
    """The numbers of nodes in the domains of each level, the smallest first."""
    return [list(Counter(node.domains[first:] for node in nodes).values()) for first in range(len(nodes[0].domains))]


def allow_copies(sizes: list[int], n: int) -> bool:
    """Whether nodes in domains of so many nodes can keep `n` copies each, outside the domain of their owner: no cut
    between owners and holders is too small (Ford and Fulkerson)."""
    for holders in itertools.product([False, True], repeat=len(sizes)):
        outside = sum(size for size, is_cut in zip(sizes, holders, strict=True) if not is_cut)
        left = [outside - size * (not is_cut) for size, is_cut in zip(sizes, holders, strict=True)]
        lacking = sum(size * max(0, n - others) for size, others in zip(sizes, left, strict=True))
        if lacking > n * (sum(sizes) - outside):
            return False
    return True


@given(jobs(), st.integers(1, 4))
def test_each_node_has_n_other_holders_and_holds_for_n_nodes(nodes: list[NodeCard], n: int) -> None:
    found = placed(nodes, n)
    if found is not None:
        for owner, holders in enumerate(found.holders):
            assert owner not in holders
            assert len(set(holders)) == len(holders) == n
        held = Counter(holder for holders in found.holders for holder in holders)
        assert all(held[node] == n for node in range(len(nodes)))


@given(jobs(), st.integers(1, 3))
def test_copies_survive_every_loss_of_n_nodes(nodes: list[NodeCard], n: int) -> None:
    found = placed(nodes, n)
    if found is not None and len(nodes) <= 12:
        for lost in itertools.combinations(range(len(nodes)), n):
            assert all(not {owner, *found.holders[owner]} <= set(lost) for owner in lost)


@given(jobs(), st.integers(1, 3))
def test_copies_leave_the_largest_domain_that_can_be_left(nodes: list[NodeCard], n: int) -> None:
    found = placed(nodes, n)
    if len(nodes) <= n:
        assert found is None
        return
    sizes = sizes_of_domains(nodes)
    possible = [len(level) > 1 and allow_copies(level, n) for level in sizes]
    assert (found is not None) == (any(possible) or all(len(level) == 1 for level in sizes))
    if found is not None and any(possible):
        first = max(level for level, fits in enumerate(possible) if fits)
        for owner, holders in enumerate(found.holders):
            own = nodes[owner].domains[first:]
            assert all(nodes[holder].domains[first:] != own for holder in holders)


@given(jobs(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_order_of_the_cards_does_not_matter(nodes: list[NodeCard], n: int, random: object) -> None:
    def by_name(given: list[NodeCard]) -> object:
        found = placed(given, n)
        if found is None:
            return None
        names = [node.identity for node in given]
        holders = {names[owner]: [names[node] for node in held] for owner, held in enumerate(found.holders)}
        return holders, found.notes

    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis has no type for it
    assert by_name(shuffled) == by_name(nodes) == by_name(nodes)


@given(jobs(), st.integers(1, 2), st.none() | st.integers(3, 9))
def test_parity_groups_survive_the_loss_of_each_domain_that_they_can(
    nodes: list[NodeCard], losses: int, group: int | None
) -> None:
    policy = Parity(losses, group)
    try:
        found = place_parity(nodes, policy)
    except ConfigurationError:
        found = None
    if len(nodes) < (group or losses + 1):
        assert found is None
        return
    num_groups = len(nodes) // policy.group_size(len(nodes))
    sizes = sizes_of_domains(nodes)
    possible = [len(level) > 1 and max(level) <= losses * num_groups for level in sizes]
    assert (found is not None) == (any(possible) or all(len(level) == 1 for level in sizes))
    if found is not None:
        assert sorted(node for members in found.groups for node in members) == list(range(len(nodes)))
        assert len(found.groups) == num_groups
        assert {len(members) for members in found.groups} <= {len(nodes) // num_groups, -(-len(nodes) // num_groups)}
        first = max((level for level, fits in enumerate(possible) if fits), default=None)
        if first is not None:
            for members in found.groups:
                assert max(Counter(nodes[node].domains[first:] for node in members).values()) <= losses


def test_nodes_without_domains_form_groups_and_a_last_ring() -> None:
    assert place_copies(cards(6), 1).holders == ((3,), (4,), (5,), (0,), (1,), (2,))
    # Two groups of three, and a ring of the last four.
    assert place_copies(cards(10), 2).holders == (
        *((2, 4), (3, 5), (4, 0), (5, 1), (0, 2), (1, 3)),
        *((7, 8), (8, 9), (9, 6), (6, 7)),
    )


def test_copies_leave_the_parallel_groups_of_their_owner_where_the_mesh_allows() -> None:
    found = place_copies(cards(32, groups=mesh(4, 8)), 1)
    for owner, (holder,) in enumerate(found.holders):
        assert owner // 8 != holder // 8
        assert owner % 8 != holder % 8
    assert not found.notes


def test_a_group_of_all_nodes_says_nothing() -> None:
    nodes = cards(8, groups=[("data",)] * 8)
    assert place_copies(nodes, 1) == place_copies(cards(8), 1)


def test_a_mesh_that_leaves_no_other_place_is_noted() -> None:
    found = place_copies(cards(6, groups=[("stage-0",)] * 4 + [("stage-1",)] * 2), 1)
    assert found.notes == ("2 nodes of 6 have copies inside their own parallel groups",)


def test_domains_come_before_parallel_groups() -> None:
    nodes = cards(4, domains=racks(2, 2), groups=[("stage-0",), ("stage-1",), ("stage-0",), ("stage-0",)])
    found = place_copies(nodes, 1)
    assert all((owner < 2) != (holder < 2) for owner, (holder,) in enumerate(found.holders))
    assert found.notes == ("2 nodes of 4 have copies inside their own parallel groups",)


def test_two_copies_of_each_node_fit_into_two_racks() -> None:
    found = place_copies(cards(8, domains=racks(4, 4)), 2)
    assert all((owner < 4) != (holder < 4) for owner, held in enumerate(found.holders) for holder in held)


def test_racks_of_the_same_name_in_two_blocks_are_two_racks() -> None:
    nodes = cards(4, domains=[("1", "a"), ("1", "b"), ("1", "b"), ("1", "b")])
    with pytest.raises(ConfigurationError, match="'b/1', which has 3 of 4 nodes"):
        place_copies(nodes, 1)


def test_copies_leave_racks_where_they_cannot_leave_blocks() -> None:
    nodes = cards(4, domains=[("1", "a"), ("1", "b"), ("2", "b"), ("2", "b")])
    found = place_copies(nodes, 1)
    assert found.notes == ("copies cannot survive the loss of 'b', which has 3 of 4 nodes",)
    assert {frozenset((owner, holder)) for owner, (holder,) in enumerate(found.holders)} <= {
        *map(frozenset, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)])
    }


def test_a_job_in_one_rack_is_protected_against_the_loss_of_nodes() -> None:
    found = place_copies(cards(4, domains=racks(4)), 1)
    assert found.holders == place_copies(cards(4), 1).holders
    assert found.notes == ("all nodes are in the domain 'rack-0', so copies do not survive its loss",)


def test_two_nodes_of_one_host_do_not_keep_each_others_copies() -> None:
    nodes = [NodeCard(f"node-{number}", f"host-{number % 2}", (number,)) for number in range(4)]
    assert all(owner % 2 != holder % 2 for owner, (holder,) in enumerate(place_copies(nodes, 1).holders))


@pytest.mark.parametrize("policy", [Copies(3), Parity(2, group=4), Parity(1, group=4)])
def test_too_few_nodes_are_refused(policy: Copies | Parity) -> None:
    with pytest.raises(ConfigurationError, match=r"needs at least 4 nodes, but the job has 3\. Run on more") as caught:
        place_copies(cards(3), policy.n) if isinstance(policy, Copies) else place_parity(cards(3), policy)
    assert caught.value.code == "config.protection"


def test_a_rack_with_more_than_half_of_the_nodes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="copies cannot survive the loss of 'rack-0', which has 3 of 4 nodes"):
        place_copies(cards(4, domains=racks(3, 1)), 1)
    with pytest.raises(ConfigurationError, match="parity cannot survive the loss of 'rack-0', which has 2 of 4 nodes"):
        place_parity(cards(4, domains=racks(2, 2)), Parity(1))


def test_nodes_that_give_unlike_numbers_of_domains_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="host-0 gives none as its failure domains"):
        place_copies(cards(2, domains=[(), ("rack-7",)]), 1)


def test_domains_are_named_in_the_order_in_which_users_give_them() -> None:
    with pytest.raises(ConfigurationError, match=r"gives 'rack-7' .* host-1 gives 'block-2/rack-7'") as caught:
        place_copies(cards(2, domains=[("rack-7",), ("rack-7", "block-2")]), 1)
    assert "such as block-2/rack-7" in str(caught.value)


def test_a_job_smaller_than_the_usual_group_shares_parity_among_all_nodes() -> None:
    assert place_parity(cards(3), Parity(1)) == ParityPlacement(((0, 1, 2),), ())
    assert [len(group) for group in place_parity(cards(13), Parity(2)).groups] == [7, 6]


@pytest.mark.parametrize(
    "nodes",
    [
        cards(2048),
        cards(2048, groups=mesh(16, 128)),
        cards(2048, groups=mesh(2, 1024)),
        cards(2047, domains=racks(*[32] * 63, 31), groups=mesh(16, 128)[:-1]),
        cards(2048, domains=racks(1024, 1024), groups=mesh(16, 128)),
    ],
    ids=["alike", "16 stages", "2 stages", "racks", "2 racks"],
)
def test_a_placement_of_2048_nodes_is_quick(nodes: list[NodeCard]) -> None:
    for n in (1, 2):
        times = []
        for _ in range(2):
            started = time.thread_time()
            place_copies(nodes, n)
            times.append(time.thread_time() - started)
        assert min(times) < 0.3


def test_options_of_policies_are_checked() -> None:
    with pytest.raises(ValueError, match="the number of Copies is 0, but a policy makes at least one copy"):
        Copies(0)
    with pytest.raises(TypeError, match="the number of Copies must be a whole number, not a str"):
        Copies("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="losses is 3, but parity exists for one or two losses"):
        Parity(3)
    with pytest.raises(ValueError, match="group is 2, but a group needs a node more than it may lose"):
        Parity(2, group=2)
