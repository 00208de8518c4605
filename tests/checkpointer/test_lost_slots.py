"""The number of times that nodes try to rebuild a checkpoint, before the job uses an older one."""

from __future__ import annotations

import pytest

from holdfast.checkpointer.lost_slots import RebuildOutcome, are_hopeless
from holdfast.format.records import Place


def outcome(trouble: str = "", **nodes: set[str]) -> RebuildOutcome:
    found = {name: frozenset(nodes.get(name, ())) for name in ("failed", "silent", "full")}
    return RebuildOutcome(Place(2, 4), "0011223344556677", **found, trouble=trouble)


UNEXPLAINED = outcome("the connection broke")


def test_a_protected_checkpoint_was_given_up_for_one_failure_that_no_node_had_caused() -> None:
    """A keeper that had just been started did not know its slots yet, and did when it was asked for the cause."""
    assert not are_hopeless([UNEXPLAINED])
    assert not are_hopeless([UNEXPLAINED, UNEXPLAINED])
    assert are_hopeless([UNEXPLAINED] * 3)


@pytest.mark.parametrize("kind", ["failed", "silent", "full"])
def test_failures_of_nodes_that_the_next_try_does_without_are_counted_alone(kind: str) -> None:
    explained = outcome("no answer", **{kind: {"node"}})
    assert not are_hopeless([explained, explained, UNEXPLAINED, UNEXPLAINED, outcome()])
    assert are_hopeless([explained] * 6)
