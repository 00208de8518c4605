"""Policies of retention: a union keeps what one of its parts wants, and no policy can delete what must stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.records import Place
from holdfast.policy.keep import (
    HEAD,
    UNJUDGED,
    UNVERIFIED,
    VERIFIED,
    CheckpointFacts,
    KeepBest,
    KeepDecision,
    KeepEvery,
    KeepFor,
    KeepLast,
    KeepPolicy,
    check_keep,
    decide,
    parts_of,
)

NOW = 1_000_000.0
DAY = 86_400.0
NAN = math.nan


def facts(seq: int, *, metrics: dict[str, float] | None = None, held: Sequence[str] = ()) -> CheckpointFacts:
    """Checkpoint number `seq`: its step is 10 times that, and it is ``100 - seq`` hours old."""
    return CheckpointFacts(Place(1, seq), 10 * seq, NOW - (100 - seq) * 3600, 1, metrics or {}, tuple(held))


def of_losses(*losses: float | None) -> list[CheckpointFacts]:
    """A lineage, newest first, with these losses, the oldest first; None for a checkpoint without one."""
    each = enumerate(losses, 1)
    return [facts(seq, metrics={} if loss is None else {"loss": loss}) for seq, loss in each][::-1]


def lineage_of(number: int) -> list[CheckpointFacts]:
    return of_losses(*[None] * number)


def judged(policy: KeepPolicy, lineage: Sequence[CheckpointFacts]) -> KeepDecision:
    return decide(policy, lineage, verified=lineage[0].place if lineage else None, now=NOW)


def kept(policy: KeepPolicy, lineage: Sequence[CheckpointFacts]) -> list[int]:
    """The numbers of the checkpoints that stay."""
    return [each.facts.place.seq for each in judged(policy, lineage).kept]


def test_the_last_ones_stay() -> None:
    assert kept(KeepLast(3), lineage_of(6)) == [6, 5, 4]
    assert kept(KeepLast(3), lineage_of(2)) == [2, 1]
    assert kept(KeepLast(1), []) == []


def test_the_checkpoints_whose_step_is_a_multiple_stay() -> None:
    assert kept(KeepEvery(20), lineage_of(6)) == [6, 4, 2]
    assert kept(KeepEvery(30), lineage_of(7)) == [7, 6, 3], "and the head"
    first = CheckpointFacts(Place(1, 1), 0, 0.0, 1, {})
    assert [each.facts.step for each in judged(KeepEvery(30), [facts(7), first]).kept] == [70, 0]


@pytest.mark.parametrize("day", [DAY, timedelta(days=1)])
def test_the_checkpoints_that_are_young_stay(day: float | timedelta) -> None:
    assert kept(KeepFor(day), lineage_of(99)) == [*range(99, 76, -1)]
    future = CheckpointFacts(Place(1, 1), 1, NOW + DAY, 1, {})
    assert judged(KeepFor(day), [facts(99), future]).deleted == (), "a clock that was ahead deletes nothing"


def test_the_best_stay() -> None:
    losses = of_losses(0.5, 0.1, 0.3, 0.2, 0.9)
    assert kept(KeepBest("loss", 2), losses) == [5, 4, 2]
    assert kept(KeepBest("loss", 2, mode="max"), losses) == [5, 1]
    assert kept(KeepBest("loss"), losses) == [5, 2]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(7 * DAY, "7 days"), (3600, "1 hour"), (90 * 60, "90 minutes"), (1e300, "younger"), (1.5, "1.5 seconds")],
)
def test_a_time_is_told_in_its_largest_unit(seconds: float, said: str) -> None:
    assert said in judged(KeepFor(seconds), [CheckpointFacts(Place(1, 1), 1, NOW, 1, {})]).kept[0].reasons[-1]


def test_of_equally_good_checkpoints_the_newer_stays() -> None:
    assert kept(KeepBest("loss"), of_losses(0.1, 0.1, 0.2)) == [3, 2]


def test_a_checkpoint_without_the_metric_or_where_it_is_nan_is_never_among_the_best() -> None:
    decision = judged(KeepBest("loss", 2), of_losses(0.5, NAN, None, 0.2, 0.9, None))
    assert [each.facts.place.seq for each in decision.kept] == [6, 4, 1]
    (problem,) = decision.problems
    assert not problem.blocks
    assert "nan in some checkpoints" in problem.message
    assert kept(KeepBest("loss", 2), of_losses(math.inf, 0.1, -math.inf, 7.0)) == [4, 3, 2]


@pytest.mark.parametrize(
    ("losses", "said"),
    [((None, None, None), "has the metric 'loss' (they have no metrics)"), ((NAN, None, NAN), "other than nan")],
)
def test_while_no_checkpoint_has_the_metric_nothing_is_deleted(losses: Sequence[float | None], said: str) -> None:
    decision = judged(KeepLast(1) | KeepBest("loss"), of_losses(*losses))
    (problem,) = decision.problems
    assert problem.blocks
    assert said in problem.message
    assert "metrics={'loss': ...}" in problem.action
    assert decision.deleted == ()
    assert [UNJUDGED in each.reasons for each in decision.kept] == [False, True, True]


def test_a_misspelt_metric_is_told_which_metrics_there_are() -> None:
    decision = judged(KeepBest("los"), of_losses(0.5, 0.4))
    assert "they have 'loss'" in decision.problems[0].message


def test_a_metric_that_nothing_has_does_not_matter_while_there_is_nothing_to_delete() -> None:
    assert judged(KeepLast(3) | KeepBest("loss"), lineage_of(3)).problems == ()


def test_each_checkpoint_that_stays_has_all_its_reasons() -> None:
    lineage = [facts(3), facts(2, held=["it is pinned"]), facts(1)]
    decision = judged(KeepLast(1) | KeepEvery(20), lineage)
    assert [each.reasons for each in decision.kept] == [
        (HEAD, VERIFIED, "it is the last one"),
        ("it is pinned", "its step is a multiple of 20"),
    ]


def test_nothing_goes_unless_a_newer_checkpoint_was_verified() -> None:
    lineage = lineage_of(5)
    decision = decide(KeepLast(1), lineage, verified=Place(1, 3), now=NOW)
    assert [each.reasons[-1] for each in decision.kept[1:]] == [UNVERIFIED, VERIFIED]
    assert [each.place.seq for each in decision.deleted] == [1, 2]
    assert decide(KeepLast(1), lineage, verified=None, now=NOW).deleted == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(3) | KeepLast(5),
        lambda: KeepFor(1) | KeepLast(1) | KeepFor(2),
        lambda: KeepBest("loss") | KeepBest("loss", mode="max"),
        lambda: KeepEvery(10) | KeepEvery(10),
    ],
)
def test_contradictory_policies_are_refused_when_they_are_joined(make: Callable[[], KeepPolicy]) -> None:
    with pytest.raises(ValueError, match="contradict each other"):
        make()


def test_policies_of_different_subjects_go_together() -> None:
    policy = KeepEvery(10) | KeepEvery(25) | KeepBest("loss") | (KeepBest("accuracy", mode="max") | KeepLast(1))
    assert len(parts_of(policy)) == 5
    assert policy == KeepEvery(10) | (KeepEvery(25) | KeepBest("loss")) | KeepBest("accuracy", 1, "max") | KeepLast(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KeepLast(0), "at least one"),
        (lambda: KeepEvery(-5), "at least one"),
        (lambda: KeepLast(2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: KeepLast(True), "whole number"),
        (lambda: KeepFor(0), "positive time"),
        (lambda: KeepFor(NAN), "positive time"),
        (lambda: KeepFor("7d"), "timedelta or a number"),  # type: ignore[arg-type]
        (lambda: KeepBest("loss", 0), "at least one"),
        (lambda: KeepBest("loss", mode="low"), "'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: KeepBest(""), "empty"),
        (lambda: KeepBest(3), "name of a metric"),  # type: ignore[arg-type]
        (lambda: KeepLast(1) | 3, "unsupported operand"),
        (lambda: check_keep(3), "keep must be KeepLast"),
        (lambda: check_keep(KeepLast), "keep must be KeepLast"),
        (lambda: check_keep([KeepLast(3), KeepEvery(5)]), r"; write keep=KeepLast\(.*3\) \| KeepEvery\(steps=5\)$"),
        (lambda: check_keep([KeepLast(3), 5]), r"not \[KeepLast\(number=3\), 5\]$"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(make: Callable[[], object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make()


NUMBERS = st.none() | st.floats(-2, 2) | st.just(NAN)


@st.composite
def lineages(draw: st.DrawFn) -> list[CheckpointFacts]:
    """Newest first; steps may repeat or fall, as after a rollback."""
    number = draw(st.integers(0, 12))
    return [
        CheckpointFacts(
            Place(1, number - at),
            draw(st.integers(0, 40)),
            NOW - draw(st.floats(-DAY, 5 * DAY)),
            1,
            {} if (loss := draw(NUMBERS)) is None else {"loss": loss},
            draw(st.sampled_from([(), (), ("it is pinned",)])),
        )
        for at in range(number)
    ]


PARTS: st.SearchStrategy[Sequence[KeepPolicy]] = st.lists(
    st.builds(KeepLast, st.integers(1, 5))
    | st.builds(KeepEvery, st.integers(1, 9))
    | st.builds(KeepFor, st.floats(1, 4 * DAY))
    | st.builds(KeepBest, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"])),
    min_size=1,
    max_size=4,
    unique_by=lambda part: parts_of(part)[0].subject,
)


def union(parts: Sequence[KeepPolicy]) -> KeepPolicy:
    joined, *rest = parts
    for part in rest:
        joined = joined | part
    return joined


@given(lineages(), PARTS, st.data())
def test_every_checkpoint_stays_for_a_reason_or_goes(
    lineage: list[CheckpointFacts], parts: Sequence[KeepPolicy], data: st.DataObject
) -> None:
    verified = data.draw(st.none() | st.sampled_from([each.place for each in lineage])) if lineage else None
    decision = decide(union(parts), lineage, verified=verified, now=NOW)
    assert sorted(
        [*(each.facts.place for each in decision.kept), *(each.place for each in decision.deleted)]
    ) == sorted(each.place for each in lineage)
    assert all(each.reasons for each in decision.kept)
    assert all(verified is not None and each.place < verified and not each.held for each in decision.deleted)
    assert lineage[:1] == [each.facts for each in decision.kept[:1]], "the head stays"


@given(lineages(), PARTS, st.randoms())
def test_a_union_keeps_what_a_part_wants_in_any_order(
    lineage: list[CheckpointFacts], parts: Sequence[KeepPolicy], random: Random
) -> None:
    whole = judged(union(parts), lineage)
    shuffled = random.sample(parts, len(parts))
    assert judged(union(shuffled), lineage).deleted == whole.deleted
    for part in parts:
        goes = {each.place for each in judged(part, lineage).deleted}
        assert {each.place for each in whole.deleted} <= goes
    if not any(problem.blocks for problem in whole.problems):
        each_goes = [{facts.place for facts in judged(part, lineage).deleted} for part in parts]
        assert {each.place for each in whole.deleted} == set.intersection(*each_goes)


@given(lineages(), PARTS)
def test_a_second_decision_deletes_nothing_more(lineage: list[CheckpointFacts], parts: Sequence[KeepPolicy]) -> None:
    first = judged(union(parts), lineage)
    assert judged(union(parts), [each.facts for each in first.kept]).deleted == ()
