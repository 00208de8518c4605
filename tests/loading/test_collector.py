"""The garbage collector is as it was, however the block ends in which it was paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.collector import collector_paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


@collector_paused()
def fail() -> None:
    raise KeyError(gc.isenabled())


def test_a_paused_collector_starts_again_after_an_error_too() -> None:
    with pytest.raises(KeyError, match="False"):
        fail()
    assert gc.isenabled()


def test_a_collector_that_the_caller_has_disabled_stays_disabled() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
