"""Memory is taken from `restore` on, so that the first save does not wait for it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import Checkpointer, Memory, StateError
from holdfast.checkpointer import early_memory, restoring
from holdfast.io.pages import HUGE_PAGE_NBYTES
from holdfast.node_memory.arena import Arena
from holdfast.node_memory.slots import Slot, slot_names
from tests.checkpointer.test_checkpointer import Loop, folder_of
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers, keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

_CLAIMS = """
import sys
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from threading import enumerate as enumerate_threads
from typing import Any
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.node_folder import NodeFolder
with NodeFolder(sys.argv[1], node_dir=Path(sys.argv[2])) as folder, Claim(folder, 0):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def slots(run: str, node_dir: Path, *, rank: int | None = None) -> dict[str, int]:
    """The size of each slot of a run, by name."""
    found = {}
    with folder_of(run, node_dir) as folder:
        for name in slot_names(folder, rank=rank):
            with Slot(folder, name) as slot:
                found[name] = slot.nbytes
    return found


def are_fit(found: dict[str, int], nbytes: int) -> bool:
    """Whether all slots have the size of a data file of `nbytes`, rounded up to huge pages."""
    return set(found.values()) == {-(-nbytes // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES}


def test_the_first_save_fills_a_slot_that_restore_has_prepared(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        until(lambda: len(slots(run, memory.node_dir)) == memory.generations)
        prepared = slots(run, memory.node_dir)
        loop.step()
        handle = checkpointer.save(0)
        handle.durable.wait(60)
        assert slots(run, memory.node_dir) == prepared
        assert are_fit(prepared, handle.staged.nbytes)
        assert 0 < handle.memory_wait_s < handle.blocked_s
        assert checkpointer.save(1).memory_wait_s == 0


def test_a_first_save_that_comes_at_once_waits_for_the_rest_of_the_memory(run: str, memory: Memory) -> None:
    state = {"weights": torch.arange(50_000_000, dtype=torch.float32)}
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0).durable.wait(60)
        prepared = slots(run, memory.node_dir)
        checkpointer.save(1).durable.wait(60)
        assert slots(run, memory.node_dir) == prepared
        assert len(prepared) == memory.generations
    assert torch.equal(holdfast.open(run)["weights"][...], state["weights"])


def test_a_state_that_grows_by_more_than_its_optimizers_slots_is_saved(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        loop.state["ema"] = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.step()
        for step in range(3):
            checkpointer.save(step).durable.wait(60)
    assert holdfast.open(run).step == 2


def test_a_reservation_for_which_memory_is_too_small_is_no_error_of_the_restore(run: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=300m") as node_dir:
        (node_dir / "taken").write_bytes(bytes(40 << 20))
        loop = Loop()
        with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
            checkpointer.restore()
            (node_dir / "taken").unlink()
            loop.step()
            handle = checkpointer.save(0)
            handle.durable.wait(60)
            assert handle.staged.nbytes > 0
            assert are_fit(slots(run, node_dir), handle.staged.nbytes)
        end_keepers(node_dir)


def test_memory_that_goes_away_after_the_restore_costs_no_save(run: str, tmp_path: Path) -> None:
    node_dir = tmp_path / "node"
    node_dir.mkdir()
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
        checkpointer.restore()
        until(lambda: len(slots(run, node_dir)) == 2)
        end_keepers(node_dir)
        shutil.rmtree(node_dir)
        for step in range(3):
            checkpointer.save(step).durable.wait(60)
    assert holdfast.open(run).step == 2


@pytest.mark.parametrize("function", ["flatten", "expected_nbytes", "devices_of"])
@pytest.mark.parametrize("error", [MemoryError("a defect"), StateError("no", code="state.no", action="None.")])
def test_an_error_of_the_reservation_is_no_error_of_the_restore(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, error: Exception, function: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(early_memory, function, fail)
            checkpointer.restore()
        checkpointer.save(0).durable.wait(60)
    assert holdfast.open(run).step == 0


@pytest.fixture
def claimed(run: str, memory: Memory) -> Iterator[None]:
    """Another process has a claim to the slots of rank 0, as a job that trains does."""
    with folder_of(run, memory.node_dir) as folder:
        name = str(Path(run).absolute())
        assert folder.path.exists()
    process = subprocess.Popen(
        [sys.executable, "-c", _CLAIMS, name, str(memory.node_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline()
    yield
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.mark.usefixtures("claimed")
def test_a_restore_beside_a_job_that_trains_takes_none_of_its_memory(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
    assert slots(run, memory.node_dir) == {}


def _first_save(run: str, node_dir: Path, kind: str) -> tuple[dict[str, int], dict[str, int], int]:
    """The slots of this rank before and after its first save, and the size of its data file."""
    module = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 7))
    model: nn.Module = module
    if kind == "fsdp2":
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters())
    rank, memory = dist.get_rank(), Memory(node_dir=node_dir)
    with Checkpointer(run, {"model": model, "optimizer": optimizer}, memory=memory) as checkpointer:
        checkpointer.restore()
        has_part = kind == "fsdp2" or rank == 0  # of copies that are so small, rank 0 writes all
        until(lambda: len(slots(run, node_dir, rank=rank)) == (memory.generations if has_part else 0))
        before = slots(run, node_dir, rank=rank)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        handle = checkpointer.save(0)
        handle.durable.wait(60)
        return before, slots(run, node_dir, rank=rank), handle.staged.nbytes


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "plain"])
@pytest.mark.few(1)
def test_every_rank_reserves_the_size_of_its_own_part(run: str, memory: Memory, kind: str) -> None:
    for before, after, nbytes in run_ranks(3, _first_save, run, memory.node_dir, kind):
        assert before == after
        assert are_fit(before, nbytes) if nbytes else not before


def test_a_second_save_waits_for_its_slot_while_the_reservation_goes_on(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = Slot.reserve
    is_second = Event()

    def slow(slot: Slot, **options: Any) -> None:
        if is_second.is_set():
            time.sleep(1)
        is_second.set()
        reserve(slot, **options)

    monkeypatch.setattr(Slot, "reserve", slow)
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        handles = [checkpointer.save(step) for step in range(3)]
    assert all(handle.durable.is_done for handle in handles)
    assert "saves go to storage" not in caplog.text


def test_workers_that_are_forked_right_after_a_restore_do_not_hold_up_the_first_save(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory, timeout_s=10) as checkpointer:
        checkpointer.restore()
        workers = []
        for _ in range(20):
            if (worker := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            workers.append(worker)
        try:
            checkpointer.save(0).durable.wait(30)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)


def test_a_job_that_only_restores_leaves_no_memory_behind(run: str, memory: Memory) -> None:
    holdfast.save(run, Loop().state, 0)
    start_new_job()
    with Checkpointer(run, Loop().state, memory=memory) as checkpointer:
        checkpointer.restore()
        until(lambda: len(slots(run, memory.node_dir)) == memory.generations)
    assert slots(run, memory.node_dir) == {}


def test_small_slots_of_a_removed_run_are_not_removed_while_the_first_save_frees_them(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread of the reservation closed slots of which the first save was writing the records.
    with Checkpointer(run, {"weights": torch.ones(1000)}, memory=memory) as checkpointer:
        for step in range(2):
            checkpointer.save(step).durable.wait(60)
    shutil.rmtree(run)
    start_new_job()
    sort, take = Arena._sort, Slot.take

    def late(arena: Arena, nbytes: int) -> None:
        time.sleep(0.3)
        sort(arena, nbytes)

    def slow(slot: Slot) -> bool:
        taken = take(slot)
        if current_thread() is main_thread():
            time.sleep(0.8)
        return taken

    monkeypatch.setattr(Arena, "_sort", late)
    monkeypatch.setattr(Slot, "take", slow)
    state = {"weights": torch.arange(5_000_000, dtype=torch.float32)}
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.restore()
        for step in range(2):
            checkpointer.save(step).durable.wait(60)
    assert torch.equal(holdfast.open(run)["weights"][...], state["weights"])


def test_memory_of_the_run_that_goes_away_after_the_restore_is_taken_anew(
    run: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        until(lambda: len(slots(run, memory.node_dir)) == memory.generations)
        end_keepers(memory.node_dir)
        with folder_of(run, memory.node_dir) as folder:
            shutil.rmtree(folder.path)
        for step in range(3):
            handle = checkpointer.save(step)
            handle.durable.wait(60)
            assert handle.staged.nbytes > 0
    assert "saves go to storage" not in caplog.text


def test_the_reservation_has_only_the_time_that_the_restore_has_left(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, left_s = restoring.restore, []

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return restore(*arguments, **options)

    def note(*arguments: Any) -> int:
        left_s.append(arguments[-1].remaining_s())
        return 0

    monkeypatch.setattr(holdfast.checkpointer, "restore", slow)
    monkeypatch.setattr(early_memory, "expected_nbytes", note)
    with Checkpointer(run, Loop().state, memory=memory, timeout_s=30) as checkpointer:
        checkpointer.restore()
    assert [each <= 29.5 for each in left_s] == [True]


@pytest.mark.parametrize("fails_at", ["restore", "save"])
def test_saves_go_on_after_a_thread_could_not_be_started(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    # Each later save waited for nine tenths of timeout_s, and raised that no slot became free.
    start = Thread.start

    def refused(thread: Thread) -> None:
        if thread.name == "holdfast-arena":
            raise RuntimeError("can't start new thread")
        start(thread)

    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory, timeout_s=20) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(Thread, "start", refused)
            if fails_at == "restore":
                checkpointer.restore()
            else:
                checkpointer.save(0)
        handles = [checkpointer.save(step) for step in range(1, 6)]
        handles[-1].durable.wait(60)
        assert handles[-1].staged.nbytes > 0, "memory is used again"
    assert holdfast.open(run).step == 5
    assert ("can't start new thread" in caplog.text) == (fails_at == "save")


def test_memory_that_a_dropped_checkpointer_reserved_goes_to_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")  # it says why memory is not reserved
    with mounted(tmp_path / "small", "tmpfs", "size=310m") as node_dir:
        memory = Memory(node_dir=node_dir)
        for number in range(3):
            dropped = Checkpointer(tmp_path / f"run-{number}", {"weights": torch.ones(4_000_000)}, memory=memory)
            dropped.restore()
            name = str(tmp_path / f"run-{number}")
            until(lambda name=name: len(slots(name, node_dir)) == 2)  # type: ignore[misc]
            until(lambda: keepers(node_dir) != [])
            # Threads that still prepare memory would keep the dropped one alive, or start another keeper.
            until(lambda: not {thread.name for thread in enumerate_threads()} & {"holdfast-arena", "holdfast-stage"})
            del dropped
            gc.collect()
            end_keepers(node_dir)  # on a busy machine, it has removed slots mapped for seconds
        loop = Loop()
        with Checkpointer(tmp_path / "run", loop.state, memory=memory) as checkpointer:
            checkpointer.restore()
            handle = checkpointer.save(0)
            handle.durable.wait(60)
            assert handle.staged.nbytes > 0
        assert all(slots(str(tmp_path / f"run-{number}"), node_dir) == {} for number in range(3))
        end_keepers(node_dir)


def test_slots_that_are_larger_than_needed_make_room_for_smaller_ones(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The slots of weights that were frozen after the restore took the room of those that the save needed.
    with mounted(tmp_path / "small", "tmpfs", "size=396m") as node_dir:
        reserve = Slot.reserve

        def then_taken(slot: Slot, **options: Any) -> None:
            reserve(slot, **options)
            (node_dir / "taken").write_bytes(bytes(60 << 20))

        weight = nn.Parameter(torch.ones(5_000_000))
        state = {"weight": weight, "optimizer": torch.optim.AdamW([weight])}
        with Checkpointer(run, state, memory=Memory(node_dir=node_dir)) as checkpointer:
            with monkeypatch.context() as patched:
                patched.setattr(Slot, "reserve", then_taken)
                checkpointer.restore()
                until((node_dir / "taken").exists)
                until(lambda: not any(thread.name == "holdfast-arena" for thread in enumerate_threads()))
            assert len(slots(run, node_dir)) == 1
            weight.requires_grad_(False)
            handle = checkpointer.save(0)
            handle.durable.wait(60)
            assert handle.staged.nbytes > 0
            assert are_fit(slots(run, node_dir), handle.staged.nbytes)
        assert "saves go to storage" not in caplog.text
        end_keepers(node_dir)


def test_a_second_restore_reserves_no_second_time(run: str, memory: Memory) -> None:
    # Meanwhile the memory may be that of a job that trains, to whom an evaluation left it.
    state = {"weights": torch.ones(1000)}
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.restore()
        until(lambda: len(slots(run, memory.node_dir)) == 2)
        before = slots(run, memory.node_dir)
        state["weights"] = torch.ones(2_000_000)
        checkpointer.restore()
        assert slots(run, memory.node_dir) == before
        checkpointer.save(0).durable.wait(60)
    assert holdfast.open(run).step == 0
