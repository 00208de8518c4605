"""The deadline of an operation, whose parts share its time."""

from __future__ import annotations

import pytest

from holdfast.control.deadline import Deadline


def test_a_store_that_was_opened_late_is_given_up_before_the_other_ranks_lose_patience() -> None:
    now_s = [100.0]
    deadline = Deadline(60, clock=lambda: now_s[0])
    assert deadline.for_storage_s == pytest.approx(54)
    for later_s in (10, 30, 47):
        now_s[0] = 100.0 + later_s
        assert later_s + deadline.for_storage_s == pytest.approx(54)
    now_s[0] = 155.0
    assert deadline.for_storage_s == pytest.approx(6)
    now_s[0] = 400.0
    assert deadline.for_storage_s == pytest.approx(6)
