"""`OnPreemption` beyond a signal in a step: Ctrl-C, notices, deadlines, evaluations, and the exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist

from holdfast import Checkpointer, EverySteps, Memory, OnPreemption
from holdfast.checkpointer.own_resume import OwnResume
from tests.checkpointer.test_policies import committed
from tests.support.keepers import end_keepers, keepers
from tests.support.models import start_new_job
from tests.support.nursery import run_script
from tests.support.ranks import run_ranks


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(100)}


class TestCtrlC:
    def test_the_first_one_saves_and_ends_the_loop(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGINT,))) as own:
            for step in own.steps(100):
                if step == 3:
                    signal.raise_signal(signal.SIGINT)
                own.step(step)
        assert committed(run) == [3]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def test_the_second_one_interrupts(self, run: str, state: dict[str, object]) -> None:
        own = Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGINT,)))
        own.step(0)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        own.close()


class TestNotice:
    @pytest.mark.parametrize("answer", [SystemExit(), torch.ones(2)])
    def test_a_hook_that_answers_with_nonsense_is_asked_again(
        self, run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture, answer: object
    ) -> None:
        answers = iter([answer, "now"])

        def ask() -> str | None:
            found = next(answers)
            if isinstance(found, SystemExit):
                raise found
            return found  # type: ignore[return-value]

        with Checkpointer(run, state, memory=None, save=OnPreemption((), notice=ask, poll_s=0.01)) as own:
            for step in own.steps(10_000):
                time.sleep(0.005)
                own.step(step)
            assert own.preempted
        assert "the notice hook of OnPreemption failed" in caplog.text

    def test_a_text_from_the_hook_saves_and_ends_the_loop(
        self, run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[str] = []
        policy = OnPreemption((), notice=lambda: told[0] if told else None, poll_s=0.01)
        with caplog.at_level(logging.INFO), Checkpointer(run, state, memory=None, save=policy) as own:
            for step in own.steps(10_000):
                if step == 3:
                    told.append("the cloud takes this machine in 30 s")
                time.sleep(0.005)
                own.step(step)
            assert own.preempted
        assert 3 <= step < 9_999
        assert "preempted by a notice: the cloud takes this machine in 30 s" in caplog.text

    def test_a_hook_that_raises_is_told_once_and_asked_again(
        self, run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = iter([OSError("no route"), OSError("no route"), None, "now"])

        def ask() -> str | None:
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer

        with Checkpointer(run, state, memory=None, save=OnPreemption((), notice=ask, poll_s=0.01)) as own:
            for step in own.steps(10_000):
                time.sleep(0.005)
                own.step(step)
            assert own.preempted
        assert caplog.text.count("the notice hook of OnPreemption failed") == 1

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"notice": "soon"}, "notice is a function"),
            ({"deadline_s": 0}, "deadline_s"),
            ({"poll_s": -1}, "poll_s"),
        ],
    )
    def test_nonsense_is_refused(self, options: dict[str, object], text: str) -> None:
        with pytest.raises((TypeError, ValueError), match=text):
            OnPreemption(**options)  # type: ignore[arg-type]

    def test_a_policy_without_signals_and_notice_is_refused(self) -> None:
        with pytest.raises(TypeError, match="signums is a tuple of signals"):
            OnPreemption(())


def test_the_end_waits_no_longer_than_the_machine_exists(
    run: str,
    state: dict[str, object],
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list[float]()
    monkeypatch.setattr(OwnResume, "end", lambda _, left_s: left.append(left_s))
    own = Checkpointer(run, state, memory=memory, save=EverySteps(1) | OnPreemption(deadline_s=1.0))
    own.step(0)
    handle = own.step(1)
    assert handle is not None
    handle.durable.wait(20.0)
    for pid in keepers(memory.node_dir):
        os.kill(pid, signal.SIGSTOP)  # nothing becomes durable from now on
    os.kill(os.getpid(), signal.SIGTERM)
    begun_s = time.monotonic()
    own.step(2)
    assert own.preempted
    own.close()
    assert 0.8 <= time.monotonic() - begun_s < 15.0
    assert "the machine is taken away, and not all saves are durable" in caplog.text
    assert committed(run) == [1]
    assert len(left) == 1
    assert left[0] <= 0.0  # a deletion waited for storage as long as all saves together


def test_a_deadline_counts_from_the_notice_and_not_from_the_end_of_a_long_step(
    run: str, state: dict[str, object]
) -> None:
    policy = OnPreemption((signal.SIGUSR1,), deadline_s=60.0)
    with Checkpointer(run, state, memory=None, save=policy) as own:
        own.step(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        own.step(1)
        assert own._loop is not None
        assert own._loop.preemption.left_s <= 59.5


def test_a_step_that_takes_longer_than_all_limits_is_saved(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGUSR1,))) as own:
        own.step(0)
        assert own._loop is not None
        own._loop.preemption.patience_s = 0.1
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        own.step(1)
    assert own.exit_code == 75
    assert committed(run) == [1]


def ranks_of_which_one_makes_a_long_step(run: str) -> list[int]:
    start_new_job()
    own = Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=OnPreemption((signal.SIGUSR2,)), timeout_s=10.0)
    for step in own.steps(10**6):
        time.sleep(0.02)
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
            (note,) = own._signals.values()
            assert note.noted_s is not None
            note.noted_s -= 1000.0  # as if the step had taken so long
        own.step(step)
    own.close()
    return [own.exit_code, step]


def test_ranks_that_answer_save_after_a_step_that_took_longer_than_all_limits(run: str) -> None:
    """The rank that had got the signal ended alone, and saved nothing."""
    first, second = run_ranks(2, ranks_of_which_one_makes_a_long_step, run)
    assert first == second
    assert first[0] == 75
    assert committed(run) == [first[1]]


def test_a_handler_that_other_code_sets_later_is_told_of(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """A preemption was lost without a word."""
    with Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGUSR1,))) as own:
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        own.step(0)
        own.step(1)
        signal.signal(signal.SIGUSR1, before)
    assert caplog.text.count("other code has set a handler of SIGUSR1 after this Checkpointer was made") == 1


def test_the_loop_of_another_run_in_the_same_process_is_no_other_code(
    tmp_path: Path, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Each but the newest `Checkpointer` warned that it is deaf, though the handlers of the others call its own."""
    policy = OnPreemption((signal.SIGUSR1,))
    first, closed, last = (Checkpointer(tmp_path / name, state, memory=None, save=policy) for name in "abc")
    for each in (first, closed, last):
        each.step(0)
    closed.close()
    with first, last:
        os.kill(os.getpid(), signal.SIGUSR1)
        for each in (first, last):
            each.step(1)
            assert each.preempted
    assert "other code has set a handler" not in caplog.text


def test_the_notice_of_a_preemption_that_saves_is_refused(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """It saved in the middle of a step, in a thread of its own."""
    asked = Event()

    def notice() -> None:
        try:
            own.save(7)
        finally:
            asked.set()

    with Checkpointer(run, state, memory=None, save=OnPreemption((), notice=notice)) as own:
        own.step(0)
        assert asked.wait(20)
    assert "config.nested" in caplog.text
    assert not Path(run).exists()


SCRIPT = """
import os, signal, sys
import torch, holdfast
state = {"w": torch.zeros(10)}
with holdfast.Checkpointer(sys.argv[1], state, memory=None, save=holdfast.OnPreemption((signal.SIGUSR1,))) as own:
    for step in own.steps(5):
        if step == 3 and sys.argv[2] != "whole":
            os.kill(os.getpid(), signal.SIGUSR1)
        own.step(step)
if sys.argv[2] == "told again":
    os.kill(os.getpid(), signal.SIGUSR1)
    if len(sys.argv) > 3:  # much later
        list(own._signals.values())[0].until_s = 0.0
        os.kill(os.getpid(), signal.SIGUSR1)


class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), signum=signal.SIGUSR1):
        kill(process, signum)


if sys.argv[2] == "told last":
    last = Last()
sys.exit(own.exit_code)
"""


@pytest.mark.parametrize(("how", "code"), [("preempted", 75), ("whole", 0)])
def test_the_exit_code_tells_the_scheduler_whether_to_start_the_job_again(run: str, how: str, code: int) -> None:
    ended = run_script(SCRIPT, run, how)
    assert ended.status == code, ended.err


def test_a_signal_that_comes_while_a_preempted_job_leaves_does_not_change_its_exit_code(run: str) -> None:
    """The launcher or the scheduler sends one to each rank that is left; the job looked like a crash."""
    assert run_script(SCRIPT, run, "told again").status == 75
    assert run_script(SCRIPT, run, "told again", "later").status == -signal.SIGUSR1


def test_a_signal_that_comes_while_the_interpreter_ends_does_not_change_the_exit_code(run: str) -> None:
    """Python gives signals back to the system before it deletes modules, which takes seconds under load: the launcher's
    next signal made a preempted rank end with -15."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, run, "told last"], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 75, ended.stderr


@pytest.mark.parametrize(("signalled_in", "code"), [(4, 0), (3, 75)])
def test_a_signal_in_the_very_last_step_leaves_nothing_to_put_back_into_the_queue(
    run: str, state: dict[str, object], signalled_in: int, code: int
) -> None:
    with Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGUSR1,), deadline_s=60.0)) as own:
        for step in own.steps(5):
            if step == signalled_in:
                os.kill(os.getpid(), signal.SIGUSR1)
            own.step(step)
        assert own._loop is not None
        assert own._loop.preemption.left_s <= 60.0  # the end waits no longer than the machine exists
        assert own.preempted is (code == 75)
    assert own.exit_code == code
    assert committed(run) == [signalled_in]
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "another signal would end the process"


class TestEvaluation:
    def test_a_signal_breaks_it_off_and_the_step_is_saved(self, run: str, state: dict[str, object]) -> None:
        parts = []
        with Checkpointer(run, state, memory=None, save=EverySteps(100) | OnPreemption()) as own:
            for step in own.steps(100):
                if step == 4:
                    for part in own.interruptible(range(1000)):
                        parts.append(part)
                        if part == 7:
                            os.kill(os.getpid(), signal.SIGTERM)
                own.step(step)
        assert parts == list(range(8))
        assert committed(run) == [4]

    def test_one_after_the_last_step_ends_as_preempted_too(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=OnPreemption()) as own:
            for step in own.steps(3):
                own.step(step)
            for part in own.interruptible(range(10)):
                if part == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert part == 3
        assert own.exit_code == 75

    def test_one_after_step_lets_one_more_step_end_and_be_saved(self, run: str, state: dict[str, object]) -> None:
        trained = []
        with Checkpointer(run, state, memory=None, save=OnPreemption()) as own:
            for step in own.steps(100):
                trained.append(step)
                own.step(step)
                for _ in own.interruptible(range(3)):
                    if step == 4:
                        os.kill(os.getpid(), signal.SIGTERM)
        assert trained == [0, 1, 2, 3, 4, 5]
        assert committed(run) == [5]

    def test_without_one_it_runs_to_its_end(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=OnPreemption()) as own:
            assert list(own.interruptible("abc")) == ["a", "b", "c"]
            assert list(own.interruptible([])) == []


def evaluations_of_ranks(run: str, node_dir: str) -> list[int]:
    """Two evaluations of three ranks, of which one gets a signal in the second: how many parts each rank has done, and
    the step that it saved."""
    start_new_job()
    num_parts = 0
    memory = Memory(node_dir=Path(node_dir))
    policy = OnPreemption((signal.SIGUSR2,))
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=memory, save=policy) as own:
        for step in own.steps(10):
            if step in (2, 5):
                for part in own.interruptible(range(200)):
                    num_parts += 1
                    time.sleep(0.005 + 0.001 * dist.get_rank())
                    if step == 5 and part == 20 and dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGUSR2)
            own.step(step)
        assert own.preempted
    return [num_parts, step]


def test_all_ranks_break_an_evaluation_off_after_the_same_part(run: str, node_dir: Path) -> None:
    first, second, third = run_ranks(3, evaluations_of_ranks, run, str(node_dir))
    assert first == second == third
    assert 220 < first[0] < 400
    assert first[1] == 5
    assert committed(run) == [5]
    end_keepers(node_dir)


def ranks_of_which_one_is_stuck(run: str) -> list[object]:
    start_new_job()
    policy = EverySteps(10**6) | OnPreemption((signal.SIGUSR2,), deadline_s=2.0)
    own = Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=policy)
    steps = own.steps(10**6)
    own.step(next(steps))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()  # stuck until the other rank has left its loop
        own._give_up()
        return []
    os.kill(os.getpid(), signal.SIGUSR2)
    begun_s = time.monotonic()
    for step in steps:
        time.sleep(0.02)
        own.step(step)
    own.close()
    dist.barrier()
    return [own.preempted, own.exit_code, time.monotonic() - begun_s < 30]


def test_a_rank_whose_partner_is_stuck_ends_alone_at_the_deadline(run: str) -> None:
    """It trained on for ever, and ignored every further signal."""
    assert run_ranks(2, ranks_of_which_one_is_stuck, run)[1] == [True, 75, True]


def ranks_with_a_deadline(run: str, node_dir: str) -> list[object]:
    """Two ranks, of which one knows the deadline first, in a long step; nothing becomes durable any more."""
    start_new_job()
    memory = Memory(node_dir=Path(node_dir))
    policy = EverySteps(5) | OnPreemption((signal.SIGUSR2,), deadline_s=4.0)
    own = Checkpointer(run, {"w": torch.zeros(5)}, memory=memory, save=policy, timeout_s=120.0)
    for step in own.steps(100_000):
        time.sleep(0.02)
        if step == 12 and dist.get_rank() == 1:
            for pid in keepers(Path(node_dir)):
                os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(1.5)
        own.step(step)
    assert own._loop is not None
    assert own._loop.preemption.left_s <= 2.5  # the deadline counts from the signal, on both ranks
    own.close()
    return [step, own.preempted, own.exit_code]


@pytest.mark.slow
def test_ranks_with_a_deadline_end_together_although_nothing_becomes_durable(run: str, node_dir: Path) -> None:
    """One rank gave up a save that the other one waited for, and both raised."""
    first, second = run_ranks(2, ranks_with_a_deadline, run, str(node_dir))
    assert first == second
    assert first[1:] == [True, 75]
    end_keepers(node_dir)
