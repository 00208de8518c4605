"""The folder of a run in a node's memory: private, whatever others have put there."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR, NodeFolder, memory_error, node_folders, turn_dir

RUN = "/shared/runs/gpt"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    with NodeFolder(RUN, node_dir=tmp_path) as folder:
        yield folder


def test_the_folder_is_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with NodeFolder(RUN, node_dir=tmp_path) as folder:
            fd = folder.create("slot")
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
            os.close(fd)
    finally:
        os.umask(before)
    assert folder.path.parent == tmp_path / f"holdfast-{os.geteuid()}"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.path.parent)] == [0o700, 0o700]


def test_threads_that_list_the_folder_at_the_same_time_see_all_of_it(folder: NodeFolder) -> None:
    """They shared the position in one open directory, so each missed some of the slots, generations and marks."""
    for number in range(1000):
        os.close(folder.create(f"slot-{number}"))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(folder.names()), range(200)))
    assert found == [1000] * 200


def test_processes_of_one_run_find_one_folder_and_other_runs_others(folder: NodeFolder, tmp_path: Path) -> None:
    with NodeFolder(RUN, node_dir=tmp_path) as same, NodeFolder(RUN + "2", node_dir=tmp_path) as other:
        os.close(folder.create("slot"))
        assert same.names() == ["slot"]
        assert other.names() == []


def test_jobs_that_save_in_turn_have_private_folders_of_their_own(tmp_path: Path) -> None:
    assert turn_dir(tmp_path, 0) == tmp_path
    path = turn_dir(tmp_path, 1)
    assert (path.parent, stat.S_IMODE(path.stat().st_mode)) == (tmp_path, 0o700)
    with NodeFolder(RUN, node_dir=tmp_path) as first, NodeFolder(RUN, node_dir=path) as second:
        assert [found.path for found in node_folders(tmp_path)] == [first.path, second.path]
    path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="other users may access it"):
        turn_dir(tmp_path, 1)


def test_a_new_file_replaces_none(folder: NodeFolder) -> None:
    os.close(folder.create("slot"))
    with pytest.raises(FileExistsError):
        folder.create("slot")
    folder.remove("slot")
    folder.remove("slot")
    with pytest.raises(FileNotFoundError):
        folder.open("slot")


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (errno.EMFILE, r"ulimit -n"),
        (errno.EFBIG, r"ulimit -f"),
        (errno.ENOMEM, r"ulimit -v"),
        (errno.ENOSPC, r"Make room there"),
    ],
)
def test_memory_that_a_limit_of_the_process_closes_is_not_called_full(number: int, action: str) -> None:
    """All said: make room there."""
    error = memory_error(Path("/dev/shm"), OSError(number, os.strerror(number)))
    assert os.strerror(number) in error.message
    assert action in error.action
    assert ("Make room" in error.action) == (number == errno.ENOSPC)


def test_memory_is_a_folder_by_default() -> None:
    with NodeFolder("test-of-the-default-folder") as folder:
        assert folder.path.is_relative_to(DEFAULT_NODE_DIR)
    folder.path.rmdir()


@pytest.mark.parametrize("node_dir", ["missing", "file"])
def test_a_node_dir_that_is_no_folder_is_a_clear_error(tmp_path: Path, node_dir: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be opened as a folder.*node_dir=") as caught:
        NodeFolder(RUN, node_dir=tmp_path / node_dir)
    assert caught.value.code == "config.node_dir"


def user_folder(node_dir: Path) -> Path:
    return node_dir / f"holdfast-{os.geteuid()}"


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    user_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="not a private place"):
        NodeFolder(RUN, node_dir=tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    user_folder(tmp_path).touch()
    with pytest.raises(ConfigurationError, match="not a private place"):
        NodeFolder(RUN, node_dir=tmp_path)


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    user_folder(tmp_path).mkdir()
    user_folder(tmp_path).chmod(0o750)
    with pytest.raises(ConfigurationError, match=r"other users may access it .mode 0750"):
        NodeFolder(RUN, node_dir=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to others")
def test_a_folder_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    user_folder(tmp_path).mkdir(mode=0o700)
    os.chown(user_folder(tmp_path), 12345, 12345)
    with pytest.raises(ConfigurationError, match="it belongs to user 12345, but this process runs as user 0"):
        NodeFolder(RUN, node_dir=tmp_path)


@pytest.mark.parametrize("kind", ["link", "folder", "queue", "socket", "readable"])
def test_what_is_no_private_file_is_refused_at_once(folder: NodeFolder, kind: str) -> None:
    path = folder.path / "slot"
    if kind == "link":
        (folder.path / "other").touch(mode=0o600)
        path.symlink_to("other")
    elif kind == "folder":
        path.mkdir()
    elif kind == "queue":
        os.mkfifo(path, 0o600)  # opening one waits for somebody at its other end
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.touch(mode=0o644)
    with pytest.raises(ConfigurationError, match="not a private place"):
        folder.open("slot")


def test_too_many_open_files_are_no_reason_to_remove_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NodeFolder("file:///runs/a", node_dir=tmp_path):
        pass
    opened = os.open

    def full(path: str, *args: Any, **options: Any) -> int:
        if options.get("dir_fd") is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StorageError, match="Too many open files") as caught:
        NodeFolder("file:///runs/a", node_dir=tmp_path)
    assert caught.value.code == "storage.memory"
    assert "Remove it" not in str(caught.value)
