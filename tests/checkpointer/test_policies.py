"""`Checkpointer.step` and `steps`: a loop saves when its policy says so, on all ranks after the same steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, EveryTime, Memory, OnMetric, OnPreemption, OnRequest
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
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


class TestPreemption:
    def test_a_signal_saves_the_step_and_ends_the_loop(self, run: str, state: dict[str, object]) -> None:
        Checkpointer(run, state, memory=None, save=OnPreemption()).close()  # a job of an earlier test may be leaving
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
