"""A job on a run of its own, what it must hold at each step, and the node of its store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.engine_job import SMALL_NUMEL, Spec, Truth, node_memory
from tests.support.nodes import Network, Node


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(SMALL_NUMEL)


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Spec]:
    """A job on a run of its own, in the memory of a node of its own."""
    with node_memory(tmp_path) as node_dirs:
        yield Spec(str(tmp_path / "run"), node_dirs, tmp_path / "log", numel=SMALL_NUMEL)


@pytest.fixture
def launcher(network: Network) -> Node:
    """The node that serves the store of process groups."""
    return network.start(1)[0]
