"""Any process that finds all files of a checkpoint sound may commit it; all of them write the same bytes."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest

from holdfast.errors import CorruptError, FencedError, HoldfastError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Commit, Place
from holdfast.run.complete import check_files, complete, read_manifest, seal_and_commit
from holdfast.run.history import Run
from holdfast.run.removal import abandon, remove_checkpoint
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, check, data_file, names, publish_manifest, save, write, write_data


@pytest.fixture(params=["memory", "posix"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    storage: Store = MemoryStore() if request.param == "memory" else open_store(Location(str(tmp_path / "run")))
    run = Run.create(storage)
    begin(run)
    return run


def replace(run: Run, key: str, data: bytes) -> None:
    """Bytes change on their own."""
    assert run.storage.delete(key)
    run.storage.create(key, data)


def test_a_checkpoint_with_all_files_and_nothing_else_is_sealed_and_committed(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    assert run.head() is None
    commit = complete(run, folder)
    assert (commit.place, commit.step, commit.checkpoint, commit.metrics) == (Place(1, 1), 7, folder, {"loss": 0.5})
    assert run.head() == commit
    check(run, commit)


def test_a_sealed_checkpoint_is_committed_and_a_committed_one_stays_as_it_is(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    first = complete(run, folder)
    keys = [records.checkpoint_key(folder, records.SEAL_NAME), records.commit_key(first.place)]
    before = [run.storage.read(key) for key in keys]
    run.storage.delete(keys[1])
    assert complete(run, folder) == first
    assert complete(run, folder) == first
    assert [run.storage.read(key) for key in keys] == before


def test_finishers_that_race_give_the_same_commit(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    barrier = Barrier(4)
    commits: list[Commit] = []

    def finish() -> None:
        barrier.wait()
        commits.append(complete(run, folder, deep=False))

    threads = [Thread(target=finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert commits == [run.head()] * 4


def test_it_lands_at_its_own_place_and_never_displaces_a_newer_head(run: Run) -> None:
    late = write(run, Place(1, 1), 7)
    newer = save(run, Place(1, 2), 8)
    assert complete(run, late).place == Place(1, 1)
    assert run.head() == newer
    assert [commit.step for commit in run.lineage()] == [8, 7]


def test_missing_files_are_named_and_nothing_is_sealed(run: Run) -> None:
    folder = publish_manifest(run, Place(1, 1), 7)
    write_data(run, folder, 0)
    with pytest.raises(NotFoundError, match=r"data-00001\.safetensors is missing") as caught:
        complete(run, folder)
    assert caught.value.code == "not_found.file"
    assert names(run, folder) == ["data-00000.safetensors", "manifest.hfm"]
    with pytest.raises(NotFoundError, match=r"manifest\.hfm is missing") as caught:
        complete(run, records.folder_name(1, "0" * 16))
    assert caught.value.code == "not_found.file"
    assert run.head() is None


def test_a_file_that_is_cut_or_of_another_checkpoint_is_refused(run: Run) -> None:
    folder, other = write(run, Place(1, 1), 7), write(run, Place(1, 2), 7)
    key = records.checkpoint_key(folder, "data-00001.safetensors")
    sound = data_file(run, folder, 1)
    for bad in (sound[:-1], sound + b"\0", data_file(run, other, 1), bytes(len(sound))):
        replace(run, key, bad)
        with pytest.raises(CorruptError, match=r"data-00001\.safetensors"):
            complete(run, folder, deep=False)
    assert run.head() is None


def test_a_flipped_bit_of_data_is_found_by_reading_the_data(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    key = records.checkpoint_key(folder, "data-00001.safetensors")
    data = bytearray(data_file(run, folder, 1))
    data[-1] ^= 1
    replace(run, key, bytes(data))
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors.*digest"):
        complete(run, folder)
    assert run.head() is None


def test_a_folder_that_was_renamed_or_is_of_another_run_is_refused(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    renamed = records.folder_name(8, "ab" * 8)
    for name in names(run, folder):
        data = run.storage.read(records.checkpoint_key(folder, name))
        run.storage.create(records.checkpoint_key(renamed, name), data)
    with pytest.raises(CorruptError, match="renamed") as caught:
        complete(run, renamed)
    assert caught.value.code == "corrupt.folder"
    stranger = Run.create(MemoryStore())
    for name in names(run, folder):
        key = records.checkpoint_key(folder, name)
        stranger.storage.create(key, run.storage.read(key))
    with pytest.raises(CorruptError, match="another run") as caught:
        complete(stranger, folder)
    assert caught.value.code == "corrupt.run"


def test_what_was_given_up_cannot_be_sealed_by_a_writer_that_wakes_up_later(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    stored = read_manifest(run, folder)
    found = check_files(run, stored, deep=False)
    abandon(run, folder)
    with pytest.raises(FencedError, match="given up") as caught:
        seal_and_commit(run, stored, found)
    assert caught.value.code == "fenced.given_up"
    assert (run.places(), names(run, folder)) == ([], ["seal.json"])


def test_what_was_removed_stays_so_even_when_its_files_come_back(run: Run) -> None:
    removed = save(run, Place(1, 1), 7)
    head = save(run, Place(1, 2), 8)
    keys = [records.checkpoint_key(removed.checkpoint, name) for name in names(run, removed.checkpoint)]
    files = {key: run.storage.read(key) for key in keys}
    remove_checkpoint(run, removed)
    for key, data in files.items():
        run.storage.create(key, data)
    with pytest.raises(FencedError, match="removed") as caught:
        complete(run, removed.checkpoint)
    assert caught.value.code == "fenced.given_up"
    run.publish(removed)
    assert list(run.lineage()) == [head]


def test_a_seal_that_is_not_that_of_the_files_is_not_committed(run: Run) -> None:
    folder = write(run, Place(1, 1), 7)
    other = save(run, Place(1, 2), 8)
    seal = run.storage.read(records.checkpoint_key(other.checkpoint, records.SEAL_NAME))
    run.storage.create(records.checkpoint_key(folder, records.SEAL_NAME), seal)
    with pytest.raises(HoldfastError, match="does not seal the files") as caught:
        complete(run, folder)
    assert caught.value.code == "corrupt.seal"
    assert run.places() == [Place(1, 2)]
