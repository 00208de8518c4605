"""The keeper as a process: it makes staged snapshots durable, whichever process dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import ConfigurationError
from holdfast.format.manifest import file_name
from holdfast.format.records import Commit, FileSeal, Place
from holdfast.keeper import daemon, writing
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.daemon import Keeper
from holdfast.keeper.log import LIMIT_NBYTES
from holdfast.keeper.persist import Sealing, persist
from holdfast.node_memory import file_locks
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.generations import generation_ids
from holdfast.node_memory.keeper_lock import is_kept, is_unwanted, open_lock, require_signer, try_lock
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotRecord, SlotState, slot_names
from holdfast.run.history import Run
from holdfast.signing import KEYS
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.keeper.test_persist import Saved, assert_loads
from tests.support.keepers import keeper_of
from tests.support.nursery import until


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(PosixStore(str(tmp_path / "run")))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    (tmp_path / "node").mkdir()
    with NodeFolder(str(tmp_path / "run"), node_dir=tmp_path / "node") as folder:
        yield folder


@pytest.fixture
def saved(run: Run, folder: NodeFolder) -> Iterator[Saved]:
    """A checkpoint of two ranks of this node, staged."""
    with ExitStack() as stack:
        yield Saved(run, [folder, folder], stack)


@pytest.fixture
def started(folder: NodeFolder, run: Run) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts keepers of `folder`; those that are left are killed."""
    with ExitStack() as stack:

        def start(*options: str) -> subprocess.Popen[bytes]:
            node_dir = str(folder.path.parent.parent)
            command = [
                sys.executable,
                "-m",
                "holdfast.keeper",
                run.storage.location.url,
                "--node-dir",
                node_dir,
                *options,
            ]
            process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def states(saved: Saved) -> set[SlotState]:
    return {slot.refresh().state for slot in saved.slots}


def test_what_is_staged_is_committed_by_itself(
    run: Run, saved: Saved, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    started()
    until(lambda: states(saved) == {SlotState.COMMITTED})
    assert_loads(run, saved)


def test_a_keeper_that_is_killed_is_replaced_by_one_that_goes_on(
    run: Run, saved: Saved, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    for delay_s in (0.1, 0.2, 0.3, 0.4):
        keeper = started()
        time.sleep(delay_s)
        keeper.kill()
        keeper.wait()
    started()
    until(lambda: states(saved) == {SlotState.COMMITTED})
    assert_loads(run, saved)


def test_on_sigterm_it_persists_first(
    run: Run, saved: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    keeper = started()
    until(lambda: is_kept(folder))
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    assert states(saved) == {SlotState.COMMITTED}
    assert_loads(run, saved)


def test_two_keepers_are_one(folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]) -> None:
    first = started()
    until(lambda: is_kept(folder))
    second = started()
    assert second.wait(30) == 0
    assert first.poll() is None


def test_a_keeper_may_open_more_files_than_the_trainer_that_starts_it(
    folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """With the limit of its trainer, it ended when slots, copies and connections were too many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        keeper = started()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: is_kept(folder))
    assert resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)


def test_an_idle_keeper_ends(folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]) -> None:
    keeper = started("--idle-s", "0.2")
    assert keeper.wait(30) == 0
    assert not is_kept(folder)


def test_it_stays_while_a_trainer_lives(
    saved: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    with Claim(folder, 0):
        keeper = started("--idle-s", "0.2")
        until(lambda: states(saved) == {SlotState.COMMITTED})
        time.sleep(1.0)
        assert keeper.poll() is None
    assert keeper.wait(30) == 0


def test_asking_for_a_keeper_starts_one_that_outlives_who_asked(folder: NodeFolder, run: Run) -> None:
    script = (
        "import sys; from pathlib import Path; from holdfast.keeper.client import ensure_keeper;"
        "from holdfast.node_memory.node_folder import NodeFolder;"
        "ensure_keeper(NodeFolder(sys.argv[2], node_dir=Path(sys.argv[1])), sys.argv[2])"
    )
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        subprocess.run(
            [sys.executable, "-c", script, str(folder.path.parent.parent), run.storage.location.url],
            check=True,
            close_fds=False,
        )
    assert is_kept(folder)
    keeper = keeper_of(folder.path)
    try:
        assert os.getsid(keeper) != os.getsid(0)
        open_files = {Path(f"/proc/{keeper}/fd/{fd}").resolve() for fd in os.listdir(f"/proc/{keeper}/fd")}
        assert all(
            path == Path(os.devnull) or path.is_relative_to(folder.path) or not path.exists() for path in open_files
        )
        maps = Path(f"/proc/{keeper}/maps").read_text()
        assert "libtorch" not in maps
        ensure_keeper(folder, run.storage.location.url)  # there is one
    finally:
        os.kill(keeper, signal.SIGTERM)
        until(lambda: not is_kept(folder))


def test_a_keeper_that_cannot_start_says_why(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigurationError, match=r"did not start .status 1.") as caught:
        ensure_keeper(folder, "run")
    assert caught.value.code == "config.keeper"


def test_a_keeper_of_another_version_makes_durable_what_is_there_and_gives_way(
    run: Run, saved: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    other = started()
    until(lambda: is_kept(folder))
    first = keeper_of(folder.path)
    until((folder.path / "keeper.protocol").exists)
    (folder.path / "keeper.protocol").write_text("0\n")  # as one of that version would have written
    ensure_keeper(folder, run.storage.location.url)
    assert other.wait(60) == 0
    assert states(saved) == {SlotState.COMMITTED}
    until(lambda: keeper_of(folder.path) != first)
    os.kill(keeper_of(folder.path), signal.SIGKILL)


def test_a_keeper_without_keys_makes_durable_what_is_there_and_gives_way_to_one_with_keys(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    started: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = started()
    until(lambda: is_kept(folder))
    first = keeper_of(folder.path)
    monkeypatch.setenv(KEYS, "ab" * 32)
    ranks = [threading.Thread(target=ensure_keeper, args=(folder, run.storage.location.url)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert other.wait(20) == 0
    assert states(saved) == {SlotState.COMMITTED}
    until(lambda: keeper_of(folder.path) != first)
    second = keeper_of(folder.path)
    monkeypatch.delenv(KEYS)
    ensure_keeper(folder, run.storage.location.url)  # a job without keys takes any keeper
    monkeypatch.setenv(KEYS, "cd" * 32)
    ensure_keeper(folder, run.storage.location.url)
    assert keeper_of(folder.path) == second
    os.kill(second, signal.SIGKILL)


def test_a_keeper_with_keys_stays_while_others_ask_for_one_that_has_some(
    run: Run, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = try_lock(folder)  # of a keeper that does not end
    assert without is not None
    with pytest.raises(ConfigurationError, match="holdfast node RUN --stop") as caught:
        require_signer(folder, timeout_s=0.1)
    assert caught.value.code == "config.signing_key"
    os.close(without)
    signer = try_lock(folder, signs=True)
    assert signer is not None
    require_signer(folder, timeout_s=0)
    with NodeFolder.at(folder.path) as asker:
        fd = open_lock(asker)
        assert file_locks.try_lock(fd, 3, shared=True)  # as one that asked the keeper of before, and still does
        assert not is_unwanted(signer, signs=True)
        assert is_unwanted(signer, signs=False)
        file_locks.close(fd)
    os.close(signer)


def test_what_another_version_staged_and_could_not_make_durable_is_left_and_said(
    run: Run, saved: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    os.close(folder.create("keeper.protocol"))
    (folder.path / "keeper.protocol").write_text("0\n")
    with pytest.raises(
        ConfigurationError, match=r"Another version of holdfast .* \(protocol 0; this one has"
    ) as caught:
        ensure_keeper(folder, run.storage.location.url)
    assert caught.value.code == "config.keeper_version"
    assert states(saved) == {SlotState.STAGED}
    assert started().wait(30) == 2


def test_what_no_version_understands_is_removed(run: Run, saved: Saved, folder: NodeFolder) -> None:
    os.close(folder.create("slot-9-0123456789abcdef"))
    (folder.path / "slot-9-0123456789abcdef").write_bytes(bytes(4 << 20))
    keeper = Keeper(folder)
    keeper.look()
    assert "slot-9-0123456789abcdef" not in folder.names()
    keeper.close()


def test_a_keeper_takes_little_memory(
    saved: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    keeper = started()
    until(lambda: states(saved) == {SlotState.COMMITTED})
    text = Path(f"/proc/{keeper.pid}/smaps_rollup").read_text()
    private = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")]
    assert 0 < sum(private) << 10 < 60 << 20


def test_a_store_that_fails_is_told_in_the_slots_and_tried_again(
    run: Run, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: NodeFolder
) -> None:
    monkeypatch.setattr(daemon, "_RETRY_S", 0.0)
    (tmp_path / "run").rename(tmp_path / "away")
    keeper = Keeper(folder)
    until(lambda: bool(keeper.look() and saved.slots[0].refresh().error))
    assert str(tmp_path / "run") in saved.slots[0].record.error
    assert states(saved) == {SlotState.SEALED}
    (tmp_path / "away").rename(tmp_path / "run")
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.COMMITTED}
    assert not saved.slots[0].record.error
    keeper.close()


def test_what_is_fenced_is_given_up_with_the_reason(run: Run, saved: Saved, folder: NodeFolder) -> None:
    run.open_epoch(after=1, opened_from=None, why="start", world_size=2, incarnation="1" * 32)
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.FENCED}
    assert "epoch" in saved.slots[0].record.error
    keeper.close()


def test_generations_are_forgotten_when_their_slots_are_filled_anew(run: Run, saved: Saved, folder: NodeFolder) -> None:
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    assert generation_ids(folder) == [saved.generation.checkpoint_id]
    for slot in saved.slots:
        contents = slot.refresh().contents
        assert slot.take()
        slot.advance(SlotRecord(SlotState.WRITING, contents))
    keeper.look()
    assert generation_ids(folder) == [saved.generation.checkpoint_id]  # they are about to be of it again
    for slot in saved.slots:
        slot.advance(SlotRecord(SlotState.FREE))
    keeper.look()
    assert generation_ids(folder) == []
    keeper.close()


def test_what_is_staged_of_nothing_that_is_known_is_given_up(saved: Saved, folder: NodeFolder) -> None:
    (folder.path / f"generation-{saved.generation.checkpoint_id}").unlink()
    keeper = Keeper(folder)
    keeper.look()
    assert states(saved) == {SlotState.FREE}
    keeper.close()


def test_a_slow_store_does_not_keep_newer_snapshots_from_being_sealed(
    run: Run, saved: Saved, folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(folder)
    go_on = threading.Event()

    def slowly(*_: object) -> Commit | None:
        go_on.wait()
        return None

    monkeypatch.setattr(writing, "commit", slowly)
    until(lambda: keeper.look() and states(saved) == {SlotState.SEALED})
    with Slot.create(folder, rank=7, nbytes=saved.slots[0].nbytes) as slot:
        contents = saved.slots[0].record.contents
        slot.data[:] = saved.slots[0].data
        assert slot.take()
        slot.advance(SlotRecord(SlotState.WRITING, contents))
        slot.advance(SlotRecord(SlotState.STAGED, contents))
        until(lambda: keeper.look() and slot.refresh().state == SlotState.SEALED)
        monkeypatch.undo()
        go_on.set()
        until(lambda: not (keeper.look() or keeper.owes))
        assert states(saved) == {SlotState.COMMITTED}
    keeper.close()


def test_a_keeper_does_not_spin_while_one_of_two_files_is_on_its_way(
    run: Run, saved: Saved, folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, stuck = threading.Event(), saved.slots[1].name

    def slowly(
        storage: TimedStore, sealing: Sealing, slot: Slot, *, await_seal: Callable[[], None]
    ) -> tuple[FileSeal, ...]:
        if slot.name == stuck:
            go_on.wait()
        return persist(storage, sealing, slot, await_seal=await_seal)

    monkeypatch.setattr(writing, "persist", slowly)
    keeper = Keeper(folder)
    looks: list[float] = []

    def is_over() -> bool:
        looks.append(time.monotonic())
        return looks[-1] > looks[0] + 1.5

    keeper.run(is_over=is_over, idle_s=60)
    assert sum(at > looks[0] + 0.75 for at in looks) < 10
    go_on.set()
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.COMMITTED}
    keeper.close()


def test_a_file_that_was_there_before_is_looked_at_before_the_commit(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    sealing = Sealing(saved.generation)
    contents = saved.slots[0].record.contents
    assert contents is not None
    path = run.storage.path(sealing.stored.key(file_name(contents.file)))
    Path(path).parent.mkdir(parents=True)
    Path(path).write_bytes(bytes(contents.nbytes))  # of the right size, and nothing else
    keeper = Keeper(folder)
    until(lambda: keeper.look() and "header" in saved.slots[0].refresh().error)
    assert run.head() is None
    Path(path).unlink()
    until(lambda: not (keeper.look() or keeper.owes))
    keeper.close()
    assert_loads(run, saved)


def test_a_file_that_was_there_before_and_is_gone_at_the_commit_is_written_at_the_next_try(
    run: Run, saved: Saved
) -> None:
    sealing = Sealing(saved.generation)
    contents = saved.slots[0].record.contents
    assert contents is not None
    path = Path(run.storage.path(sealing.stored.key(file_name(contents.file))))
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(contents.nbytes))
    for slot in saved.slots:
        sealing.seal(slot)
    with ThreadPoolExecutor(2) as pool:
        moved = writing.Writing(sealing, pool)
        for slot in saved.slots:
            moved.join(writing.StagedFiles(slot))
        until(lambda: len(moved.pending) > 1 and all(file.done() for file in moved.pending))
        path.unlink()
        until(moved.is_over)
        assert not moved.outcome()
        moved.retry([writing.StagedFiles(slot) for slot in saved.slots])
        until(moved.is_over)
        assert moved.outcome()
        moved.close()
    assert_loads(run, saved)


def test_a_slot_shows_that_somebody_has_changed_it(saved: Saved, folder: NodeFolder) -> None:
    with Slot(folder, saved.slots[0].name) as slot:
        assert not slot.has_changed()
        saved.slots[0].advance(SlotRecord(SlotState.FREE))
        assert slot.has_changed()
        assert slot.refresh().state == SlotState.FREE
        assert not slot.has_changed()


def test_one_process_alone_has_the_lock(folder: NodeFolder) -> None:
    assert not is_kept(folder)
    lock = try_lock(folder)
    assert lock is not None
    assert is_kept(folder)
    assert try_lock(folder) is None
    os.close(lock)
    assert not is_kept(folder)


@pytest.mark.parametrize("is_left_empty", [True, False])
def test_a_keeper_stays_for_trainers_to_come_but_not_where_they_left_no_slot(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch, *, is_left_empty: bool
) -> None:
    # An evaluation, which only restores, left a keeper behind for half an hour.
    monkeypatch.setattr(daemon, "_LEFT_EMPTY_S", 0.2)
    begin = time.monotonic()
    end = begin + (30.0 if is_left_empty else 1.0)
    claim = Claim(folder, 0) if is_left_empty else None
    keeper = Keeper(folder)

    def is_over() -> bool:
        if claim is not None and time.monotonic() > begin + 0.2:
            claim.close()
        return time.monotonic() > end

    keeper.run(is_over=is_over, idle_s=60)
    assert (time.monotonic() < end) == is_left_empty
    keeper.close()


def test_what_nobody_comes_back_for_is_given_up_after_a_day(
    run: Run, saved: Saved, folder: NodeFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "_RETRY_S", 0.1)
    saved.slots.pop().remove()  # the other node held it: that node is gone
    (slot,) = saved.slots
    keeper = Keeper(folder)
    until(lambda: keeper.look() and slot.refresh().state == SlotState.SEALED)
    end = time.monotonic() + 1.0
    keeper.run(is_over=lambda: time.monotonic() > end, idle_s=0.2)
    assert slot.refresh().state == SlotState.SEALED, "as long as a day is not over"
    keeper.run(is_over=lambda: False, idle_s=0.2, orphaned_s=0.5)
    assert "trainer did not return" in caplog.text
    assert slot_names(folder) == []
    keeper.close()


def test_an_idle_keeper_gives_the_memory_back_but_not_what_is_not_durable(
    run: Run, saved: Saved, folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(folder)
    keeper.look()
    keeper.give_back()
    assert len(slot_names(folder)) == 2  # being sealed, and written
    until(lambda: not (keeper.look() or keeper.owes))
    keeper.give_back()
    assert slot_names(folder) == generation_ids(folder) == []
    keeper.close()


def test_slots_of_ranks_that_are_no_more_go_when_others_have_a_later_checkpoint(
    run: Run, saved: Saved, folder: NodeFolder
) -> None:
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    _, new = saved.slots
    claim = Claim(folder, new.rank)
    keeper.look()
    assert len(slot_names(folder)) == 2  # of one checkpoint
    contents = new.refresh().contents
    assert contents is not None
    later = msgspec.structs.replace(contents, place=Place(1, 2))
    assert new.take()
    for state in (SlotState.WRITING, SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED):
        new.advance(SlotRecord(state, later))
    keeper.look()
    assert slot_names(folder) == [new.name]
    claim.close()
    keeper.close()


def test_the_command_keeps_a_run(run: Run, saved: Saved, folder: NodeFolder) -> None:
    node_dir = str(folder.path.parent.parent)
    command = [sys.executable, "-m", "holdfast.cli", "keeper", run.storage.location.url, "--node-dir", node_dir]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: states(saved) == {SlotState.COMMITTED})
        process.terminate()
        assert process.wait(30) == 0
    assert_loads(run, saved)


def test_the_log_of_a_keeper_does_not_grow_without_a_limit(tmp_path: Path) -> None:
    script = (
        "import logging; from holdfast.keeper.log import BoundedLog;"
        "logging.basicConfig(level=logging.INFO, handlers=[BoundedLog(is_bounded=True)]);"
        "[logging.info('line %d %s', number, 'x' * 400) for number in range(10_000)]"
    )
    with (tmp_path / "keeper.log").open("a+b") as log:
        subprocess.run([sys.executable, "-c", script], check=True, stderr=log)
    text = (tmp_path / "keeper.log").read_text()
    assert len(text) <= LIMIT_NBYTES
    lines = text.splitlines()
    assert lines[0] == "(older lines were removed)"
    assert "line 9999" in lines[-1]


def test_the_same_trouble_with_storage_is_logged_once(
    run: Run,
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: NodeFolder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(daemon, "_RETRY_S", 0.0)
    (tmp_path / "run").rename(tmp_path / "away")
    keeper = Keeper(folder)
    until(lambda: bool(keeper.look() and saved.slots[0].refresh().error))
    end = time.monotonic() + 0.5
    keeper.run(is_over=lambda: time.monotonic() > end, idle_s=60)
    (tmp_path / "away").rename(tmp_path / "run")
    until(lambda: not (keeper.look() or keeper.owes))
    keeper.close()
    assert caplog.text.count("no holdfast run at") == 1


@pytest.mark.parametrize("kind", ["lost", "garbage"])
def test_a_sealed_slot_of_nothing_that_is_known_is_given_up(saved: Saved, folder: NodeFolder, kind: str) -> None:
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
    path = folder.path / f"generation-{saved.generation.checkpoint_id}"
    if kind == "lost":
        path.unlink()
    else:
        path.write_bytes(bytes(4096))
    keeper = Keeper(folder)
    keeper.look()
    assert states(saved) == {SlotState.FREE}
    assert not keeper.owes
    keeper.close()
