"""`OnRequest`: a signal, a file or a process asks for a save, and all ranks save after the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, EveryTime, Memory, OnRequest
from tests.checkpointer.test_policies import committed
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.rank_worker import HOST
from tests.support.ranks import run_ranks


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(100)}


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
        monkeypatch.setattr(checkpointer._handles, "wait", lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR2))
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
        """The error said only: check the path. It may be right, and its job has not saved yet."""
        with pytest.raises(holdfast.NotFoundError) as error:
            holdfast.request_save(run)
        assert "A job that has not saved yet has no run: only a signal or a file can ask it" in error.value.action

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
