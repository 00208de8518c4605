"""The formulas of survival agree with brute force over real placements, and with the figures that others have
published."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

import pytest

from holdfast.protection import Copies, Parity
from holdfast.protection.placement import place_copies, place_parity
from holdfast.protection.survival import least_survival, survival
from tests.protection.test_placement import cards


def fatal_sets(policy: Copies | Parity, num_nodes: int) -> Iterator[frozenset[int]]:
    """The least sets of nodes whose loss loses a snapshot."""
    nodes = cards(num_nodes)
    if isinstance(policy, Copies):
        for owner, holders in enumerate(place_copies(nodes, policy.n).holders):
            yield frozenset((owner, *holders))
    else:
        for group in place_parity(nodes, policy).groups:
            yield from map(frozenset, itertools.combinations(group, policy.losses + 1))


def counted(policy: Copies | Parity, num_nodes: int, num_lost: int) -> float:
    """The share of all losses of `num_lost` nodes that lose no snapshot."""
    fatal = set(fatal_sets(policy, num_nodes))
    losses = list(itertools.combinations(range(num_nodes), num_lost))
    return sum(not any(each <= set(lost) for each in fatal) for lost in losses) / len(losses)


@pytest.mark.parametrize(
    "policy",
    [Copies(1), Copies(2), Copies(3), Parity(1), Parity(2), Parity(1, group=3), Parity(2, group=3), Parity(2, group=5)],
    ids=repr,
)
def test_the_formulas_agree_with_brute_force(policy: Copies | Parity) -> None:
    for num_nodes in range(5, 13):
        for num_lost in range(min(num_nodes, 6) + 1):
            expected = pytest.approx(counted(policy, num_nodes, num_lost), abs=1e-12)
            assert survival(policy, num_nodes, num_lost) == expected, (num_nodes, num_lost)


def test_without_protection_every_loss_loses_a_snapshot() -> None:
    assert [survival(None, 16, lost) for lost in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("num_nodes", "num_lost", "expected"),
    [(16, 2, 0.933), (16, 3, 0.800), (16, 4, 0.615), (17, 2, 0.9265), (1000, 2, 0.999)],
)
def test_the_figures_of_gemini(num_nodes: int, num_lost: int, expected: float) -> None:
    """GEMINI (SOSP'23) with two copies in all: one on the node itself."""
    digits = len(str(expected)) - 2
    assert round(survival(Copies(1), num_nodes, num_lost), digits) == expected


def test_a_ring_of_all_nodes_would_survive_less() -> None:
    ring = [frozenset((node, (node + 1) % 16)) for node in range(16)]
    shares = {}
    for num_lost in (2, 3, 4):
        losses = [set(lost) for lost in itertools.combinations(range(16), num_lost)]
        shares[num_lost] = sum(not any(each <= lost for each in ring) for lost in losses) / len(losses)
    assert {lost: round(share, 3) for lost, share in shares.items()} == {2: 0.867, 3: 0.629, 4: 0.363}
    assert least_survival(16, size=2, num_nodes=16, num_lost=2) == pytest.approx(shares[2])
    assert least_survival(16, size=2, num_nodes=16, num_lost=3) < shares[3]


def test_geminis_limit_for_groups() -> None:
    assert round(least_survival(8, size=2, num_nodes=16, num_lost=4), 3) == 0.600
    assert least_survival(8, size=2, num_nodes=16, num_lost=1) == 1
    assert least_survival(8, size=2, num_nodes=16, num_lost=15) == 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Copies(1), (0.992, 0.975, 0.950, 0.877)),
        (Parity(1, group=4), (0.975, 0.925, 0.854, 0.666)),
        (Parity(1, group=8), (0.941, 0.830, 0.681, 0.359)),
        (Parity(2, group=6), (1, 0.9986, 0.994, 0.973)),
        (Parity(2, group=10), (1, 0.995, 0.980, 0.911)),
    ],
    ids=["replica pair", "XOR 3+1", "XOR 7+1", "P+Q 4+2", "P+Q 8+2"],
)
def test_the_table_of_copies_and_parity_on_120_nodes(policy: Copies | Parity, expected: tuple[float, ...]) -> None:
    found = [survival(policy, 120, lost) for lost in (2, 3, 4, 6)]
    assert found == pytest.approx(expected, abs=0.0006)


def test_many_nodes_are_no_trouble() -> None:
    one_by_one = prod((2048 - 2 * lost) / (2048 - lost) for lost in range(128))
    assert survival(Copies(1), 2048, 128) == pytest.approx(one_by_one)
    assert survival(Copies(2), 16_385, 2) == 1
