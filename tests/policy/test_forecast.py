"""Forecasts of the number of checkpoints that still fit, with the deletions of a policy and without."""

from __future__ import annotations

import pytest

from holdfast.format.records import Place
from holdfast.policy.forecast import HORIZON, saves_that_fit
from holdfast.policy.keep import CheckpointFacts, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy


def lineage(*steps: int, nbytes: int = 10) -> list[CheckpointFacts]:
    """Checkpoints of `nbytes` after `steps`, newest first, one step each second."""
    return [CheckpointFacts(Place(1, at), at, float(at), nbytes, {"loss": 1 / at}) for at in steps]


@pytest.mark.parametrize(("free", "fit"), [(0, 0), (9, 0), (10, 1), (35, 3), (10 * HORIZON - 1, HORIZON - 1)])
def test_without_a_policy_each_save_takes_its_size(free: int, fit: int) -> None:
    assert saves_that_fit(free, lineage(2, 1), None) == fit


@pytest.mark.parametrize(
    ("policy", "free", "fit"),
    [
        (KeepLast(2), 10, None),  # one more than the policy keeps
        (KeepLast(2), 9, 0),
        (KeepLast(3), 10, 1),
        (KeepLast(3), 20, None),
        (KeepLast(1) | KeepEvery(4), 30, 15),  # steps 4, 8, 12 and 16 stay, and 17 takes the rest
        (KeepFor(3.5), 20, 2),
        (KeepFor(3.5), 30, None),
        (KeepBest("loss", 2), 10, None),
        (KeepBest("accuracy"), 10, 1),  # no checkpoint has the metric, so nothing is deleted
    ],
)
def test_a_policy_gives_back_what_it_does_not_keep(policy: KeepPolicy, free: int, fit: int | None) -> None:
    assert saves_that_fit(free, lineage(2, 1), policy) == fit


def test_deleted_checkpoints_do_not_hide_how_often_a_job_saves() -> None:
    """The policy has left steps 4 and 8: the next save is step 9, which goes, and not step 12, which stays."""
    assert saves_that_fit(30, lineage(8, 4), KeepLast(1) | KeepEvery(4)) == 9


def test_a_pinned_checkpoint_gives_nothing_back() -> None:
    pinned = [facts._replace(held=("it is pinned",)) for facts in lineage(2, 1)]
    assert saves_that_fit(10, pinned, KeepLast(2)) == 1
    assert saves_that_fit(30, pinned, KeepLast(2)) is None


def test_a_checkpoint_whose_still_files_others_need_gives_back_the_rest_alone() -> None:
    """The deletion of the first checkpoint counted as complete, so the forecast saw space that stays taken."""
    newest, first = lineage(2, 1)
    there = [newest._replace(nbytes=2), first._replace(nbytes=10, kept_nbytes=8)]
    assert saves_that_fit(1, there, KeepLast(1)) == 0
    assert saves_that_fit(2, there, KeepLast(1)) is None
    assert saves_that_fit(2, there, KeepLast(2)) is None
    assert saves_that_fit(2, [newest._replace(nbytes=2), first._replace(kept_nbytes=9)], KeepLast(2)) == 1


def test_the_next_saves_are_as_large_as_the_last_one_was_before_it_was_compacted() -> None:
    newest, first = lineage(2, 1)
    assert saves_that_fit(7, [newest._replace(save_nbytes=2), first], None) == 3


def test_nothing_is_foretold_of_an_empty_run() -> None:
    assert saves_that_fit(0, [], KeepLast(1)) is None
