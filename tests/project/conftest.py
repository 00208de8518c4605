"""Fixtures of the tests that run the examples of the guides."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR
from tests.keeper.test_keeper import keeper_of


@pytest.fixture
def memory_is_given_back() -> Iterator[None]:
    """End the keepers that an example has started, and remove what is in memory."""
    user = DEFAULT_NODE_DIR / f"holdfast-{os.geteuid()}"
    before = set(user.glob("*"))
    yield
    for folder in set(user.glob("*")) - before:
        os.kill(keeper_of(folder), signal.SIGKILL)
        shutil.rmtree(folder)
