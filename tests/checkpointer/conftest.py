"""A run, and the memory of a node, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Memory
from tests.support.keepers import end_keepers


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    """Memory of a node of its own; its keepers end with the test."""
    (tmp_path / "node").mkdir()
    yield Memory(node_dir=tmp_path / "node")
    end_keepers(tmp_path / "node")
