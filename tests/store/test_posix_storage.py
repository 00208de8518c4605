"""The promises of the POSIX backend: objects are create-only, whole and durable; errors say what to do."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store.base import Bytes
from holdfast.store.linux import rename_without_replace
from holdfast.store.posix import PosixStore, _give_name
from holdfast.store.posix_errors import reported

BLOCK = 4096
SHARED_FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def aligned(nbytes: int, *, shift: int = 0) -> Bytes:
    """Memory that begins `shift` bytes after a page's start."""
    return np.frombuffer(mmap.mmap(-1, nbytes + shift + 1), np.uint8, nbytes, shift)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@contextmanager
def mounted(folder: Path, kind: str, options: str) -> Iterator[Path]:
    """A file system of its own at `folder`; the test is skipped where this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", options, "holdfast-test", str(folder)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStore:
    return PosixStore(str(tmp_path / "runs" / "one"))


def test_a_created_object_is_read_back_whole_and_by_range(storage: PosixStore) -> None:
    assert storage.create("epochs/7.json", b"0123456789")
    assert storage.read("epochs/7.json") == b"0123456789"
    assert storage.read("epochs/7.json", start=3, nbytes=4) == b"3456"
    assert storage.read("epochs/7.json", start=8) == b"89"
    assert storage.nbytes("epochs/7.json") == 10


def test_an_object_is_never_replaced(storage: PosixStore) -> None:
    assert storage.create("commit", b"first")
    assert not storage.create("commit", b"second")
    assert storage.read("commit") == b"first"
    assert storage.list("") == ["commit"]


def test_one_of_32_racing_creators_wins(storage: PosixStore) -> None:
    start = threading.Barrier(32)
    winners: list[int] = []

    def create(number: int) -> None:
        start.wait()
        if storage.create("history/place.json", b"%d" % number):
            winners.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % winner for winner in winners] == [storage.read("history/place.json")]
    assert files_below(Path(storage.path("history"))) == {"place.json"}


@pytest.mark.parametrize("key", ["", "/", "/etc/passwd", "..", "../other", "a/../b", "a//b", "a/", ".", "a/.tmp-1"])
def test_keys_that_are_not_plain_relative_names_are_refused(storage: PosixStore, key: str) -> None:
    with pytest.raises(ValueError, match="is not a key"):
        storage.create(key, b"")
    with pytest.raises(ValueError, match="is not a key"):
        storage.writer(key, nbytes=1)
    with pytest.raises(ValueError, match="is not a key"):
        storage.read(key)


def test_what_is_missing_is_not_found_and_named(storage: PosixStore) -> None:
    storage.create("folder/object", b"x")
    for key in ("nothing", "folder", "folder/nothing", "folder/object/below"):
        assert storage.nbytes(key) is None
        for read in (storage.read, storage.reader):
            with pytest.raises(NotFoundError) as caught:
                read(key)
            assert caught.value.code == "not_found.object"
            assert storage.path(key) in str(caught.value)
    assert storage.list("nothing") == []
    assert storage.list("folder/object") == []


def test_a_listing_is_sorted_and_leaves_out_what_is_unpublished(storage: PosixStore) -> None:
    for name in ("b", "a", "c"):
        storage.create(f"folder/{name}", b"")
    writer = storage.writer("folder/unpublished", nbytes=10)
    assert storage.list("folder") == ["a", "b", "c"]
    assert len(os.listdir(storage.path("folder"))) == 4
    writer.abort()
    assert storage.list("") == ["folder"]


def test_new_folders_are_durable_before_their_first_object_is_announced(
    storage: PosixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    storage.create("a/b/object", b"x")
    root = str(tmp_path / "runs" / "one")
    levels = [str(tmp_path), str(tmp_path / "runs"), root, f"{root}/a"]
    assert synced[:4] == levels
    assert ".tmp-" in synced[4]
    assert synced[5:] == [f"{root}/a/b"]

    synced.clear()
    storage.create("a/b/other", b"x")
    assert len(synced) == 2, "folders that are durable already cost nothing"

    PosixStore(root).create("a/b/third", b"x")
    assert set(levels[1:]) <= set(synced), "another process may have made the folders and died before its fsync"


def test_a_folder_that_was_deleted_is_made_again(storage: PosixStore) -> None:
    storage.create("folder/object", b"1")
    os.unlink(storage.path("folder/object"))
    os.rmdir(storage.path("folder"))
    assert storage.create("folder/object", b"2")
    assert storage.read("folder/object") == b"2"


@SHARED_FOLDER
@given(
    nbytes=st.integers(0, 5 * BLOCK) | st.sampled_from([BLOCK, 3 * BLOCK]),
    cuts=st.lists(st.integers(0, 5 * BLOCK) | st.integers(0, 5).map(lambda block: block * BLOCK), max_size=6),
    shift=st.sampled_from([0, 0, 1, 512]),
    order=st.randoms(use_true_random=False),
    key=st.uuids().map(str),
)
def test_writes_of_any_shape_and_order_make_the_same_file(
    storage: PosixStore, nbytes: int, cuts: list[int], shift: int, order: np.random.Generator, key: str
) -> None:
    content = aligned(nbytes, shift=shift)
    content[:] = random_bytes(nbytes)
    bounds = sorted({0, nbytes, *(cut for cut in cuts if cut < nbytes)})
    pieces = list(itertools.pairwise(bounds))
    order.shuffle(pieces)
    writer = storage.writer(key, nbytes=nbytes)
    for start, stop in pieces:
        writer.write_at(start, content[start:stop])
    writer.publish(nbytes)
    assert storage.read(key) == content.tobytes()
    os.unlink(storage.path(key))


@SHARED_FOLDER
@given(
    nbytes=st.integers(1, 4 * BLOCK),
    start=st.integers(0, 4 * BLOCK) | st.sampled_from([0, BLOCK, 2 * BLOCK]),
    wanted=st.integers(0, 4 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK]),
    shift=st.sampled_from([0, 0, 1, 512]),
    key=st.uuids().map(str),
)
@example(nbytes=2 * BLOCK + 100, start=BLOCK, wanted=BLOCK + 100, shift=0, key="a-last-block-in-part")
def test_any_range_is_read_exactly_and_beyond_the_end_is_corruption(
    storage: PosixStore, nbytes: int, start: int, wanted: int, shift: int, key: str
) -> None:
    content = random_bytes(nbytes).tobytes()
    storage.create(key, content)
    reader = storage.reader(key)
    out = aligned(wanted, shift=shift)
    try:
        assert reader.nbytes == nbytes
        if wanted == 0 or start + wanted <= nbytes:
            reader.read_at(start, out)
            assert out.tobytes() == content[start : start + wanted]
        else:
            with pytest.raises(CorruptError) as caught:
                reader.read_at(start, out)
            assert caught.value.code == "corrupt.short"
            assert storage.path(key) in str(caught.value)
    finally:
        reader.close()
        os.unlink(storage.path(key))


def test_a_ranged_read_beyond_the_end_is_corruption(storage: PosixStore) -> None:
    storage.create("object", b"0123456789")
    with pytest.raises(CorruptError, match=r"4 bytes should follow offset 8, but 2 are there") as caught:
        storage.read("object", start=8, nbytes=4)
    assert caught.value.code == "corrupt.short"


def test_an_object_is_invisible_until_it_is_published(storage: PosixStore, tmp_path: Path) -> None:
    writer = storage.writer("folder/object", nbytes=100)
    writer.write_at(0, random_bytes(100))
    assert storage.nbytes("folder/object") is None
    writer.publish(60)
    assert storage.nbytes("folder/object") == 60
    assert files_below(tmp_path) == {"runs/one/folder/object"}


def test_publishing_under_a_taken_key_is_refused_and_changes_nothing(storage: PosixStore, tmp_path: Path) -> None:
    writer = storage.writer("object", nbytes=3)
    writer.write_at(0, np.frombuffer(b"new", np.uint8))
    storage.create("object", b"old")
    with pytest.raises(StorageError) as caught:
        writer.publish(3)
    assert caught.value.code == "storage.exists"
    assert storage.path("object") in str(caught.value)
    writer.abort()
    assert storage.read("object") == b"old"
    assert files_below(tmp_path) == {"runs/one/object"}


def test_abort_leaves_nothing_and_does_nothing_after_publish(storage: PosixStore, tmp_path: Path) -> None:
    dropped = storage.writer("dropped", nbytes=BLOCK)
    dropped.write_at(0, random_bytes(BLOCK))
    dropped.abort()
    dropped.abort()
    assert files_below(tmp_path) == set()
    kept = storage.writer("kept", nbytes=0)
    kept.publish(0)
    kept.abort()
    assert storage.read("kept") == b""


def test_closing_writers_and_readers_gives_their_descriptors_back(storage: PosixStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    storage.writer("published", nbytes=10).publish(10)
    storage.writer("aborted", nbytes=10).abort()
    reader = storage.reader("published")
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_reported_when_writing_begins(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        storage = PosixStore(str(folder))
        with pytest.raises(StorageError) as caught:
            storage.writer("object", nbytes=2 << 20)
        assert caught.value.code == "storage.full"
        assert not caught.value.retryable
        assert storage.path("object") in str(caught.value)
        assert "2,097,152 bytes needed, 1,048,576 bytes free: 1,048,576 bytes are missing" in str(caught.value)
        with pytest.raises(StorageError, match=r"storage\.full"):
            storage.create("object", bytes(2 << 20))
        assert files_below(folder) == set()


def test_a_read_only_file_system_is_reported_as_denied(tmp_path: Path) -> None:
    with mounted(tmp_path / "readonly", "tmpfs", "ro") as folder:
        with pytest.raises(StorageError) as caught:
            PosixStore(str(folder)).create("object", b"x")
        assert caught.value.code == "storage.denied"


def test_a_file_system_without_direct_io_is_served_through_the_page_cache(tmp_path: Path) -> None:
    with mounted(tmp_path / "ramfs", "ramfs", "rw") as folder:
        storage = PosixStore(str(folder))
        content = aligned(3 * BLOCK + 5)
        content[:] = random_bytes(len(content))
        writer = storage.writer("object", nbytes=len(content))
        assert writer.alignment == 1
        writer.write_at(0, content)
        writer.publish(len(content))
        reader = storage.reader("object")
        assert reader.alignment == 1
        out = aligned(len(content))
        reader.read_at(0, out)
        reader.close()
        assert np.array_equal(out, content)


def test_a_rename_that_never_replaces_stands_in_for_links(tmp_path: Path) -> None:
    first, second, name = (tmp_path / part for part in ("first", "second", "name"))
    first.write_text("1")
    second.write_text("2")
    assert rename_without_replace(str(first), str(name))
    assert not rename_without_replace(str(second), str(name))
    assert name.read_text() == "1"


def test_a_file_system_that_cannot_keep_writers_apart_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "queues", "mqueue", "rw") as folder:
        temporary = folder / f"holdfast-test-{os.getpid()}"
        temporary.touch()
        try:
            with pytest.raises(StorageError) as caught:
                _give_name(str(temporary), str(folder / "object"))
        finally:
            temporary.unlink()
        assert caught.value.code == "storage.unfenced"


@pytest.mark.parametrize(
    ("number", "code", "retryable"),
    [
        (errno.ENOSPC, "storage.full", False),
        (errno.EDQUOT, "storage.full", False),
        (errno.EACCES, "storage.denied", False),
        (errno.EROFS, "storage.denied", False),
        (errno.EIO, "storage.io", False),
        (errno.ESTALE, "storage.unavailable", True),
        (errno.ETIMEDOUT, "storage.unavailable", True),
        (errno.EMFILE, "storage.failed", False),
        (errno.EFBIG, "storage.failed", False),
    ],
)
def test_system_errors_say_operation_path_reason_and_whether_to_retry(number: int, code: str, retryable: bool) -> None:
    with pytest.raises(StorageError) as caught, reported("write", "/mnt/run/object"):
        raise OSError(number, os.strerror(number))
    error = caught.value
    assert (error.code, error.retryable, error.path) == (code, retryable, "/mnt/run/object")
    assert f"cannot write /mnt/run/object: {os.strerror(number)}" in str(error)
    assert str(error).endswith(error.action)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_what_vanished_while_it_was_in_use_is_told_as_such(number: int) -> None:
    with (
        pytest.raises(StorageError, match="was removed during the operation") as caught,
        reported("publish", "/mnt/run/object"),
    ):
        raise OSError(number, os.strerror(number))
    assert (caught.value.code, caught.value.path) == ("storage.vanished", "/mnt/run/object")


def test_a_folder_removed_under_a_writer_fails_its_publication(storage: PosixStore) -> None:
    writer = storage.writer("folder/object", nbytes=10)
    writer.write_at(0, random_bytes(10))
    for name in os.listdir(storage.path("folder")):
        os.unlink(storage.path("folder") + "/" + name)
    os.rmdir(storage.path("folder"))
    with pytest.raises(StorageError, match=r"storage\.vanished"):
        writer.publish(10)
    writer.abort()
    assert storage.list("") == []
