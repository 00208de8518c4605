"""Listeners hear events in their order, in a thread of their own, and never disturb training."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import HoldfastError
from holdfast.checkpointer import relay as relay_module
from holdfast.checkpointer import step_times
from holdfast.checkpointer.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    Event,
    EventsDropped,
    EventSource,
    FirstStepEnded,
    IntervalChosen,
    RestoreFailed,
    RestoreReturned,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SavePlaced,
    SaveReturned,
    SaveSealed,
    SaveStaged,
    StateRestored,
    StepsTimed,
)
from holdfast.checkpointer.relay import Relay

SOURCE = EventSource("runs/a", 0, 1, "node", 1)


class Recorder:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sources: list[EventSource] = []
        self.threads: set[int] = set()

    def hear(self, event: Event, source: EventSource) -> None:
        self.events.append(event)
        self.sources.append(source)
        self.threads.add(threading.get_ident())

    def of(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kinds)]


class Failing:
    """A listener that raises."""

    def hear(self, event: Event, source: EventSource) -> None:
        raise OSError("the disk of the log is full")


def state() -> dict[str, object]:
    return {"w": torch.ones(4)}


def test_a_listener_hears_a_save_to_storage_from_its_call_to_its_return(run: str) -> None:
    heard = Recorder()
    with holdfast.Checkpointer(run, state(), memory=None, listeners=[heard]) as checkpointer:
        checkpointer.save(3)
    saving = [SaveBegun, SavePlaced, SaveStaged, SaveCommitted, SaveReturned]
    assert [type(event) for event in heard.events] == [CheckpointerOpened, *saving, CheckpointerClosed]
    committed = heard.events[4]
    assert isinstance(committed, SaveCommitted)
    assert {"write", "commit"} <= committed.seconds.keys()
    assert set(heard.sources) == {heard.sources[0]}
    assert heard.sources[0][:3] == (run, 0, 1)


def test_a_listener_hears_a_save_into_memory_until_it_is_durable(run: str, memory: holdfast.Memory) -> None:
    heard = Recorder()
    with holdfast.Checkpointer(run, state(), memory=memory, listeners=[heard]) as checkpointer:
        handle = checkpointer.save(3)
        handle.durable.wait(60)
    kinds = [type(event) for event in heard.events]
    assert kinds[:2] == [CheckpointerOpened, SaveBegun]
    assert {SavePlaced, SaveStaged, SaveReturned, SaveCommitted} <= set(kinds)
    (returned,) = heard.of(SaveReturned)
    assert isinstance(returned, SaveReturned)
    assert returned.blocked_s == handle.blocked_s > 0


def test_moments_rise_and_listeners_are_called_in_another_thread(run: str) -> None:
    heard = Recorder()
    before_s = time.time()
    with holdfast.Checkpointer(run, state(), memory=None, listeners=[heard]) as checkpointer:
        checkpointer.save(3)
        checkpointer.save(4)
    clocks = [event.at.clock_s for event in heard.events]
    assert clocks == sorted(clocks)
    assert all(before_s <= event.at.unix_s <= time.time() for event in heard.events)
    assert heard.threads
    assert threading.get_ident() not in heard.threads


def test_a_listener_hears_of_a_restore(run: str) -> None:
    with holdfast.Checkpointer(run, state(), memory=None) as checkpointer:
        checkpointer.save(3)
    heard = Recorder()
    with holdfast.Checkpointer(run, state(), memory=None, listeners=[heard]) as checkpointer:
        checkpointer.restore()
    (restored,) = heard.of(StateRestored)
    assert isinstance(restored, StateRestored)
    assert restored.report.step == 3


def test_a_listener_hears_of_a_restore_that_fails(run: str) -> None:
    with holdfast.Checkpointer(run, state(), memory=None) as checkpointer:
        checkpointer.save(3)
    heard = Recorder()
    other = {"w": torch.ones(5)}
    checkpointer = holdfast.Checkpointer(run, other, memory=None, listeners=[heard])
    with pytest.raises(holdfast.IncompatibleError) as caught:
        checkpointer.restore()
    checkpointer.close()
    (failed,) = heard.of(StateRestored, RestoreReturned, RestoreFailed)
    assert isinstance(failed, RestoreFailed)
    assert failed.error is caught.value
    assert failed.took_s > 0


def test_a_listener_hears_the_times_of_steps_with_and_without_a_save(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_LEAST_S", 20.0)  # on a slow machine, too, only saves and the end cause an event
    heard = Recorder()
    policy = holdfast.EverySteps(5)
    with holdfast.Checkpointer(run, state(), memory=None, save=policy, listeners=[heard]) as checkpointer:
        for step in range(10):
            time.sleep(0.002)
            checkpointer.step(step)
    first, second = heard.of(StepsTimed)
    assert isinstance(first, StepsTimed)
    assert isinstance(second, StepsTimed)
    assert (first.step, first.num_quiet, first.num_saving) == (5, 5, 0)  # nothing says when step 0 began
    assert (second.step, second.num_quiet, second.num_saving) == (9, 4, 0)
    assert 0.002 <= first.quiet_s < 1


def test_a_listener_hears_of_the_job_from_the_start_of_its_process_to_its_end(run: str) -> None:
    heard = Recorder()
    policy = holdfast.EverySteps(100)
    with holdfast.Checkpointer(run, state(), memory=None, save=policy, listeners=[heard]) as checkpointer:
        for step in checkpointer.steps(3):
            checkpointer.step(step)
    kinds = (CheckpointerOpened, StateRestored, RestoreReturned, FirstStepEnded, StepsTimed, CheckpointerClosed)
    opened, restored, returned, first, timed, closed = heard.of(*kinds)
    assert isinstance(opened, CheckpointerOpened)
    assert isinstance(returned, RestoreReturned)
    assert isinstance(timed, StepsTimed)
    assert isinstance(closed, CheckpointerClosed)
    assert opened.age_s > 0
    assert 0 < returned.took_s <= returned.at.clock_s - opened.at.clock_s
    assert first == FirstStepEnded(0)
    assert (timed.step, timed.num_quiet) == (2, 2)
    assert timed.quiet_total_s == pytest.approx(2 * timed.quiet_s)
    assert not closed.is_early
    assert [type(event) for event in heard.events][-1] is CheckpointerClosed
    assert isinstance(restored, StateRestored)


def test_an_exception_ends_training_early(run: str) -> None:
    heard = Recorder()
    checkpointer = holdfast.Checkpointer(run, state(), memory=None, listeners=[heard])
    checkpointer.restore()
    error = ZeroDivisionError()
    checkpointer.__exit__(type(error), error, None)
    closed = heard.events[-1]
    assert isinstance(closed, CheckpointerClosed)
    assert closed.is_early


def test_steps_after_a_restore_in_the_loop_are_counted_anew(run: str) -> None:
    heard = Recorder()
    policy = holdfast.EverySteps(2)
    with holdfast.Checkpointer(run, state(), memory=None, save=policy, listeners=[heard]) as checkpointer:
        for step in range(4):
            checkpointer.step(step)
        checkpointer.restore(at="step=2")
        for step in range(3, 6):
            checkpointer.step(step)
    assert heard.of(FirstStepEnded) == [FirstStepEnded(0), FirstStepEnded(3)]
    timed = [(event.step, event.num_quiet) for event in heard.events if isinstance(event, StepsTimed)]
    assert timed == [(2, 2), (3, 1), (4, 1), (5, 1)]


def test_the_first_rank_tells_of_steps_often_so_that_little_is_unknown_after_a_kill(run: str) -> None:
    heard = Recorder()
    policy = holdfast.EverySteps(10**6)
    with holdfast.Checkpointer(run, state(), memory=None, save=policy, listeners=[heard]) as checkpointer:
        begun_s = time.monotonic()
        for step in range(60):
            checkpointer.step(step)
            time.sleep(0.01)
        told = [event.step for event in heard.events if isinstance(event, StepsTimed)]
    assert 3 <= len(told) <= 1 + (time.monotonic() - begun_s) / 0.1


def test_listeners_hear_the_choices_of_the_policy_auto(run: str) -> None:
    heard = Recorder()
    policy = holdfast.Auto(mttf_s=3600.0)
    with holdfast.Checkpointer(run, state(), memory=None, save=policy, listeners=[heard]) as checkpointer:
        for step in checkpointer.steps(22):
            checkpointer.step(step)
    chosen = heard.of(IntervalChosen)
    assert chosen
    (first, *_) = chosen
    assert isinstance(first, IntervalChosen)
    assert first.mttf_s == 3600.0
    assert 0 < first.wasted < 1
    assert first.interval_s > 0


def test_the_step_after_a_save_into_memory_counts_as_one_with_a_save(run: str, memory: holdfast.Memory) -> None:
    heard = Recorder()
    policy = holdfast.EverySteps(2)
    with holdfast.Checkpointer(run, state(), memory=memory, save=policy, listeners=[heard]) as checkpointer:
        checkpointer.restore()  # this starts the keeper
        for step in range(4):
            checkpointer.step(step)
    counts = [(event.num_quiet, event.num_saving) for event in heard.events if isinstance(event, StepsTimed)]
    assert counts == [(2, 0), (0, 1)]


def test_a_save_that_fails_is_heard_of_too(run: str) -> None:
    heard = Recorder()
    checkpointer = holdfast.Checkpointer(run, {"w": threading.Lock()}, memory=None, listeners=[heard])
    with pytest.raises(holdfast.StateError):
        checkpointer.save(3)
    checkpointer.close()
    (failed,) = heard.of(SaveFailed)
    assert isinstance(failed, SaveFailed)
    assert failed.is_raised


def test_a_listener_that_raises_disturbs_neither_saves_nor_other_listeners(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Recorder()
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        holdfast.Checkpointer(run, state(), memory=None, listeners=[Failing(), heard]) as checkpointer,
    ):
        checkpointer.save(3)
    assert len(heard.of(SaveCommitted)) == 1
    (line,) = [record for record in caplog.records if "failed to hear" in record.message]
    assert "CheckpointerOpened" in line.message


def test_a_listener_that_saves_is_refused_and_training_goes_on(run: str) -> None:
    """Its save took the turn of the thread that trains, whose next save then ended training (`config.threads`)."""

    class Saving:
        def __init__(self) -> None:
            self.codes: list[str] = []
            self.loaded: list[int | None] = []

        def hear(self, event: Event, source: EventSource) -> None:
            if isinstance(event, SaveCommitted):
                for call in (lambda: own.save(9), own.restore, own.wait, own.close):
                    try:
                        call()
                    except HoldfastError as error:
                        self.codes.append(error.code)
                self.loaded.append(holdfast.load(f"{run}@step={event.step}", state()).step)

    listener = Saving()
    with holdfast.Checkpointer(run, state(), memory=None, listeners=[listener]) as own:
        for step in range(3):
            own.save(step)
    assert listener.codes == ["config.nested"] * 12
    assert listener.loaded == [0, 1, 2]
    assert [checkpoint.step for checkpoint in holdfast.ls(run)] == [2, 1, 0]


def test_a_slow_listener_loses_events_and_hears_how_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_module, "_MOST", 3)
    go_on, is_busy = threading.Event(), threading.Event()
    heard = Recorder()

    class Slow:
        def hear(self, event: Event, source: EventSource) -> None:
            is_busy.set()
            go_on.wait(30)

    relay = Relay([Slow(), heard], lambda: SOURCE)
    relay.hear(SaveSealed(0))
    is_busy.wait(30)
    for step in range(1, 10):
        relay.hear(SaveSealed(step))
    go_on.set()
    relay.close(30)
    assert heard.events == [*(SaveSealed(step) for step in range(4)), EventsDropped(6)]
    assert "6 events were dropped" in caplog.text


def test_the_end_of_a_checkpointer_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    forever = threading.Event()

    class Stuck:
        def hear(self, event: Event, source: EventSource) -> None:
            forever.wait(30)

    relay = Relay([Stuck()], lambda: SOURCE)
    relay.hear(SaveSealed(0))
    begun_s = time.monotonic()
    relay.close(0.05)
    assert time.monotonic() - begun_s < 5
    assert "have not heard all" in caplog.text
    forever.set()


def test_a_listener_must_be_able_to_hear(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has a method hear"):
        holdfast.Checkpointer(tmp_path, {}, listeners=[print])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="listeners is a list"):
        holdfast.Checkpointer(tmp_path, {}, listeners=Recorder())  # type: ignore[arg-type]


class HearsItself:
    """A class that is a listener itself."""

    @classmethod
    def hear(cls, event: Event, source: EventSource) -> None:
        """Hear nothing."""


def test_a_class_of_listeners_is_refused_and_does_not_just_hear_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"listeners has the class Recorder, .*; write Recorder\(\.\.\.\)"):
        holdfast.Checkpointer(tmp_path, {}, listeners=[Recorder])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"; write listeners=\[Recorder\(\.\.\.\)\]"):
        holdfast.Checkpointer(tmp_path, {}, listeners=Recorder)  # type: ignore[arg-type]
    holdfast.Checkpointer(tmp_path, {}, listeners=[HearsItself]).close()
