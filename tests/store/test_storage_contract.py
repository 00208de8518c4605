"""The storage contract, call by call: each promise of `storage.base` that a mutation of a backend breaks."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store import helpers as helpers_module
from holdfast.store import posix
from holdfast.store.memory import FilesInMemory, MemoryFile
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.io.test_io import eventually, hanging, helpers
from tests.store.test_posix_storage import BLOCK, aligned, files_below, random_bytes
from tests.support.faulty_storage import FaultyStore

#: An operation on files, and what it was done to.
Operation = tuple[str, str]


@pytest.fixture
def storage(tmp_path: Path) -> PosixStore:
    return PosixStore(str(tmp_path / "run"))


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The operations of the backend on files and folders from now on, in order."""
    done: list[Operation] = []
    fsync, link, unlink = os.fsync, os.link, os.unlink

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(("fsync", "temporary" if ".tmp-" in path else path))

    def recorded_link(old: str, new: str) -> None:
        link(old, new)
        done.append(("link", new))

    def recorded_unlink(path: str) -> None:
        unlink(path)
        if ".tmp-" not in path:
            done.append(("unlink", path))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    monkeypatch.setattr(os, "unlink", recorded_unlink)
    return done


def published(storage: PosixStore, key: str, data: bytes) -> None:
    writer = storage.writer(key, nbytes=len(data))
    writer.write_at(0, np.frombuffer(data, np.uint8))
    writer.publish(len(data))


@pytest.mark.parametrize("way", ["create", "publish"])
def test_the_bytes_are_durable_before_the_name_and_the_name_before_the_return(
    storage: PosixStore, operations: list[Operation], way: str
) -> None:
    storage.create("folder/first", b"")  # makes the folders
    operations.clear()
    storage.create("folder/object", b"x") if way == "create" else published(storage, "folder/object", b"x")
    path = storage.path("folder/object")
    assert operations == [("fsync", "temporary"), ("link", path), ("fsync", os.path.dirname(path))]


def test_a_deletion_is_durable_on_return(storage: PosixStore, operations: list[Operation]) -> None:
    storage.create("folder/object", b"x")
    operations.clear()
    assert storage.delete("folder/object")
    path = storage.path("folder/object")
    assert operations == [("unlink", path), ("fsync", os.path.dirname(path))]
    assert not storage.delete("folder/object")
    assert operations[2:] == []


def test_with_its_last_object_the_folder_of_a_checkpoint_goes_and_no_other(storage: PosixStore) -> None:
    for key in ("checkpoints/one/a", "checkpoints/one/b", "epochs/a"):
        storage.create(key, b"")
    storage.delete("checkpoints/one/a")
    assert os.path.isdir(storage.path("checkpoints/one"))
    storage.delete("checkpoints/one/b")
    storage.delete("epochs/a")
    assert not os.path.exists(storage.path("checkpoints/one"))
    assert os.path.isdir(storage.path("checkpoints"))
    assert os.path.isdir(storage.path("epochs"))


@pytest.mark.parametrize("way", ["create", "publish"])
def test_a_link_that_was_made_and_then_refused_was_made(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    # NFS repeats a call whose answer was lost.
    link = os.link

    def repeated(old: str, new: str) -> None:
        link(old, new)
        link(old, new)

    monkeypatch.setattr(os, "link", repeated)
    if way == "create":
        assert storage.create("object", b"x")
    else:
        published(storage, "object", b"x")
    monkeypatch.undo()
    assert storage.read("object") == b"x"
    assert files_below(tmp_path) == {"run/object"}


def test_without_links_an_object_gets_its_name_by_a_rename_that_never_replaces(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    assert storage.create("object", b"first")
    assert not storage.create("object", b"second")
    published(storage, "other", b"third")
    with pytest.raises(StorageError, match=r"storage\.exists"):
        published(storage, "other", b"fourth")
    assert (storage.read("object"), storage.read("other")) == (b"first", b"third")
    gc.collect()
    assert {name for name in files_below(tmp_path) if ".tmp-" not in name} == {"run/object", "run/other"}


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_knows_no_fsync_is_no_error_and_one_that_fails_is(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    storage.create("folder/first", b"")
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for make in (lambda: storage.create("folder/a", b"x"), lambda: published(storage, "folder/b", b"x")):
        if is_told:
            with pytest.raises(StorageError, match=r"storage\.io"):
                make()
        else:
            make()


def test_above_a_root_that_is_there_no_rights_are_needed_and_below_it_they_are(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    denied = {str(tmp_path)}
    fsync_folder = posix._fsync_folder

    def checked(folder: str) -> None:
        if folder in denied:
            raise PermissionError(errno.EACCES, "Permission denied")
        fsync_folder(folder)

    monkeypatch.setattr(posix, "_fsync_folder", checked)
    assert storage.create("folder/object", b"")
    denied.add(str(tmp_path / "run"))
    with pytest.raises(StorageError, match=r"storage\.denied"):
        storage.create("other/object", b"")


def test_leftovers_are_those_of_a_folder_that_nobody_has_written_to_for_so_long(storage: PosixStore) -> None:
    storage.create("folder/object", b"")
    young, old = storage.writer("folder/a", nbytes=1), storage.writer("folder/b", nbytes=1)
    names = sorted(name for name in os.listdir(storage.path("folder")) if name != "object")
    assert storage.leftovers("folder") == names
    assert [storage.nbytes(f"folder/{name}") is not None for name in (*names, ".tmp-other")] == [True, True, False]
    assert storage.leftovers("folder", older_than_s=60) == []
    then = time.time() - 90
    os.utime(old._temporary, (then, then))
    assert storage.leftovers("folder", older_than_s=60) == [os.path.basename(old._temporary)]
    assert storage.leftovers("folder", older_than_s=120) == []
    assert storage.leftovers("nowhere") == []
    for writer in (young, old):
        writer.abort()


def test_an_object_that_is_larger_than_it_can_be_is_not_read(storage: PosixStore) -> None:
    storage.create("object", b"0123456789")
    assert storage.read("object", limit=10) == b"0123456789"
    with pytest.raises(CorruptError, match="may have at most 9") as caught:
        storage.read("object", limit=9)
    assert caught.value.code == "corrupt.size"


def test_a_pipe_under_the_name_of_an_object_is_none_and_nobody_waits_for_it(storage: PosixStore) -> None:
    storage.create("folder/object", b"")
    os.mkfifo(storage.path("folder/pipe"))
    assert storage.nbytes("folder/pipe") is None
    for read in (storage.read, storage.reader):
        with pytest.raises(NotFoundError):
            read("folder/pipe")


def test_a_writer_that_could_not_be_made_leaves_nothing(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(posix, "reserve", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match=r"storage\.full"):
        storage.writer("object", nbytes=10)
    assert files_below(tmp_path) == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_direct_transfers_that_are_refused_go_through_the_page_cache(
    storage: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    content = aligned(2 * BLOCK)
    content[:] = random_bytes(len(content))
    pwrite, preadv = os.pwrite, os.preadv

    def is_direct(descriptor: int) -> bool:
        flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        return bool(int(flags, 8) & os.O_DIRECT)

    def refusing_write(descriptor: int, data: object, offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)  # type: ignore[arg-type]

    def refusing_read(descriptor: int, buffers: list[object], offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)  # type: ignore[arg-type]

    writer = storage.writer("object", nbytes=len(content))
    if writer.alignment == 1:
        pytest.skip("there is no direct I/O here")
    monkeypatch.setattr(os, "pwrite", refusing_write)
    monkeypatch.setattr(os, "preadv", refusing_read)
    writer.write_at(0, content)
    assert writer.alignment == 1
    writer.publish(len(content))
    reader = storage.reader("object")
    out = aligned(len(content))
    reader.read_at(0, out)
    reader.close()
    assert out.tobytes() == content.tobytes()
    assert "direct I/O was refused" in caplog.text


# Objects in memory.


@pytest.fixture
def memory() -> FilesInMemory:
    found = FilesInMemory("memory of rank 3")
    for name in ("b", "a"):
        found.add(name, MemoryFile(random_bytes(10, seed=ord(name)), path=f"memory of rank 3/{name}"))
    return found


def test_memory_is_read_like_any_storage(memory: FilesInMemory) -> None:
    content = random_bytes(10, seed=ord("a")).tobytes()
    assert memory.list("") == ["a", "b"]
    assert memory.list("folder") == memory.leftovers("") == []
    assert (memory.nbytes("a"), memory.nbytes("none")) == (10, None)
    assert memory.read("a") == content
    assert memory.read("a", start=3) == content[3:]
    assert memory.read("a", start=3, nbytes=4) == content[3:7]
    out = np.zeros(4, np.uint8)
    memory.reader("a").read_at(6, out)
    assert out.tobytes() == content[6:]
    with pytest.raises(NotFoundError, match="memory of rank 3/none") as caught:
        memory.reader("none")
    assert caught.value.code == "not_found.object"


@pytest.mark.parametrize("start", [7, 10, 11])
def test_memory_that_ends_too_early_is_corruption(memory: FilesInMemory, start: int) -> None:
    out = np.zeros(4, np.uint8)
    with pytest.raises(CorruptError, match=f"ends at byte 10 instead of {start + 4}") as caught:
        memory.reader("a").read_at(start, out)
    assert caught.value.code == "corrupt.short"
    assert not out.any()
    with pytest.raises(CorruptError):
        memory.read("a", start=start, nbytes=4)


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.create("c", b""),
        lambda memory: memory.writer("c", nbytes=1),
        lambda memory: memory.delete("a"),
    ],
)
def test_memory_that_is_shown_as_a_storage_is_not_changed(
    memory: FilesInMemory, change: Callable[[FilesInMemory], object]
) -> None:
    with pytest.raises(StorageError) as caught:
        change(memory)
    assert caught.value.code == "storage.read_only"
    assert memory.list("") == ["a", "b"]


# Stores that are not waited for longer than agreed.

LIMIT_S = 0.2


def descriptors_of(path: str) -> int:
    """Descriptors of this process that are open for files below `path`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(path)
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize("name", ["writer", "reader"])
def test_a_file_that_is_opened_too_late_is_dropped(
    storage: PosixStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers_module, "_IDLE_S", 600.0)  # none ends because it has nothing to do
    storage.create("object", b"x")
    faulty, hang = hanging(storage, name, when="after")
    with TimedStore(faulty, timeout_s=LIMIT_S) as timed, pytest.raises(StorageError, match=r"storage\.timeout"):
        timed.writer("other", nbytes=1) if name == "writer" else timed.reader("object")
    assert descriptors_of(storage.location.url) > 0
    hang.release()
    assert eventually(lambda: helpers() == 0)
    gc.collect()
    assert descriptors_of(storage.location.url) == 0
    assert os.listdir(storage.location.url) == ["object"]


@pytest.mark.parametrize("name", ["write_at", "read_at"])
def test_a_file_stays_open_until_the_request_that_hangs_has_ended(storage: PosixStore, name: str) -> None:
    storage.create("object", b"0123")
    faulty, hang = hanging(storage, name)
    with TimedStore(faulty, timeout_s=LIMIT_S) as timed:
        if name == "write_at":
            writer = timed.writer("other", nbytes=4)
            with pytest.raises(StorageError, match=r"storage\.timeout"):
                writer.write_at(0, random_bytes(4))
            writer.abort()
        else:
            reader = timed.reader("object")
            assert reader.memory is None
            with pytest.raises(StorageError, match=r"storage\.timeout"):
                reader.read_at(0, np.zeros(4, np.uint8))
            reader.close()
        time.sleep(0.2)  # in which it would be closed
        assert descriptors_of(storage.location.url) > 0, "its number could be another file's by now"
        hang.release()
        assert eventually(lambda: descriptors_of(storage.location.url) == 0)
    assert eventually(lambda: helpers() == 0)
    assert os.listdir(storage.location.url) == ["object"]


def test_no_direct_request_begins_when_the_time_is_up(storage: PosixStore) -> None:
    storage.create("object", b"0123")
    with TimedStore(storage, timeout_s=LIMIT_S) as timed:
        writer, reader = timed.limit.direct_writer(timed, "other", nbytes=4), timed.limit.direct_reader(timed, "object")
        time.sleep(1.5 * LIMIT_S)
        for ask in (
            lambda: writer.write_at(0, random_bytes(4)),
            lambda: writer.publish(4),
            lambda: reader.read_at(0, np.zeros(4, np.uint8)),
            lambda: timed.limit.direct_writer(timed, "third", nbytes=4),
            lambda: timed.limit.direct_reader(timed, "object"),
        ):
            with pytest.raises(StorageError, match=r"storage\.timeout"):
                ask()
        writer.abort()
        reader.close()
    assert os.listdir(storage.location.url) == ["object"]


def test_what_was_given_up_is_stopped_and_asks_for_nothing_more(storage: PosixStore) -> None:
    faulty, hang = hanging(storage, "list")
    events: list[str] = []
    with TimedStore(faulty, timeout_s=60) as timed:

        def work() -> None:
            faulty.list("")
            try:
                timed.limit.direct_writer(timed, "object", nbytes=1)
            except StorageError as error:
                events.append(error.code)

        def interrupt() -> None:
            time.sleep(0.1)
            os.kill(os.getpid(), 2)
            time.sleep(0.2)  # less than what is given up may still take
            hang.release()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            timed.limit.run("list", "path", work, stop=lambda: events.append("stopped"))
        assert events[:1] == ["stopped"]
        assert eventually(lambda: len(events) == 2)
    assert events == ["stopped", "storage.timeout"]
    assert eventually(lambda: helpers() == 0)
    assert not os.path.exists(storage.path("object"))


def test_a_time_out_of_the_store_itself_is_told_as_it_is(storage: PosixStore) -> None:
    def late(*_: object) -> None:
        raise TimeoutError("the server says so")

    with (
        TimedStore(FaultyStore(storage, late), timeout_s=60) as timed,
        pytest.raises(TimeoutError, match="the server says so"),
    ):
        timed.list("")


def test_an_idle_helper_holds_nothing_of_what_it_did(storage: PosixStore) -> None:
    class Payload:
        """Something that shows when it is gone."""

    payload = Payload()
    gone = weakref.ref(payload)
    with TimedStore(storage, timeout_s=60) as timed:
        timed.limit.run("look at", "path", lambda payload=payload: None)  # type: ignore[misc]
        del payload
        assert eventually(lambda: gone() is None)
        assert helpers() == 1
    assert eventually(lambda: helpers() == 0)
