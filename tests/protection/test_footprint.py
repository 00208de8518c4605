"""The costs of protection in memory and network."""

from __future__ import annotations

import pytest

from holdfast.protection import Copies, Parity
from holdfast.protection.footprint import Footprint, footprint


def cost(policy: Copies | Parity | None, *, num_nodes: int = 120, nbytes: int = 480 * 10**9) -> Footprint:
    return footprint(policy, num_nodes=num_nodes, nbytes=nbytes, generations=2)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (None, 0),
        (Copies(1), 1.0),
        (Copies(2), 2.0),
        (Parity(1, group=4), 1 / 3),
        (Parity(1, group=8), 1 / 7),
        (Parity(2, group=6), 1 / 2),
        (Parity(2, group=10), 1 / 4),
    ],
)
def test_memory_beyond_that_of_the_snapshots(policy: Copies | Parity | None, more: float) -> None:
    assert cost(policy).memory_nbytes / cost(None).memory_nbytes - 1 == pytest.approx(more)


def test_eight_gpus_with_60_gb_each() -> None:
    """The worked example of the literature: 4 + 2 parity takes 1.44 TB, a copy 1.92 TB, no protection 0.96 TB."""
    found = [cost(policy).memory_nbytes / 1e12 for policy in (Parity(2, group=6), Copies(1), None)]
    assert found == [1.44, 1.92, 0.96]


def test_parity_sends_as_much_as_copies_that_survive_as_many_losses() -> None:
    assert cost(Parity(1)).sent_nbytes == cost(Copies(1)).sent_nbytes == 480 * 10**9
    assert cost(Parity(2)).sent_nbytes == cost(Copies(2)).sent_nbytes == 960 * 10**9


def test_a_rebuild_reads_one_copy_or_the_rest_of_a_parity_group() -> None:
    assert cost(Copies(2)).rebuilt_nbytes == 480 * 10**9
    assert cost(Parity(1, group=4)).rebuilt_nbytes == 3 * 480 * 10**9
    assert cost(Parity(2, group=6)).rebuilt_nbytes == 4 * 480 * 10**9
    assert cost(Parity(2, group=6)).link_nbytes == cost(Copies(1)).link_nbytes == 480 * 10**9


def test_larger_groups_of_jobs_that_are_no_multiple_need_less_memory() -> None:
    assert cost(Parity(1, group=4), num_nodes=7, nbytes=6).memory_nbytes == 2 * (6 + 1)
    assert cost(Parity(1), num_nodes=3, nbytes=6).memory_nbytes == 2 * (6 + 3)
