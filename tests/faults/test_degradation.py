"""Saves beside a store in trouble: all ranks hear of it at once, and training goes on, or stops as declared."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, EverySteps, KeepLast, Memory, StopAfter
from holdfast.checkpointer.events import Event, EventSource, RecoveryPointAged
from holdfast.errors import DeadlineError, HoldfastError, StorageError
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import on
from tests.support.servers.s3 import Bucket

#: More than one part.
LARGE = 5 << 20


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    start_new_job()


@pytest.fixture
def run(bucket: Bucket) -> str:
    """The run, without the proxy."""
    return f"{bucket.url}/runs/a"


@pytest.fixture
def far_run(bucket: Bucket, proxy: FaultProxy) -> str:
    """The same run, behind the proxy."""
    return f"{bucket.url}/runs/a?endpoint={proxy.endpoint}"


@pytest.fixture
def signals(tmp_path: Path) -> Path:
    """A folder of files by which ranks and the test tell each other how far they are."""
    path = tmp_path / "signals"
    path.mkdir()
    return path


def steps_of(run: str) -> list[int]:
    return sorted(checkpoint.step for checkpoint in holdfast.ls(run))


def parts_of_ranks(num_elements: int) -> dict[str, torch.Tensor]:
    """A state of which each rank has a tensor of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"w{rank}": torch.zeros(num_elements)}


def fill(state: dict[str, torch.Tensor], step: int) -> None:
    for tensor in state.values():
        tensor.fill_(step)


def wait_for(path: Path) -> None:
    until(path.exists, timeout_s=100)


# Ranks.


def save_twice(environment: dict[str, str], run: str, signals: Path) -> tuple[str, str, float]:
    """The error of the second save, and its duration."""
    os.environ.update(environment)
    start_new_job()
    state = parts_of_ranks(LARGE)
    holdfast.save(run, state, 1, timeout_s=60)
    (signals / f"saved-{dist.get_rank()}").touch()
    wait_for(signals / "go")
    begun_s = time.monotonic()
    with pytest.raises(HoldfastError) as caught:
        holdfast.save(run, state, 2, timeout_s=60)
    took_s = time.monotonic() - begun_s
    (signals / f"failed-{dist.get_rank()}").touch()
    wait_for(signals / "repaired")
    holdfast.save(run, state, 3, timeout_s=60)
    return caught.value.code, caught.value.message, took_s


def test_a_rank_that_cannot_write_ends_the_save_of_ranks_that_are_in_the_middle_of_their_files(
    run: str, far_run: str, proxy: FaultProxy, bucket: Bucket, signals: Path
) -> None:
    gate = threading.Event()

    def break_it() -> None:
        for rank in range(3):
            wait_for(signals / f"saved-{rank}")
        proxy.add(on("POST", "*data-00001*").answers(403))
        proxy.add(on("PUT", "*data-00002*partNumber*").waits_for(gate))
        (signals / "go").touch()
        for rank in range(3):
            wait_for(signals / f"failed-{rank}")
        proxy.clear()
        gate.set()
        (signals / "repaired").touch()

    with_faults = threading.Thread(target=break_it)
    with_faults.start()
    found = run_ranks(3, save_twice, dict(bucket.environment), far_run, signals, timeout_s=100)
    with_faults.join()
    for code, message, took_s in found:
        assert code == "storage.denied"
        assert message.startswith("rank 1 failed in 'commit' of save of step 2 (1 of 3 ranks failed)")
        assert took_s < 20
    assert steps_of(run) == [1, 3]


def train(
    environment: dict[str, str], run: str, node_dir: Path | None, signals: Path, num_steps: int, options: dict[str, Any]
) -> tuple[str, int, list[str]]:
    """Train, and tell after step 1 and its checkpoint. Returns what ended training, the last step, and the warnings."""
    os.environ.update(environment)
    start_new_job()
    state = parts_of_ranks(1000)
    memory = None if node_dir is None else Memory(node_dir=node_dir)
    with Warnings() as warnings:
        last, end = -1, "its end"
        try:
            with Checkpointer(run, state, memory=memory, save=EverySteps(1), **options) as checkpointer:
                for step in checkpointer.steps(num_steps):
                    last = step
                    fill(state, step)
                    handle = checkpointer.step(step)
                    if step == 1:
                        assert handle is not None
                        handle.durable.wait(60)
                        (signals / f"saved-{dist.get_rank()}").touch()
                        wait_for(signals / "go")
        except HoldfastError as error:
            end = str(error)
    return end, last, warnings.texts


class Warnings(logging.Handler):
    """The warnings within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger("holdfast").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("holdfast").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("has_memory", [False, True], ids=["storage", "memory"])
def test_training_stops_on_all_ranks_at_the_same_step_after_missed_saves(
    run: str, proxy: FaultProxy, bucket: Bucket, signals: Path, node_dir: Path, has_memory: bool
) -> None:
    def break_it() -> None:
        until(lambda: len(list(signals.glob("saved-*"))) == 2, timeout_s=60)
        proxy.add(on("PUT", "*/step-*").answers(403))
        (signals / "go").touch()

    with_faults = threading.Thread(target=break_it)
    with_faults.start()
    options = {"on_failed_save": StopAfter(missed=2), "when_full": "skip"}
    node = node_dir if has_memory else None
    environment = dict(bucket.behind(proxy.endpoint).environment)
    found = run_ranks(2, train, environment, run, node, signals, 2000, options, timeout_s=100)
    with_faults.join()
    (end, last, warnings), (other_end, other_last, _) = found
    assert end == other_end
    assert end.startswith(f"[storage.stopped] training stops at step {last}, as on_failed_save says: 2 saves in a row")
    assert "the newest durable checkpoint is that of step 1" in end
    assert "AccessDenied" in end
    assert last == other_last
    assert sum("training goes on without a checkpoint of step" in each for each in warnings) == 1
    assert max(steps_of(run)) == 1


# One process.


class Ages:
    """A listener that notes the ages of the recovery point."""

    def __init__(self) -> None:
        self.events: list[RecoveryPointAged] = []

    def hear(self, event: Event, source: EventSource) -> None:
        if isinstance(event, RecoveryPointAged):
            self.events.append(event)


REFUSALS = {
    "storage.denied": on("PUT", "*/step-*").answers(403),
    "storage.credentials": on("PUT", "*/step-*").answers(400, code="ExpiredToken"),
    "config.bucket": on("PUT", "*/step-*").answers(404, code="NoSuchBucket"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_by_default_training_goes_on_with_a_warning_that_says_how_old_the_newest_durable_checkpoint_is(
    run: str, far_run: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    state = parts_of_ranks(1000)
    ages = Ages()
    with Checkpointer(far_run, state, memory=None, listeners=[ages]) as checkpointer:
        checkpointer.save(1)
        with proxy.faults(REFUSALS[code]):
            handles = [checkpointer.save(step) for step in (5, 8)]
        assert [handle.durable.error.code for handle in handles if handle.durable.error] == [code] * 2
        checkpointer.save(9)
    assert steps_of(run) == [1, 9]
    assert "training goes on without a checkpoint of step 8 (2 missed saves in a row)" in caplog.text
    assert "the newest durable checkpoint is that of step 1," in caplog.text
    assert "and 7 steps old" in caplog.text
    told = [(each.step, each.durable_step, each.num_missed) for each in ages.events]
    assert told == [(5, 1, 0), (5, 1, 1), (8, 1, 1), (8, 1, 2), (9, 1, 2)]


def test_without_permission_to_delete_training_goes_on_and_keeps_more_than_its_policy(
    run: str, far_run: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        proxy.faults(on("DELETE").answers(403), on("POST", "*delete*").answers(403)),
        Checkpointer(far_run, parts_of_ranks(1000), memory=None, keep=KeepLast(1)) as checkpointer,
    ):
        for step in (1, 2, 3):
            checkpointer.save(step)
        until(lambda: "AccessDenied" in caplog.text)
    assert steps_of(run)[-1] == 3


def test_the_first_save_of_a_job_raises_what_hinders_it(far_run: str, proxy: FaultProxy) -> None:
    with (
        Checkpointer(far_run, parts_of_ranks(1000), memory=None) as checkpointer,
        proxy.faults(on("PUT", "*/step-*").answers(403)),
        pytest.raises(StorageError) as caught,
    ):
        checkpointer.save(1)
    assert caught.value.code == "storage.denied"


def test_a_stop_hides_no_exception_of_training(far_run: str, proxy: FaultProxy) -> None:
    def train() -> None:
        policy = StopAfter(missed=9)
        with Checkpointer(far_run, parts_of_ranks(1000), memory=None, on_failed_save=policy) as checkpointer:
            checkpointer.save(1)
            proxy.add(on("PUT", "*/step-*").answers(403))
            checkpointer.save(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_save_while_the_store_is_unreachable_is_held_in_memory_and_drained_in_order(
    run: str, far_run: str, proxy: FaultProxy, memory: Memory
) -> None:
    state = parts_of_ranks(1000)
    with Checkpointer(far_run, state, memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        with proxy.faults(on().breaks_the_connection()):
            handles = []
            for step in (2, 3):
                fill(state, step)
                handles.append(checkpointer.save(step))
                handles[-1].staged.wait(60)
            assert not any(handle.durable.is_over for handle in handles)
            assert steps_of(run) == [1]
        for handle in handles:
            handle.durable.wait(60)
    assert steps_of(run) == [1, 2, 3]
    start_new_job()
    for step in (2, 3):
        assert set(holdfast.open(f"{run}@step={step}")["w0"].numpy().tolist()) == {float(step)}


@pytest.mark.slow
def test_a_close_while_the_store_is_unreachable_says_which_steps_are_safe_and_where(
    run: str, far_run: str, proxy: FaultProxy, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").mkdir()
    checkpointer = Checkpointer(far_run, parts_of_ranks(1000), memory=memory, local=tmp_path / "disk")
    checkpointer.save(1).durable.wait(60)
    with proxy.faults(on().breaks_the_connection()):
        for step in (2, 3):
            checkpointer.save(step).staged.wait(60)
        assert checkpointer._tier is not None
        stager = checkpointer._tier.stager
        until(lambda: stager.steps_on_disk() == {2, 3})
        checkpointer._timeout_s = 0.5
        with pytest.raises(DeadlineError, match="steps 2, 3 on the disk of its node") as caught:
            checkpointer.close()
        assert caught.value.code == "timeout.save"
        assert "The keeper goes on without this process" in str(caught.value)
    until(lambda: steps_of(run) == [1, 2, 3])

    def train() -> None:
        with Checkpointer(far_run, parts_of_ranks(1000), memory=memory) as checkpointer:
            checkpointer.restore()
            checkpointer.save(4).durable.wait(60)
            proxy.add(on().breaks_the_connection())
            checkpointer.save(5).staged.wait(60)
            with pytest.raises(DeadlineError, match="step 5 in the memory of its node, until the node goes down"):
                checkpointer.wait(0.5)
            raise ZeroDivisionError

    start_new_job()
    with pytest.raises(ZeroDivisionError):
        train()
    assert "an exception ended training before all saves were durable. The part of this rank is safe" in caplog.text


@pytest.mark.slow
def test_a_save_that_finds_no_slot_in_time_is_missed_and_the_next_ones_wait_only_a_moment(
    run: str, far_run: str, proxy: FaultProxy, memory: Memory
) -> None:
    with Checkpointer(far_run, parts_of_ranks(1000), memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        with proxy.faults(on().breaks_the_connection()):
            held = [checkpointer.save(step) for step in (2, 3)]
            for handle in held:
                handle.staged.wait(60)
            checkpointer._timeout_s = 4.0
            took_s = []
            for step in (4, 5):
                begun_s = time.monotonic()
                error = checkpointer.save(step).durable.error
                took_s.append(time.monotonic() - begun_s)
                assert error is not None
                assert error.code == "timeout.slot"
            assert took_s[1] < took_s[0]
            checkpointer._timeout_s = 60.0
        for handle in held:
            handle.durable.wait(60)
        checkpointer.save(6).durable.wait(60)
    assert steps_of(run) == [1, 2, 3, 6]


@pytest.mark.slow
def test_training_stops_while_it_waits_for_a_slot_when_nothing_has_become_durable_for_so_long(
    far_run: str, proxy: FaultProxy, memory: Memory
) -> None:
    policy = StopAfter(without_durable_s=5)

    def train() -> None:
        with Checkpointer(far_run, parts_of_ranks(1000), memory=memory, on_failed_save=policy) as checkpointer:
            checkpointer.save(1).durable.wait(60)
            proxy.add(on("PUT", "*/step-*").answers(403))
            for step in range(2, 9):
                checkpointer.save(step)

    with pytest.raises(StorageError) as caught:
        train()
    assert caught.value.code == "storage.stopped"
    assert "no checkpoint has become durable for" in caught.value.message
    assert "AccessDenied" in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_save_waits_for_a_store_that_is_unreachable_for_a_minute(run: str, far_run: str, proxy: FaultProxy) -> None:
    state = parts_of_ranks(LARGE)
    holdfast.save(far_run, state, 1, timeout_s=200)
    proxy.add(on().breaks_the_connection())
    threading.Timer(60, proxy.clear).start()
    holdfast.save(far_run, state, 2, timeout_s=200)
    assert steps_of(run) == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_without_a_store_loses_no_checkpoint_that_memory_has_room_for(
    run: str, far_run: str, proxy: FaultProxy, node_dir: Path
) -> None:
    state = parts_of_ranks(LARGE)
    with Checkpointer(far_run, state, memory=Memory(node_dir=node_dir, generations=4)) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        proxy.add(on().breaks_the_connection())
        threading.Timer(60, proxy.clear).start()
        handles = [checkpointer.save(step) for step in (2, 3, 4)]
        for handle in handles:
            handle.durable.wait(200)
    assert steps_of(run) == [1, 2, 3, 4]
