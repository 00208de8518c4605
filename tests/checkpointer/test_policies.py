"""`Checkpointer.step` and `steps`: a loop saves when its policy says so, on all ranks after the same steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, EveryTime, Memory, OnMetric, OnPreemption, OnRequest
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import run_script, start, until
from tests.support.rank_worker import HOST, environment_of
from tests.support.ranks import run_ranks


def committed(run: str) -> list[int]:
    """The steps of all commits, in order."""
    history = Run.open(open_store(location_of(run)))
    return [history.commit(place).step for place in sorted(history.places(), key=_order)]


def _order(place: Place) -> tuple[int, int]:
    return place.epoch, place.seq


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(100), "progress": {"samples": 0}}


class Asking:
    """A part of a state that asks for a save, once, while another one is under way."""

    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, object]:
        ask, self.ask = self.ask, None
        if ask is not None:
            ask()
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing to load."""


def wait_for(note: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    """Wait until `note` returns something."""
    end_s = time.monotonic() + timeout_s
    while not note():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class TestStep:
    def test_it_saves_after_the_steps_of_the_policy_alone(
        self, run: str, state: dict[str, object], memory: Memory
    ) -> None:
        with Checkpointer(run, state, memory=memory, save=EverySteps(4) | EverySteps(6)) as checkpointer:
            handles = {step: checkpointer.step(step) for step in range(14)}
        assert [step for step, handle in handles.items() if handle] == [4, 6, 8, 12]
        assert committed(run) == [4, 6, 8, 12]

    def test_metrics_are_read_only_where_they_are_needed(self, run: str, state: dict[str, object]) -> None:
        class OnDevice:
            num_reads = 0

            def __float__(self) -> float:
                OnDevice.num_reads += 1
                return 0.5

        with Checkpointer(run, state, memory=None, save=EverySteps(5)) as checkpointer:
            for step in range(11):
                checkpointer.step(step, metrics={"loss": OnDevice()})
        assert OnDevice.num_reads == 2
        history = Run.open(open_store(location_of(run)))
        assert [history.commit(place).metrics for place in history.places()] == [{"loss": 0.5}] * 2

    def test_a_save_follows_a_better_metric(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=OnMetric("accuracy", mode="max")) as checkpointer:
            for step, accuracy in enumerate([0.1, 0.3, 0.2, 0.4]):
                checkpointer.step(step, metrics={"accuracy": accuracy})
        assert committed(run) == [0, 1, 3]

    def test_a_save_follows_when_the_time_has_come(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=EveryTime(3600)) as checkpointer:
            checkpointer.step(0)
        with Checkpointer(run, state, memory=None, save=EveryTime(0.2)) as checkpointer:
            checkpointer.step(0)
            time.sleep(0.25)
            assert checkpointer.step(1) is not None
        assert committed(run) == [1]

    def test_a_skipped_save_does_not_grant_a_wish(
        self, run: str, state: dict[str, object], memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Checkpointer(run, state, memory=memory, save=OnMetric("loss")) as checkpointer:

            def skipped(step: int, *, metrics: object = None, memory_only: bool = False) -> holdfast.Handle:
                handle = holdfast.Handle(step)
                handle.skipped = True
                return handle

            with monkeypatch.context() as patch:
                patch.setattr(checkpointer, "save", skipped)
                assert checkpointer.step(0, metrics={"loss": 1.0}) is not None
            handles = [checkpointer.step(step, metrics={"loss": 1.0}) for step in (1, 2)]
        assert [handle is not None for handle in handles] == [True, False]

    def test_a_save_beside_it_grants_the_wishes_too(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=EveryTime(0.3)) as checkpointer:
            checkpointer.step(0)
            time.sleep(0.35)
            checkpointer.save(1)
            assert checkpointer.step(1) is None

    @pytest.mark.parametrize("wrong", [3, 5, 2])
    def test_steps_that_do_not_follow_each_other_are_refused(
        self, run: str, state: dict[str, object], wrong: int
    ) -> None:
        checkpointer = Checkpointer(run, state, memory=None, save=EverySteps(100))
        for step in range(4):
            checkpointer.step(step)
        with pytest.raises(
            ConfigurationError, match=rf"step\({wrong}\) was called where step\(4\) comes next"
        ) as error:
            checkpointer.step(wrong)
        assert error.value.code == "config.step_order"
        checkpointer.step(4)

    def test_a_loop_that_begins_anew_after_a_restore_is_refused(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 7)
        checkpointer = Checkpointer(run, state, memory=None, save=EverySteps(100))
        checkpointer.restore()
        with pytest.raises(ConfigurationError, match=r"step\(0\) was called where step\(8\) comes next"):
            checkpointer.step(0)

    def test_a_step_that_is_no_number_is_refused(self, run: str, state: dict[str, object]) -> None:
        checkpointer = Checkpointer(run, state, memory=None, save=EverySteps(2))
        for wrong in ("1", 1.5, -1):
            with pytest.raises(ValueError, match="step must be a whole number"):
                checkpointer.step(wrong)  # type: ignore[arg-type]

    def test_a_checkpointer_without_a_policy_refuses_it(self, run: str, state: dict[str, object]) -> None:
        with pytest.raises(ConfigurationError, match="without a policy") as error:
            Checkpointer(run, state, memory=None).step(0)
        assert error.value.code == "config.no_policy"

    def test_a_policy_that_is_none_is_refused(self, run: str, state: dict[str, object]) -> None:
        with pytest.raises(TypeError, match=r"save must be a policy, such as holdfast.EverySteps\(1000\), .*not 100$"):
            Checkpointer(run, state, save=100)  # type: ignore[arg-type]

    @pytest.mark.parametrize("given", [[EverySteps(5), OnRequest()], (EverySteps(5), OnRequest())])
    def test_a_list_of_policies_is_told_how_they_are_joined(
        self, run: str, state: dict[str, object], given: Any
    ) -> None:
        hint = r"; write save=EverySteps\(num_steps=5, memory_only=False\) \| OnRequest\(.*\)$"
        with pytest.raises(TypeError, match=hint):
            Checkpointer(run, state, save=given)
        for no_policies in ([], [5], [EverySteps(5), 5]):
            with pytest.raises(TypeError, match=r"joined by \|, not") as caught:
                Checkpointer(run, state, save=no_policies)  # type: ignore[arg-type]
            assert "write save=" not in str(caught.value)

    def test_two_loops_on_one_run_are_refused_until_the_first_has_ended(
        self, run: str, state: dict[str, object]
    ) -> None:
        first = Checkpointer(run, state, memory=None, save=EverySteps(2))
        second = Checkpointer(run, state, memory=None, save=EverySteps(3))
        first.step(0)
        with pytest.raises(ConfigurationError, match="two Checkpointers of this process") as error:
            second.step(0)
        assert error.value.code == "config.two_loops"
        first.close()
        second.step(0)

    def test_a_closed_checkpointer_refuses_it(self, run: str, state: dict[str, object]) -> None:
        checkpointer = Checkpointer(run, state, memory=None, save=EverySteps(2))
        checkpointer.step(0)
        checkpointer.close()
        with pytest.raises(ConfigurationError, match="closed Checkpointer"):
            checkpointer.step(1)


class TestSteps:
    def test_a_loop_goes_on_where_it_ended_and_saves_its_last_step(
        self, run: str, state: dict[str, object], memory: Memory
    ) -> None:
        seen = []
        for total in (5, 12):
            start_new_job()
            with Checkpointer(run, state, memory=memory, save=EverySteps(3)) as checkpointer:
                for step in checkpointer.steps(total):
                    seen.append(step)
                    state["progress"]["samples"] += 1  # type: ignore[index]
                    checkpointer.step(step)
        assert seen == list(range(12))
        assert state["progress"] == {"samples": 12}
        assert committed(run) == [3, 4, 6, 9, 11]

    def test_a_finished_loop_has_no_steps(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 4)
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            assert list(checkpointer.steps(5)) == []

    def test_a_second_loop_goes_on_where_the_first_one_ended(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=EverySteps(100)) as checkpointer:
            for step in checkpointer.steps(3):
                checkpointer.step(step)
            for step in checkpointer.steps(8):
                checkpointer.step(step)
                if step == 5:
                    break
            assert [checkpointer.step(step) is not None for step in checkpointer.steps(8)] == [False, True]
        assert committed(run) == [2, 7]

    def test_it_restores_once(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 4)
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            assert checkpointer.restore().next_step == 5
            state["progress"] = {"samples": 77}
            assert next(iter(checkpointer.steps(9))) == 5
        assert state["progress"] == {"samples": 77}

    def test_it_refuses_to_restore_over_a_step(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 4)
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            checkpointer.step(5)
            state["progress"] = {"samples": 77}
            with pytest.raises(ConfigurationError, match=r"step\(5\) was called before steps\(\) began") as error:
                next(iter(checkpointer.steps(9)))
            assert error.value.code == "config.step_order"
        assert state["progress"] == {"samples": 77}

    def test_a_step_that_was_not_recorded_is_told(self, run: str, state: dict[str, object]) -> None:
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            steps = iter(checkpointer.steps(9))
            next(steps)
            with pytest.raises(ConfigurationError, match="step 0 of the loop ended without a call of step") as error:
                next(steps)
            assert error.value.code == "config.step_missing"

    def test_a_step_that_was_not_recorded_is_told_after_a_restore_too(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 4)
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            steps = iter(checkpointer.steps(9))
            assert next(steps) == 5
            with pytest.raises(ConfigurationError, match="step 5 of the loop ended without a call of step"):
                next(steps)

    def test_a_loop_whose_body_restores_goes_on_from_there(self, run: str, state: dict[str, object]) -> None:
        seen = []
        with Checkpointer(run, state, memory=None, save=EverySteps(3)) as checkpointer:
            for step in checkpointer.steps(7):
                seen.append(step)
                if seen == [0, 1, 2, 3, 4, 5]:
                    checkpointer.restore()  # goes back to step 3
                    continue
                checkpointer.step(step)
        assert seen == [0, 1, 2, 3, 4, 5, 4, 5, 6]


class TestRequests:
    @pytest.fixture
    def before(self) -> Iterator[list[int]]:
        """A handler of SIGUSR1 that the script has set earlier, with the signals that it got."""
        got: list[int] = []

        def note(signum: int, _: FrameType | None) -> None:
            got.append(signum)

        earlier = signal.signal(signal.SIGUSR1, note)
        yield got
        signal.signal(signal.SIGUSR1, earlier)

    def test_a_signal_leads_to_one_save_and_reaches_the_earlier_handler(
        self, run: str, state: dict[str, object], before: list[int]
    ) -> None:
        with Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR1)) as checkpointer:
            for step in range(6):
                if step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                checkpointer.step(step)
        assert committed(run) == [3]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert before == [signal.SIGUSR1] * 2

    def test_a_forked_child_has_the_earlier_handler(
        self, run: str, state: dict[str, object], before: list[int]
    ) -> None:
        with Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR1)) as checkpointer:
            checkpointer.step(0)
            ours = signal.getsignal(signal.SIGUSR1)
            if (child := os.fork()) == 0:
                os._exit(0 if signal.getsignal(signal.SIGUSR1) is not ours else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert signal.getsignal(signal.SIGUSR1) is ours
        assert before == []

    def test_a_dropped_checkpointer_leaves_the_signal_to_the_earlier_handler(
        self, run: str, state: dict[str, object], before: list[int]
    ) -> None:
        checkpointer = Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR1))
        checkpointer.step(0)
        del checkpointer
        os.kill(os.getpid(), signal.SIGUSR1)
        assert before == [signal.SIGUSR1]

    @pytest.mark.parametrize("ends", ["close", "drop"])
    def test_the_end_of_an_older_checkpointer_leaves_the_signal_to_the_newer(
        self, tmp_path: Path, state: dict[str, object], ends: str
    ) -> None:
        policy = OnRequest(signum=signal.SIGUSR2)
        first: Checkpointer | None = Checkpointer(tmp_path / "a", state, memory=None, save=policy)
        with Checkpointer(tmp_path / "b", state, memory=None, save=policy) as second:
            second.step(0)
            if ends == "close" and first is not None:
                first.close()
            first = None
            os.kill(os.getpid(), signal.SIGUSR2)  # would end this process
            assert second.step(1) is not None
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    def test_a_signal_before_the_first_step_and_while_saves_become_durable_ends_nothing(
        self, run: str, state: dict[str, object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpointer = Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR2))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert checkpointer.step(0) is not None
        monkeypatch.setattr(checkpointer, "_wait", lambda _: os.kill(os.getpid(), signal.SIGUSR2))
        checkpointer.close()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL

    def test_a_request_that_cannot_be_deleted_does_not_hide_later_ones(
        self, run: str, state: dict[str, object], tmp_path: Path
    ) -> None:
        holdfast.save(run, state, 0)
        file = tmp_path / "save-now"
        with Checkpointer(run, state, memory=None, save=OnRequest(file=file, poll_s=0.02)) as checkpointer:
            (file / "in it").mkdir(parents=True)  # a folder cannot be removed as a file
            numbers = iter(range(checkpointer.restore().next_step, 10**6))
            wait_for(lambda: checkpointer.step(next(numbers)))
            holdfast.request_save(run)
            wait_for(lambda: checkpointer.step(next(numbers)))

    def test_a_process_asks_through_the_run(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 0)
        policy = OnRequest(poll_s=0.02)
        with Checkpointer(run, state, memory=None, save=policy) as checkpointer:
            checkpointer.restore()
            checkpointer.step(1)
            subprocess.run([sys.executable, "-m", "holdfast", "request-save", run], check=True, capture_output=True)
            numbers = iter(range(2, 10**6))
            wait_for(lambda: checkpointer.step(next(numbers)))
            time.sleep(0.1)
            asked = checkpointer.step(next(numbers))
        assert asked is None
        assert len(committed(run)) == 2
        assert list(Path(run, "requests").iterdir()) == []

    def test_a_file_asks(self, run: str, state: dict[str, object], tmp_path: Path) -> None:
        file = tmp_path / "save-now"
        with Checkpointer(run, state, memory=None, save=OnRequest(file=file, poll_s=0.02)) as checkpointer:
            numbers = iter(range(10**6))
            checkpointer.step(next(numbers))
            file.touch()
            wait_for(lambda: checkpointer.step(next(numbers)))
            wait_for(lambda: not file.exists())
            assert checkpointer.step(next(numbers)) is None
        assert len(committed(run)) == 1

    @pytest.mark.parametrize("how", ["signal", "run", "file", "file again"])
    def test_a_request_that_comes_while_a_save_is_under_way_is_not_lost(
        self, run: str, state: dict[str, object], tmp_path: Path, how: str
    ) -> None:
        """That save may hold the state before the request. It granted the request nevertheless."""
        file, state["asking"] = tmp_path / "save-now", (asking := Asking())

        def ask() -> None:
            if how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif how == "run":
                holdfast.request_save(run)
            else:
                file.touch()
            time.sleep(0.1)  # the first rank sees the request

        policy, saved = OnRequest(signum=signal.SIGUSR1, file=file, poll_s=0.02) | EverySteps(4), []
        with Checkpointer(run, state, memory=None, save=policy) as checkpointer:
            for step in range(10):
                if step == 6:
                    asking.ask = ask
                    if how == "file again":
                        ask()
                if checkpointer.step(step) is not None:
                    saved.append(step)
        assert saved == ([4, 6, 7, 8] if how == "file again" else [4, 8, 9])

    def test_a_request_outlives_a_job_that_does_not_serve_it(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 0)
        holdfast.request_save(run)
        start_new_job()
        with Checkpointer(run, state, memory=None, save=OnRequest(poll_s=0.02)) as checkpointer:
            numbers = iter(range(checkpointer.restore().next_step, 10**6))
            wait_for(lambda: checkpointer.step(next(numbers)))

    def test_a_run_that_does_not_exist_cannot_be_asked(self, run: str) -> None:
        with pytest.raises(holdfast.NotFoundError):
            holdfast.request_save(run)

    def test_a_checkpoint_cannot_be_asked(self, run: str, state: dict[str, object]) -> None:
        holdfast.save(run, state, 0)
        with pytest.raises(ConfigurationError, match="is one checkpoint"):
            holdfast.request_save(f"{run}@step=0")

    def test_a_signal_can_be_noted_only_from_the_main_thread(self, run: str, state: dict[str, object]) -> None:
        from threading import Thread

        errors: list[ConfigurationError] = []

        def call() -> None:
            try:
                Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR1))
            except ConfigurationError as error:
                errors.append(error)

        thread = Thread(target=call)
        thread.start()
        thread.join()
        assert [error.code for error in errors] == ["config.signal"]


def loop_of_ranks(run: str, node_dir: str, asks: int | None) -> list[int]:
    """Train 60 steps of 20 ms; the rank `asks` gets a signal at step 20. Returns the steps that were saved."""
    start_new_job()
    state = {"w": torch.full((50,), float(dist.get_rank()))}
    saved = []
    policy = EverySteps(50) | OnRequest(signum=signal.SIGUSR1, poll_s=5.0) | EveryTime(1000)
    with Checkpointer(run, {f"r{dist.get_rank()}": state}, memory=Memory(node_dir=Path(node_dir)), save=policy) as own:
        for step in own.steps(60):
            time.sleep(0.02)
            dist.barrier()
            if step == 20 and dist.get_rank() == asks:
                os.kill(os.getpid(), signal.SIGUSR1)
            if own.step(step) is not None:
                saved.append(step)
    return saved


@pytest.mark.parametrize("asks", [0, 2])
@pytest.mark.few(1)
def test_one_signal_on_one_rank_makes_all_ranks_save_after_one_step(run: str, node_dir: Path, asks: int) -> None:
    saved = run_ranks(3, loop_of_ranks, run, str(node_dir), asks)
    assert saved[0] == saved[1] == saved[2]
    (wanted,) = set(saved[0]) - {50, 59}
    assert 20 < wanted < 50
    assert committed(run) == saved[0]
    end_keepers(node_dir)


def loop_over_two_groups(run: str, port: int) -> list[int]:
    """One loop in whose middle all ranks make their process group again; then one of them wants a save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saved = []
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=OnRequest(signum=signal.SIGUSR1)) as own:
        for step in range(3000):
            time.sleep(0.01)
            if step == 20:
                dist.destroy_process_group()
                store = dist.TCPStore(HOST, port, is_master=False)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            if step == 40 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if own.step(step) is not None:
                saved.append(step)
            if saved and step == saved[0] + 20:  # all ranks have saved after the same step
                break
    return saved


def test_ranks_agree_again_after_they_have_made_their_process_group_again(run: str) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    first, second = run_ranks(2, loop_over_two_groups, run, store.port)
    assert first == second
    assert len(first) == 1


def loop_that_one_rank_leaves(run: str) -> list[float]:
    """Rank 0 ends its loop early; the times of rank 1's steps after a request."""
    start_new_job()
    times = []
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=OnRequest(signum=signal.SIGUSR1)) as own:
        for step in range(10 if dist.get_rank() == 0 else 60):
            begun_s = time.monotonic()
            time.sleep(0.01)
            if step == 40:
                os.kill(os.getpid(), signal.SIGUSR1)
            own.step(step)
            times.append(time.monotonic() - begun_s)
    return times


def test_a_rank_whose_peers_have_ended_their_loops_does_not_wait_for_them(run: str) -> None:
    _, times = run_ranks(2, loop_that_one_rank_leaves, run)
    assert max(times[40:]) < 5.0


def jump_forward(run: str) -> list[int]:
    """All ranks restore a later step while a step before it is agreed on; then one wants another save."""
    start_new_job()
    state = {"w": torch.zeros(5)}
    holdfast.save(run, state, 300)
    start_new_job()
    saved = []
    with Checkpointer(run, state, memory=None, save=OnRequest(signum=signal.SIGUSR1), takeover=True) as own:
        for step in range(21):
            time.sleep(0.02)
            if step == 19 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            own.step(step)
        time.sleep(0.5)  # the ranks agree on a step that they then leave out
        for step in range(own.restore().next_step, 500):
            time.sleep(0.005)
            dist.barrier()
            if step == 310 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if own.step(step) is not None:
                saved.append(step)
                if step > 310:
                    break
    return saved


def test_wishes_are_granted_after_a_restore_that_leaves_out_an_agreed_step(run: str) -> None:
    first, second = run_ranks(2, jump_forward, run)
    assert first == second
    assert first[-1] > 310


class TestPreemption:
    def test_a_signal_saves_the_step_and_ends_the_loop(self, run: str, state: dict[str, object]) -> None:
        ours = signal.getsignal(signal.SIGTERM)
        with Checkpointer(run, state, memory=None, save=EverySteps(4) | OnPreemption()) as checkpointer:
            for step in checkpointer.steps(100):
                if step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert not checkpointer.preempted
                checkpointer.step(step)
            assert checkpointer.preempted
        assert committed(run) == [4, 6]
        assert signal.getsignal(signal.SIGTERM) is not ours, "a job that leaves ignores it for a while"
        Checkpointer(run, state, memory=None, save=OnPreemption()).close()
        assert signal.getsignal(signal.SIGTERM) is ours

    def test_before_the_first_step_it_ends_the_process(self, run: str) -> None:
        script = """if True:
            import os, signal, sys, holdfast
            checkpointer = holdfast.Checkpointer(sys.argv[1], {}, memory=None, save=holdfast.OnPreemption())
            os.kill(os.getpid(), signal.SIGTERM)
        """
        assert run_script(script, run).status == -signal.SIGTERM

    def test_a_loop_goes_on_after_the_preempted_step(self, run: str, state: dict[str, object]) -> None:
        for first in (0, 3):
            start_new_job()
            with Checkpointer(run, state, memory=None, save=OnPreemption((signal.SIGTERM, signal.SIGUSR1))) as own:
                steps = []
                for step in own.steps(100):
                    steps.append(step)
                    if step == first + 2:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    own.step(step)
            assert steps == [first, first + 1, first + 2]


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
memory = holdfast.Memory(node_dir=sys.argv[2])
state = {"w": torch.zeros(10), "progress": {"step": -1}}
with holdfast.Checkpointer(sys.argv[1], state, memory=memory, save=holdfast.OnPreemption()) as checkpointer:
    for step in checkpointer.steps(100_000):
        time.sleep(0.005)
        dist.all_reduce(torch.ones(1))
        state["progress"]["step"] = step
        if step == 3 and dist.get_rank() == 0:
            sys.stdout.write("trains\\n")  # in one piece: under torchrun Python does not buffer, and print writes two
            sys.stdout.flush()
        checkpointer.step(step)
sys.stdout.write(f"ends after {step}\\n")
dist.destroy_process_group()
"""


def run_rank_of_script(rank: int, port: int, run: str, node_dir: str, out: Path) -> None:
    """Run the script as rank `rank` of two; it prints into the file `out`."""
    os.environ |= environment_of(rank, 2, port)
    sys.argv = ["train.py", run, node_dir]
    with out.open("w") as file, redirect_stdout(file):
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})


def test_sigterm_to_all_ranks_leaves_a_checkpoint_of_the_last_step_on_all_of_them(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    outs = [tmp_path / f"out{rank}" for rank in range(2)]
    ranks = [
        start(run_rank_of_script, rank, store.port, run, str(node_dir), out, err=tmp_path / f"err{rank}")
        for rank, out in enumerate(outs)
    ]
    until(lambda: outs[0].exists() and outs[0].read_text() == "trains\n")
    for rank in ranks:
        rank.send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    first, second = (out.read_text().splitlines()[-1] for out in outs)
    assert first == second
    assert committed(run) == [int(first.removeprefix("ends after "))]


@pytest.mark.slow
def test_sigterm_to_torchrun_leaves_a_checkpoint_of_the_last_step_on_all_ranks(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    job = subprocess.Popen([*command, run, str(node_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "trains\n"
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    first, second = out.splitlines()
    assert first == second, err
    assert committed(run) == [int(first.split()[-1])]


def loop_of_the_clock(run: str) -> list[int]:
    """Ranks without collectives, one of them slower, and a policy of the first rank's clock."""
    start_new_job()
    saved = []
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=EveryTime(0.2)) as own:
        for step in own.steps(150):
            time.sleep(0.01 * (1 + dist.get_rank()))
            if own.step(step) is not None:
                saved.append(step)
    return saved


def test_ranks_that_drift_apart_still_save_after_the_same_steps(run: str) -> None:
    first, second = run_ranks(2, loop_of_the_clock, run)
    assert first == second
    assert len(first) >= 3
    assert committed(run) == first
