"""Nodes that folders emulate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keepers import end_keepers


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Path]]:
    """The memory of five nodes. Their keepers end with the test."""
    paths = [tmp_path / f"node{number}" for number in range(5)]
    for path in paths:
        path.mkdir()
    yield paths
    for path in paths:
        end_keepers(path)
