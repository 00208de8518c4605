"""The memory of a node: liveness across PID namespaces, the leftovers of dead processes, and which slots give way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.staging import Stager
from holdfast.errors import StorageError
from holdfast.format.records import Place
from holdfast.keeper import daemon
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.daemon import Keeper
from holdfast.node_memory import arena as arena_module
from holdfast.node_memory import file_locks
from holdfast.node_memory.arena import Arena
from holdfast.node_memory.claims import Claim, is_claimed
from holdfast.node_memory.generations import Generation, generation_ids, give_up_generation
from holdfast.node_memory.inventory import give_way, node_memory
from holdfast.node_memory.keeper_lock import clear_protocol, end_keeper, is_kept, try_lock, write_protocol
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState, slot_names
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.posix import PosixStore
from tests.faults.test_engine_faults import small_node
from tests.keeper.test_keeper import states
from tests.keeper.test_keeper_promises import looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.node_memory.test_arena import ready
from tests.node_memory.test_slots import filled
from tests.store.test_posix_storage import mounted
from tests.support.nursery import until

MIB = 1 << 20
_NEW_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _may_unshare() -> bool:
    try:
        return subprocess.run([*_NEW_NAMESPACE, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


in_namespaces = pytest.mark.skipif(not _may_unshare(), reason="this user may make no PID namespaces")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(PosixStore(str(tmp_path / "run")))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    (tmp_path / "node").mkdir()
    with NodeFolder(str(tmp_path / "run"), node_dir=tmp_path / "node") as folder:
        yield folder
        end_keeper(folder, timeout_s=30)


@pytest.fixture
def saved(run: Run, folder: NodeFolder) -> Iterator[Saved]:
    """A checkpoint of two ranks of this node, staged."""
    with ExitStack() as stack:
        yield Saved(run, [folder, folder], stack)


TRAINER = """
import os, sys, time
from pathlib import Path
from typing import Any, NamedTuple
from holdfast.format.records import Place
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState

run, node_dir, rank, what = sys.argv[1:]
folder = NodeFolder(run, node_dir=Path(node_dir))
claim = Claim(folder, int(rank))
slot = Slot.create(folder, rank=int(rank), nbytes=1 << 20)
assert slot.take()
held = Contents("0123456789abcdef", "ffeeddccbbaa9988", Place(1, 9), 9, 0, 4096, 1 << 20)
slot.advance(SlotRecord(SlotState.WRITING, held))
child = os.fork() if what == "forks" else None
print(child, flush=True) if child != 0 else None
time.sleep(600)
"""


class Filling(NamedTuple):
    """A process that fills a slot, and one that it has forked."""

    process: subprocess.Popen[str]
    child: int | None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def trainer(folder: NodeFolder, rank: int, *, before: Sequence[str] = (), what: str = "") -> Iterator[Filling]:
    """A process that fills a slot of `rank`, and does not come to an end."""
    command = [*before, sys.executable, "-c", TRAINER, _run_of(folder), str(folder.node_dir), str(rank), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        filling = Filling(process, int(line) if line != "None" else None)
        try:
            yield filling
        finally:
            filling.kill()
            if filling.child is not None:
                os.kill(filling.child, signal.SIGKILL)


def _run_of(folder: NodeFolder) -> str:
    return str(folder.node_dir.parent / "run")


def state_of(folder: NodeFolder, rank: int) -> SlotState | None:
    """The state of the only slot of a rank; None where it has none."""
    names = slot_names(folder, rank=rank)
    if not names:
        return None
    with Slot(folder, names[0]) as slot:
        return slot.state


@pytest.fixture
def keeper(folder: NodeFolder) -> Iterator[Keeper]:
    keeper = Keeper(folder)
    yield keeper
    keeper.close()


# Processes in other PID namespaces.


@in_namespaces
def test_a_keeper_in_another_pid_namespace_leaves_live_trainers_their_slots(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    keeper = [*_NEW_NAMESPACE, sys.executable, "-m", "holdfast.keeper", run.storage.location.url]
    with (
        trainer(folder, 5) as filling,
        subprocess.Popen(
            [*keeper, "--node-dir", str(folder.node_dir), "--idle-s", "0.2"], stderr=subprocess.DEVNULL
        ) as process,
    ):
        until(lambda: states(saved) == {SlotState.COMMITTED})
        time.sleep(1.0)  # it looks four times a second, and would end when it is idle for 0.2
        assert state_of(folder, 5) == SlotState.WRITING
        assert process.poll() is None
        filling.kill()
        assert process.wait(30) == 0
    assert not folder.path.exists()
    assert_loads(run, saved)


@in_namespaces
def test_a_trainer_in_another_pid_namespace_is_alive_until_it_is_killed(folder: NodeFolder, keeper: Keeper) -> None:
    with trainer(folder, 5, before=_NEW_NAMESPACE) as filling:
        for _ in range(3):
            keeper.look()
        assert state_of(folder, 5) == SlotState.WRITING
        assert is_claimed(folder, 5)
        assert not is_claimed(folder, 4)
        filling.kill()
        until(lambda: not is_claimed(folder, 5))
        keeper.look()
        assert state_of(folder, 5) == SlotState.FREE


@in_namespaces
def test_a_keeper_of_another_version_in_another_pid_namespace_ends_and_no_other_process_gets_a_signal(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    keeper = [*_NEW_NAMESPACE, sys.executable, "-m", "holdfast.keeper", run.storage.location.url]
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander,
        subprocess.Popen([*keeper, "--node-dir", str(folder.node_dir)], stderr=subprocess.DEVNULL) as process,
    ):
        until(lambda: is_kept(folder) and (folder.path / "keeper.protocol").exists())
        (folder.path / "keeper.lock").write_text(f"{bystander.pid}\n")  # so it counts there
        (folder.path / "keeper.protocol").write_text("0\n")
        ensure_keeper(folder, run.storage.location.url)
        assert process.wait(30) == 0
        assert bystander.poll() is None
        bystander.kill()
    assert states(saved) == {SlotState.COMMITTED}


def test_a_keeper_starts_where_memory_is_full_of_slots_that_it_is_to_write_to_the_run(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NodeFolder, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_protocol(folder)
    monkeypatch.setattr(NodeFolder, "write", full)
    write_protocol(folder)  # that of the keeper before it is there
    clear_protocol(folder)
    with pytest.raises(StorageError, match="No space left on device"):
        write_protocol(folder)


# Remains of dead processes.


def test_a_slot_whose_trainer_was_killed_while_it_copied_is_free_and_generation_files_go(
    saved: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    with trainer(folder, 5):
        until(lambda: not (keeper.look() or keeper.owes))
        assert state_of(folder, 5) == SlotState.WRITING
        for slot in saved.slots:
            slot.take()
            slot.advance(SlotRecord(SlotState.FREE))
        keeper.look()
        assert generation_ids(folder) == []  # also while somebody is filling a slot
    keeper.look()
    assert state_of(folder, 5) == SlotState.FREE
    keeper.give_back()
    assert slot_names(folder) == []


def test_a_forked_child_that_lives_on_does_not_keep_its_dead_parent_alive(folder: NodeFolder, keeper: Keeper) -> None:
    with trainer(folder, 5, what="forks") as filling:
        filling.kill()
        assert Path(f"/proc/{filling.child}").exists()
        # The child gives up what it inherited as soon as it runs, which may be after the death of its parent.
        until(lambda: not is_claimed(folder, 5))
        assert Path(f"/proc/{filling.child}").exists()
        keeper.look()
        assert state_of(folder, 5) == SlotState.FREE


def test_marks_of_generations_that_were_given_up_go_without_a_generation_file(
    folder: NodeFolder, keeper: Keeper
) -> None:
    give_up_generation(folder, "00112233445566aa")
    keeper.look()
    assert [name for name in folder.names() if name.startswith("given-up")] == []


def test_a_checkpoint_that_was_given_up_is_told_again_after_an_exchange_that_failed(
    tmp_path: Path, folder: NodeFolder, run: Run
) -> None:
    stager = Stager(Location(_run_of(folder)), folder.node_dir, rank=0, num_slots=2)
    try:
        stager.standing(is_as_before=False, has_looked=True, whole=None, backoff=Backoff())
        stager.fail("00112233445566aa", None)
        told = [
            stager.standing(is_as_before=True, has_looked=True, whole=None, backoff=Backoff()).given_up
            for _ in range(2)
        ]  # nobody heard of the first
        assert told == [("00112233445566aa",)] * 2
        for _ in range(2):
            stager.give_up(told[0])
            until(lambda: not any(name.startswith("given-up") for name in folder.names()))
    finally:
        stager.close()


def test_files_in_the_making_of_a_killed_process_go_and_those_of_a_living_one_stay(folder: NodeFolder) -> None:
    name, fd = folder.create_unnamed()
    folder.remove_unnamed()
    assert folder.names() == [name]
    file_locks.close(fd)  # as when the process ends
    folder.remove_unnamed()
    assert folder.names() == []


def test_a_slot_that_somebody_fills_is_not_removed_and_a_removed_one_is_not_filled(folder: NodeFolder) -> None:
    with Slot.create(folder, rank=0, nbytes=1) as slot, Slot(folder, slot.name) as other:
        assert slot.take()
        assert not other.remove_if(lambda _: True)
        filled(slot, SlotState.WRITING)
        assert not other.take()
        slot.advance(SlotRecord(SlotState.FREE))
        assert other.remove_if(lambda _: True)
        assert not slot.take()
    assert slot_names(folder) == []


# The arrival of the last file.


def test_a_file_that_is_staged_after_a_commit_was_tried_is_committed_at_once(
    run: Run, saved: Saved, folder: NodeFolder, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_RETRY_S", "_FIRST_RETRY_S"):
        monkeypatch.setattr(daemon, name, 600.0)  # no clock brings it
    late = saved.slots[1]
    contents = late.record.contents
    late.advance(SlotRecord(SlotState.FREE))
    until(lambda: looked(keeper) and bool(keeper._waiting))
    assert states(saved) == {SlotState.SEALED, SlotState.FREE}
    assert late.take()
    late.advance(SlotRecord(SlotState.WRITING, contents))
    late.advance(SlotRecord(SlotState.STAGED, contents))
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.COMMITTED}
    assert_loads(run, saved)


def test_a_slot_that_is_given_up_and_filled_anew_is_not_taken_for_what_it_held(
    run: Run, saved: Saved, folder: NodeFolder, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_FIRST_RETRY_S", 600.0)
    first, late = saved.slots
    contents = late.record.contents
    assert contents is not None
    late.advance(SlotRecord(SlotState.FREE))
    until(lambda: looked(keeper) and bool(keeper._waiting))
    first.refresh()
    first.advance(SlotRecord(SlotState.FREE))  # as the keeper does when it is given up
    assert first.take()
    other = Contents("r", "99", Place(1, 2), 8, 0, 4096, contents.nbytes)

    def cannot_read(*_: object) -> Generation:
        raise StorageError("too many open files", code="storage.memory", action="Close some.")

    monkeypatch.setattr(daemon, "read_generation", cannot_read)  # so the keeper waits with the other checkpoint
    for state in (SlotState.WRITING, SlotState.STAGED, SlotState.SEALED):
        first.advance(SlotRecord(state, other))
    assert late.take()
    late.advance(SlotRecord(SlotState.WRITING, contents))
    late.advance(SlotRecord(SlotState.STAGED, contents))
    until(lambda: not keeper.look() and late.refresh().state == SlotState.COMMITTED)
    assert first.refresh() == SlotRecord(SlotState.SEALED, other)
    assert_loads(run, saved)


# Memory that gives way to the next run.


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "shm", "tmpfs", "size=128m") as memory:
        yield memory


@contextmanager
def kept(folder: NodeFolder, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper at work."""
    command = [sys.executable, "-m", "holdfast.keeper", run, "--node-dir", str(folder.node_dir)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_kept(folder) and "keeper.run" in folder.names())
        yield process
    finally:
        process.kill()
        process.wait()


def fill_memory(folder: NodeFolder, *states: SlotState) -> list[str]:
    """Slots of 40 MiB with their memory, of rank 0, in these states; their names."""
    names = []
    for seq, state in enumerate(states, 1):
        with Slot.create(folder, rank=0, nbytes=40 * MIB) as slot:
            slot.reserve()
            filled(slot, state, seq)
            names.append(slot.name)
    return names


@pytest.mark.parametrize("keeper", ["with a keeper", "without one"])
def test_what_a_finished_run_left_in_memory_gives_way_to_the_next_run_at_once(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    monkeypatch.setattr(arena_module, "_SPARE_NBYTES", 8 * MIB)
    Run.create(PosixStore(str(tmp_path / "first")))
    with ExitStack() as stack:
        finished = stack.enter_context(NodeFolder(str(tmp_path / "first"), node_dir=memory))
        older, newer = fill_memory(finished, SlotState.COMMITTED, SlotState.COMMITTED)
        if keeper == "with a keeper":
            stack.enter_context(kept(finished, str(tmp_path / "first")))
        with NodeFolder("second", node_dir=memory) as folder:
            begun_s = time.monotonic()
            arena = ready(folder, 30 * MIB)
            assert arena.error is None
            assert arena.is_ready
            assert time.monotonic() - begun_s < 10
            assert slot_names(finished) == [newer], "no more than is needed, and the oldest first"
            arena.close()
            assert older not in finished.names()


def test_the_next_job_on_a_node_saves_into_the_memory_that_a_finished_one_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_node(tmp_path) as node_dir:
        for name in ("first", "second"):
            state = {"tensor": torch.ones(18 * MIB, dtype=torch.int8)}  # of two slots for each job there is room once
            with Checkpointer(tmp_path / name, state, memory=Memory(node_dir=node_dir)) as checkpointer:
                for step in (0, 1):
                    checkpointer.save(step).durable.wait(60)
            assert holdfast.open(tmp_path / name).step == 1
        assert "go to storage" not in caplog.text


def test_what_is_not_durable_or_has_a_trainer_gives_no_way(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_SPARE_NBYTES", 8 * MIB)
    with NodeFolder("first", node_dir=memory) as first, NodeFolder("second", node_dir=memory) as folder:
        owed = fill_memory(first, SlotState.SEALED)
        with Claim(first, 0):
            held = fill_memory(first, SlotState.COMMITTED)
            arena = ready(folder, 40 * MIB)
            assert arena.error is not None
            assert arena.error.code == "config.memory"
            arena.close()
            assert slot_names(first) == sorted(owed + held)
        (freed,) = give_way(memory)
        assert freed.nbytes >= 40 * MIB
        assert slot_names(first) == owed


def test_a_keeper_that_is_told_to_end_gives_back_what_is_durable_and_removes_the_folder(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    with kept(folder, run.storage.location.url) as process:
        until(lambda: states(saved) == {SlotState.COMMITTED})
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not folder.path.exists()
    assert_loads(run, saved)


def test_a_trainer_that_comes_while_the_folder_of_its_run_is_removed_makes_it_anew(
    run: Run, folder: NodeFolder
) -> None:
    arena = Arena(folder, rank=0, num_slots=2)
    with kept(folder, run.storage.location.url) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert folder.path.exists(), "a trainer has it"
    arena.close()
    with kept(folder, run.storage.location.url) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not folder.path.exists()
    arena = ready(folder, MIB)
    with NodeFolder(_run_of(folder), node_dir=folder.node_dir) as found:
        assert len(slot_names(found)) == 2
        assert is_claimed(found, 3)
    arena.close()


def test_locks_that_come_when_the_folder_is_removed_are_on_the_one_that_is_made_anew(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = file_locks.try_lock

    def late(*arguments: Any, **options: Any) -> bool:
        monkeypatch.undo()
        shutil.rmtree(folder.path)  # between the opening of the file and its lock
        return lock(*arguments, **options)

    monkeypatch.setattr(file_locks, "try_lock", late)
    with Claim(folder, 3):
        with NodeFolder.at(folder.path) as found:
            assert is_claimed(found, 3)
        monkeypatch.setattr(file_locks, "try_lock", late)
        keeper = try_lock(folder)
        assert keeper is not None
        with NodeFolder.at(folder.path) as found:
            assert is_kept(found)
        os.close(keeper)


def test_a_keeper_whose_lock_was_removed_touches_nothing_of_the_one_that_came_after_it(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    first = try_lock(folder)
    folder.remove("keeper.lock")
    second = try_lock(folder)
    assert first is not None
    assert second is not None
    before = {name for name in folder.names() if not name.startswith("keeper.")}
    daemon.keep(folder, run.storage.location.url, first, is_over=lambda: True, idle_s=60, grace_s=1)
    assert before | {"keeper.lock", "keeper.protocol"} <= set(folder.names())
    assert states(saved) == {SlotState.STAGED}
    for lock in (first, second):
        os.close(lock)


def test_memory_of_another_version_is_listed_and_not_freed(folder: NodeFolder) -> None:
    (name,) = fill_memory(folder, SlotState.COMMITTED)
    with open(folder.path / name, "r+b") as file:
        file.write(b"HFSLOT99" + bytes(4088))
    ((held,),) = (found.slots for found in node_memory(folder.node_dir))
    assert (held.state, held.is_durable) == (None, False)
    assert held.nbytes >= 40 * MIB
    assert give_way(folder.node_dir) == []
    assert slot_names(folder) == [name]
