"""Policies for when to save: what each says, what contradicts, and what is refused."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.options import check_timeout
from holdfast.policy.keep import KeepBest, KeepEvery, KeepLast
from holdfast.policy.metric_names import MetricWatch, meant
from holdfast.policy.schedule import StepSchedule
from holdfast.policy.triggers import MetricTrigger, TimeTrigger
from holdfast.policy.when import Auto, EverySteps, EveryTime, OnMetric, OnPreemption, OnRequest, SavePolicy
from holdfast.policy.wish import Wish, stronger


class TestEverySteps:
    def test_it_saves_after_multiples_but_not_after_step_0(self) -> None:
        assert [step for step in range(10) if EverySteps(3).is_due(step)] == [3, 6, 9]

    @given(st.lists(st.integers(1, 50), min_size=1, max_size=3), st.integers(0, 200), st.integers(0, 200))
    def test_the_next_step_of_a_schedule_is_the_first_with_a_reason(
        self, intervals: list[int], step: int, last: int
    ) -> None:
        schedule = StepSchedule(map(EverySteps, intervals))
        schedule.last = last
        expected = next(each for each in range(step + 1, step + 52) if schedule.wish(each) is not None)
        assert schedule.next_after(step, memory_only=False) == expected

    def test_a_schedule_of_nothing_has_no_next_step(self) -> None:
        assert StepSchedule([EveryTime(1.0)]).next_after(5, memory_only=True) is None

    def test_a_save_that_storage_gets_comes_before_one_to_memory_alone(self) -> None:
        schedule = StepSchedule([EverySteps(2, memory_only=True), EverySteps(6)])
        schedule.last = 8
        wishes = [schedule.wish(step) for step in range(9)]
        assert [step for step, wish in enumerate(wishes) if wish and wish.memory_only] == [2, 4]
        assert [step for step, wish in enumerate(wishes) if wish and not wish.memory_only] == [6, 8]
        assert schedule.next_after(0, memory_only=True) == 2
        assert schedule.next_after(0, memory_only=False) == 6


class TestEveryTime:
    def test_it_wishes_when_the_time_has_passed_since_the_last_save(self) -> None:
        trigger = TimeTrigger(EveryTime(60), now_s=100.0)
        assert trigger.wish(None, 159.0) is None
        assert trigger.wish(None, 160.0) == Wish("every 60 s")
        trigger.saved(161.0, begun_s=161.0, memory_only=False)
        assert trigger.wish(None, 220.0) is None
        assert trigger.wish(None, 221.0) is not None

    def test_saves_to_memory_alone_count_only_for_such_saves(self) -> None:
        durable, held = (TimeTrigger(EveryTime(60, memory_only=each), now_s=0.0) for each in (False, True))
        for trigger in (durable, held):
            trigger.saved(30.0, begun_s=30.0, memory_only=True)
        assert durable.wish(None, 60.0) == Wish("every 60 s")
        assert held.wish(None, 60.0) is None
        assert held.wish(None, 90.0) == Wish("every 60 s", memory_only=True)
        held.saved(95.0, begun_s=95.0, memory_only=False)
        assert held.wish(None, 150.0) is None


class TestOnMetric:
    @pytest.mark.parametrize(("mode", "better"), [("min", [0, 2, 5]), ("max", [0, 1, 3])])
    def test_it_wishes_when_the_metric_is_better_than_ever(self, mode: str, better: list[int]) -> None:
        trigger = MetricTrigger(OnMetric("loss", mode=mode))  # type: ignore[arg-type]
        values = [3.0, 4.0, 2.0, 5.0, 2.0, 1.0]
        assert [at for at, value in enumerate(values) if trigger.wish({"loss": value}, 0.0)] == better

    def test_a_smaller_gain_than_min_delta_is_none(self) -> None:
        trigger = MetricTrigger(OnMetric("loss", min_delta=0.5))
        values = [3.0, 2.6, 2.5, 2.4, 1.0]
        assert [at for at, value in enumerate(values) if trigger.wish({"loss": value}, 0.0)] == [0, 3, 4]

    def test_nan_is_never_better_and_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        trigger = MetricTrigger(OnMetric("loss"))
        with caplog.at_level(logging.WARNING):
            assert [
                trigger.wish({"loss": value}, 0.0) is not None for value in (math.nan, math.nan, 1.0, math.nan)
            ] == [
                False,
                False,
                True,
                False,
            ]
        assert [record.message for record in caplog.records] == [
            "metric 'loss' is nan, which is never better; check what the loop gives to step(metrics=)"
        ]

    def test_a_misspelt_metric_is_told_at_the_first_step_with_the_one_that_was_meant(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        trigger = MetricTrigger(OnMetric("los"))
        trigger.wish(None, 0.0)
        assert not caplog.records
        for _ in range(3000):
            trigger.wish({"lr": 0.1, "loss": 1.0}, 0.0)
        assert [record.getMessage() for record in caplog.records] == [
            "OnMetric('los') saves nothing so far: step() gets no metric 'los'; did you mean 'loss'?"
        ]

    def test_a_metric_that_never_comes_is_told_after_a_hundred_steps_with_others(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        trigger = MetricTrigger(OnMetric("accuracy"))
        for step in range(3000):
            assert len(caplog.records) == (step >= 200)
            trigger.wish({"loss": 1.0} if step % 2 else None, 0.0)
        (record,) = caplog.records
        assert "100 steps had other metrics than 'accuracy' (the last one 'loss')" in record.getMessage()

    def test_a_loop_that_never_gives_metrics_is_told_after_a_thousand_steps(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        trigger = MetricTrigger(OnMetric("loss"))
        for step in range(3000):
            assert len(caplog.records) == (step >= 1000)
            trigger.wish(None, 0.0)
        (record,) = caplog.records
        assert "no step has had the metric 'loss' in 1,000 steps; give it to step(metrics=)" in record.getMessage()

    @pytest.mark.parametrize(
        ("name", "given", "slip"),
        [
            ("los", ["lr", "loss"], "loss"),
            ("Loss", ["loss"], "loss"),
            ("val/loss", ["val_loss"], "val_loss"),
            ("val_los", ["loss", "val_loss"], "val_loss"),
            ("acc", ["accuracy"], "accuracy"),
            ("val_loss", ["loss"], None),
            ("eval/loss", ["train/loss", "loss"], None),
            ("val_accuracy", ["train_accuracy"], None),
            ("top5", ["top1"], None),
            ("@", ["#", "loss"], None),
        ],
    )
    def test_a_slip_differs_in_alike_words_and_not_in_a_word_more(
        self, name: str, given: list[str], slip: str | None
    ) -> None:
        assert meant(name, given) == slip

    def test_a_metric_that_comes_once_is_never_taken_for_a_slip(self) -> None:
        watch = MetricWatch("loss")
        assert watch.slip(["loss", "loss1"]) is None
        assert watch.slip(["los"]) is None
        assert watch.is_over

    def test_a_metric_that_is_no_number_is_refused_by_its_name(self) -> None:
        with pytest.raises(ValueError, match="metric 'loss' must be one number, not 'low'"):
            MetricTrigger(OnMetric("loss")).wish({"loss": "low"}, 0.0)  # type: ignore[dict-item]

    def test_a_metric_that_comes_at_times_is_not_missed(self, caplog: pytest.LogCaptureFixture) -> None:
        trigger = MetricTrigger(OnMetric("accuracy", mode="max"))
        for step in range(3000):
            trigger.wish({"accuracy": 0.5} if step == 500 else None, 0.0)
        assert not caplog.records


class TestUnion:
    def test_it_is_flat_and_keeps_the_order(self) -> None:
        a, b, c = EverySteps(3), EveryTime(60), OnMetric("loss")
        assert list((a | (b | c)).parts()) == [a, b, c]
        assert list((EverySteps(3) | EverySteps(5)).parts()) == [EverySteps(3), EverySteps(5)]
        assert list((OnMetric("a") | OnMetric("b")).parts()) == [OnMetric("a"), OnMetric("b")]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: EveryTime(60) | EveryTime(90), "2 rules for the time between saves"),
            (lambda: OnMetric("loss") | EverySteps(2) | OnMetric("loss", mode="max"), "2 rules for the metric 'loss'"),
            (lambda: OnRequest() | OnRequest(signum=signal.SIGUSR1), "2 rules for requests"),
            (lambda: OnRequest(signum=signal.SIGTERM) | OnPreemption(), "2 rules for the signal SIGTERM"),
        ],
    )
    def test_policies_that_contradict_each_other_are_refused(
        self, make: Callable[[], SavePolicy], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize(
        "join", [lambda a, b: a or b, lambda a, b: a and b, lambda a, b: a & b, lambda a, b: not a]
    )
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (EverySteps(10), EveryTime(30)),
            (EverySteps(10) | OnRequest(), EveryTime(30)),
            (KeepLast(2), KeepEvery(10)),
            (KeepLast(2) | KeepBest("loss"), KeepEvery(10)),
        ],
        ids=repr,
    )
    def test_words_that_would_drop_a_policy_without_a_word_are_refused(
        self, one: object, other: object, join: Callable[[object, object], object]
    ) -> None:
        """``EverySteps(10) or EveryTime(30)`` was ``EverySteps(10)``."""
        with pytest.raises(TypeError, match=r"join(ed)? (policies )?with \|"):
            join(one, other)

    def test_only_policies_can_be_joined(self) -> None:
        with pytest.raises(TypeError):
            EverySteps(3) | 5

    @pytest.mark.parametrize(
        "join",
        [
            lambda: EverySteps(5) | EveryTime(60) | KeepLast(3),
            lambda: KeepLast(3) | (EverySteps(5) | EveryTime(60)),
        ],
    )
    def test_a_policy_for_when_and_one_for_how_much_are_told_apart(self, join: Callable[[], object]) -> None:
        save = r"EverySteps\(num_steps=5, memory_only=False\) \| EveryTime\(seconds=60, memory_only=False\)"
        keep = r"KeepLast\(number=3\)"
        with pytest.raises(
            TypeError, match=f"{save} says when to save, and {keep} what to keep.* save={save}, keep={keep}"
        ):
            join()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EverySteps(0), "num_steps is 0, but an interval has at least one step"),
        (lambda: EverySteps(2.5), "num_steps must be a whole number"),  # type: ignore[arg-type]
        (lambda: EveryTime(0), "the interval must be positive"),
        (lambda: EveryTime("10m"), "the interval must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: EveryTime(math.nan), "the interval must be positive"),
        (lambda: OnMetric(""), "the name of a metric is a string"),
        (lambda: OnMetric("loss", mode="least"), "mode must be 'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: OnMetric("loss", min_delta=-1), "min_delta is a difference"),
        (lambda: OnRequest(signum=signal.SIGKILL), "no policy can wait for signal 9"),
        (lambda: OnRequest(signum=12345), "no policy can wait for signal 12345"),
        (lambda: OnRequest(signum="SIGUSR1"), "signum is a signal"),  # type: ignore[arg-type]
        (lambda: OnRequest(file=5), "file is the path of a file"),  # type: ignore[arg-type]
        (lambda: OnRequest(file=Path("/")), "a file that asks for a save, but '/' is a folder"),
        (lambda: OnRequest(signum=signal.SIGCHLD), "no policy can wait for signal 17"),
        (lambda: Auto(failures=["llama3"]), "failures is one of 'llama3'"),  # type: ignore[arg-type]
        (lambda: OnRequest(poll_s=0), "poll_s must be positive"),
        (lambda: OnPreemption(()), "signums is a tuple of signals"),
        (lambda: OnPreemption(signal.SIGTERM), "signums is a tuple of signals"),  # type: ignore[arg-type]
        (lambda: OnPreemption((signal.SIGSTOP,)), "no policy can wait for signal 19"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


HALF_AN_HOUR: Any = timedelta(minutes=30)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryTime(HALF_AN_HOUR),
        lambda: Auto(mttf_s=HALF_AN_HOUR),
        lambda: OnRequest(poll_s=HALF_AN_HOUR),
        lambda: OnPreemption(poll_s=HALF_AN_HOUR),
        lambda: OnPreemption(deadline_s=HALF_AN_HOUR),
        lambda: check_timeout(HALF_AN_HOUR),
    ],
)
def test_an_option_in_seconds_says_how_many_a_timedelta_has(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"a number of seconds, not .*timedelta\(seconds=1800\); write 1800\.0$"):
        make()


def test_the_path_of_a_request_may_be_text() -> None:
    assert OnRequest(file="save-now").file == Path.cwd() / "save-now"  # type: ignore[arg-type]


def test_a_policy_of_another_package_is_refused_because_no_loop_asks_it() -> None:
    with pytest.raises(TypeError, match="Mine cannot be a SavePolicy"):
        type("Mine", (SavePolicy,), {"__module__": "users_code"})


class TestWish:
    def test_a_save_that_storage_gets_grants_both(self) -> None:
        held, durable = Wish("held", memory_only=True), Wish("durable")
        assert stronger(held, durable) == stronger(durable, held) == durable
        assert stronger(None, held) == stronger(held, None) == held
        assert stronger(durable, Wish("other")) == durable
