"""Stores on file systems of fsspec: OpenSSH's server over SFTP, which is fenced; and file systems that are not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import holdfast
from holdfast.errors import ConfigurationError, NotFoundError, StorageError
from holdfast.store import fsspec_store, urls
from holdfast.store.base import Location, Store
from holdfast.store.fsspec_files import SftpFiles
from holdfast.store.fsspec_store import FsspecStore
from holdfast.store.urls import location_of, open_store
from holdfast.testing import StoreConformance
from tests.support.servers.ssh import SshServer


class TestUnfencedStore(StoreConformance):
    """fsspec's file system in memory, which only this process sees, in place of one whose server cannot run here."""

    def make_store(self, tmp_path: Path) -> Store:
        return FsspecStore(Location(f"memory:/{tmp_path}"))

    def reopened(self, store: Store) -> Store:
        return FsspecStore(store.location)


def test_an_unfenced_store_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_store, "_told", set())
    location = Location(f"memory:/{tmp_path}")
    assert not FsspecStore(location).capabilities.is_fenced
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            assert FsspecStore(location).create(key, b"x")
    assert [record.message.partition(":")[2].partition(":")[0] for record in caplog.records] == [
        f"/{tmp_path} is unfenced"
    ]


def test_an_unfenced_store_is_only_read_where_fencing_is_required(tmp_path: Path) -> None:
    FsspecStore(Location(f"memory:/{tmp_path}")).create("object", b"x")
    store = FsspecStore(Location(f"memory:/{tmp_path}", (("require_fencing", "true"),)))
    assert store.read("object") == b"x"
    attempts: tuple[Callable[[], object], ...] = (
        lambda: store.create("other", b"x"),
        lambda: store.writer("other", nbytes=1),
    )
    for attempt in attempts:
        with pytest.raises(StorageError, match="require_fencing") as caught:
            attempt()
        assert caught.value.code == "storage.unfenced"
    assert store.list("") == ["object"]


def test_a_run_is_saved_and_loaded_where_files_are_only_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(urls._openers, "shelf", lambda location: FsspecStore(Location(f"memory:/{tmp_path}")))
    state = {"w": torch.arange(3_000_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    holdfast.save("shelf://run", state, 1)
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert holdfast.load("shelf://run", again).step == 1
    assert all(torch.equal(again[name], state[name]) for name in state)
    MemoryFileSystem().rm(str(tmp_path), recursive=True)


def test_a_listing_sees_what_another_client_has_changed(tmp_path: Path) -> None:
    store = FsspecStore(Location(f"memory:/{tmp_path}"))
    assert store.list("") == []
    MemoryFileSystem().pipe_file(f"{tmp_path}/object", b"x")
    assert (store.list(""), store.nbytes("object")) == (["object"], 1)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("sftp://me:hunter2@host/runs/a", "config.store_option"),
        ("smb://host/share/runs/a", "config.extra"),
        ("memory://runs/a", "config.scheme"),
        ("crate://runs/a", "config.scheme"),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused_without_its_password(url: str, code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(location_of(url))
    assert caught.value.code == code
    assert "hunter2" not in str(caught.value)


# OpenSSH's server.


class SftpSession:
    """An SFTP session with one file, which it sends in packets."""

    MAX_REQUEST_SIZE = 1000

    def __init__(self, content: bytes) -> None:
        self.ftp = self
        self._content = content

    def open(self, path: str, mode: str) -> AbstractContextManager[SftpSession]:
        assert (path, mode) == ("object", "rb")
        return nullcontext(self)

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self._content))

    def readv(self, parts: list[tuple[int, int]]) -> Iterator[bytes]:
        for start, nbytes in parts:
            assert 0 < nbytes <= self.MAX_REQUEST_SIZE
            yield self._content[start : start + nbytes]


def test_a_large_file_is_read_over_sftp_in_parts_as_large_as_a_packet() -> None:
    """40 MiB took minutes on a busy machine: of a larger part, paramiko copied all that it had with each packet."""
    content = bytes(range(256)) * 20
    session, size = SftpSession(content), len(content)
    for start, nbytes in (
        (0, size),
        (0, 1 << 60),
        (7, 2000),
        (999, 1),
        (size - 1, 9),
        (size, 9),
        (size + 5, 9),
        (3, 0),
    ):
        assert SftpFiles().read(session, "object", start, nbytes) == content[start : start + nbytes]


@pytest.fixture(scope="module")
def server() -> Iterator[SshServer]:
    server = SshServer()
    yield server
    server.kill()


@pytest.fixture
def place(server: SshServer, tmp_path: Path) -> Location:
    return Location(f"{server.url}/{tmp_path.name}", server.options)


@pytest.fixture
def store(place: Location) -> FsspecStore:
    return FsspecStore(place)


@pytest.mark.stores
class TestSftpStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _place(self, place: Location) -> None:
        self.place = place

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(self.place)


@pytest.mark.stores
def test_a_run_is_saved_resumed_and_pruned_over_sftp(place: Location, memory: holdfast.Memory) -> None:
    state = {"w": torch.arange(100_000.0), "b": torch.zeros(3, dtype=torch.bfloat16)}
    with holdfast.Checkpointer(place, state, memory=memory, keep=holdfast.KeepLast(1)) as checkpointer:
        for step in (1, 2):
            state["b"] += 1
            checkpointer.save(step)
            checkpointer.wait()
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert holdfast.load(place, again).step == 2
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert [checkpoint.step for checkpoint in holdfast.ls(place)] == [2]


@pytest.mark.stores
def test_a_store_goes_on_after_its_connections_were_lost(store: FsspecStore, server: SshServer) -> None:
    content = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    assert store.create("folder/object", content.tobytes())
    server.end_sessions()
    assert store.list("folder") == ["object"]
    server.end_sessions()
    assert store.read("folder/object") == content.tobytes()
    server.end_sessions()
    assert store.create("folder/other", b"x")
    server.end_sessions()
    assert store.delete("folder/other")


@pytest.mark.stores
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_name_whose_answer_was_lost_was_given_once(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    give_name, calls = SftpFiles.give_name, []

    def losing(self: SftpFiles, files: object, temporary: str, path: str) -> bool:
        calls.append(path)
        given = give_name(self, files, temporary, path) if when == "after" or len(calls) > 1 else False
        if len(calls) == 1:
            raise EOFError
        return given

    monkeypatch.setattr(SftpFiles, "give_name", losing)
    assert store.create("object", b"ours")
    assert not store.create("object", b"theirs")
    assert store.read("object") == b"ours"
    assert store.leftovers("") == []


@pytest.mark.stores
def test_a_writer_that_was_killed_leaves_a_file_that_is_listed_and_deleted(
    store: FsspecStore, server: SshServer
) -> None:
    writer = store.writer("folder/object", nbytes=1 << 20)
    writer.write_at(0, np.ones(1 << 20, np.uint8))
    server.end_sessions()
    assert store.list("folder") == []
    (name,) = store.leftovers("folder")
    assert store.nbytes(f"folder/{name}") == 1 << 20
    assert store.leftovers("folder", older_than_s=600) == []
    assert store.delete(f"folder/{name}")
    assert store.leftovers("folder") == []
    with pytest.raises(StorageError) as caught:
        writer.publish(1 << 20)
    assert caught.value.code == "storage.unavailable"
    writer.abort()


@pytest.mark.stores
def test_with_its_last_object_a_checkpoints_folder_goes_and_no_other(store: FsspecStore, server: SshServer) -> None:
    for key in ("checkpoints/one/a", "checkpoints/one/b", "epochs/a"):
        store.create(key, b"")
    store.delete("checkpoints/one/a")
    assert store.list("checkpoints") == ["one"]
    store.delete("checkpoints/one/b")
    store.delete("epochs/a")
    assert (store.list("checkpoints"), store.list("")) == ([], ["checkpoints", "epochs"])
    assert store.create("checkpoints/one/a", b"")


@pytest.mark.stores
def test_refusals_of_the_server_are_told(place: Location, server: SshServer, tmp_path: Path) -> None:
    denied = FsspecStore(Location(f"sftp://{server.user}@127.0.0.1:{server.port}/proc/runs", place.options))
    with pytest.raises(StorageError) as refused:
        denied.create("object", b"x")
    with pytest.raises(NotFoundError):
        FsspecStore(place).read("missing")
    stranger = FsspecStore(Location(place.url, (("password", "wrong"), ("look_for_keys", ""), ("allow_agent", ""))))
    with pytest.raises(ConfigurationError) as unknown:
        stranger.list("")
    assert refused.value.code in ("storage.denied", "storage.vanished")
    assert unknown.value.code == "config.credentials"


@pytest.mark.stores
def test_a_server_that_is_gone_is_told_as_such() -> None:
    server = SshServer()
    store = FsspecStore(Location(server.url, server.options))
    assert store.create("object", b"x")
    server.kill()
    with pytest.raises(StorageError) as caught:
        store.read("object")
    assert (caught.value.code, caught.value.retryable) == ("storage.unreachable", True)


@pytest.mark.stores
def test_a_forked_process_reads_through_connections_of_its_own(store: FsspecStore) -> None:
    store.create("object", b"x" * 100_000)
    child = os.fork()
    if not child:
        os._exit(0 if store.read("object") == b"x" * 100_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("object") == b"x" * 100_000
