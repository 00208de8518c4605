"""Fixtures of the tests that run the examples of the guides."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from holdfast.format.records import MARKER_KEY
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR
from tests.support.keepers import keeper_of


@pytest.fixture
def memory_is_given_back(tmp_path: Path) -> Iterator[None]:
    """End the keepers of the runs that an example has made, and remove what is in memory. Leaves alone those of other
    tests and jobs on this machine."""
    yield
    user = DEFAULT_NODE_DIR / f"holdfast-{os.geteuid()}"
    for marker in tmp_path.rglob(MARKER_KEY):
        folder = user / xxhash.xxh3_64_hexdigest(os.fsencode(marker.parent))
        if folder.exists():
            os.kill(keeper_of(folder), signal.SIGKILL)
            shutil.rmtree(folder)
