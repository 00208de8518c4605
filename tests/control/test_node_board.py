"""Boards of nodes: one rank reads for all of its node, and nothing that fails on a board keeps a rank from reading."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from holdfast.control.node_board import NodeBoard
from tests.support.nursery import start
from tests.support.ranks import run_processes

NAME = "0123456789abcdef"
KEY = "7/background/down/0"


def joined(memory: Path) -> NodeBoard:
    board = NodeBoard(memory)
    board.join(NAME)
    return board


def found(value: bytes, timeout_s: float) -> bytes:
    return value


def nobody(timeout_s: float) -> bytes | None:
    raise AssertionError("this rank reads in the store")


def fetch_slowly(log: Path, value: bytes) -> Callable[[float], bytes | None]:
    """Reads that note themselves in `log`, one byte each."""

    def fetch(timeout_s: float) -> bytes | None:
        with log.open("ab") as file:
            file.write(b".")
        time.sleep(0.2)
        return value

    return fetch


def read_beside_others(number: int, memory: Path, log: Path, value: bytes) -> bytes | None:
    return joined(memory).read(KEY, fetch_slowly(log, value), 30)


@pytest.mark.parametrize("nbytes", [0, 100, 64 * 2**10, 3 * 2**20 + 1])
def test_one_of_the_ranks_of_a_node_reads_for_all(tmp_path: Path, nbytes: int) -> None:
    value, log = os.urandom(nbytes), tmp_path / "log"
    assert run_processes(4, read_beside_others, tmp_path, log, value) == [value] * 4
    assert log.read_bytes() == b"."


def test_a_notice_that_two_ranks_post_at_the_same_time_is_never_empty(tmp_path: Path) -> None:
    # Threads of one process get the same lock, as ranks do where another rank has removed the lock's file as old.
    ranks, keys, value = 4, range(300), b"decision"
    together = Barrier(ranks)

    def read_all(_: int) -> set[bytes | None]:
        board = joined(tmp_path)
        got = set()
        for key in keys:
            together.wait()
            got.add(board.read(f"down/{key}", partial(found, value), 30))
        return got

    with ThreadPoolExecutor(ranks) as threads:
        assert list(threads.map(read_all, range(ranks))) == [{value}] * ranks


def hold_for_ever(memory: Path, began: Path) -> None:
    def fetch(timeout_s: float) -> bytes | None:
        began.touch()
        time.sleep(100)
        return None

    joined(memory).read(KEY, fetch, 100)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_rank_reads_when_the_one_that_reads_for_all_is_killed_or_stopped(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number == signal.SIGSTOP:  # a stopped process releases no lock
        monkeypatch.setattr("holdfast.control.node_board._PATIENCE_S", 0.3)
    began = tmp_path / "began"
    holder = start(hold_for_ever, tmp_path, began, err=tmp_path / "err")
    while not began.exists():
        time.sleep(0.01)
    holder.send(number)
    start_s = time.monotonic()
    assert joined(tmp_path).read(KEY, lambda _: b"found", 30) == b"found"
    assert time.monotonic() - start_s < 5
    holder.stop()


def test_a_value_that_does_not_come_in_time_is_none_and_is_not_posted(tmp_path: Path) -> None:
    board = joined(tmp_path)
    assert board.read(KEY, lambda _: None, 0.1) is None
    assert board.read(KEY, lambda _: b"late", 0.1) == b"late"
    assert joined(tmp_path).read(KEY, nobody, 0.1) == b"late"


def test_ranks_read_in_the_store_before_they_know_the_board(tmp_path: Path) -> None:
    board = NodeBoard(tmp_path)
    assert [board.read(KEY, partial(found, value), 1) for value in (b"a", b"b")] == [b"a", b"b"]
    board.join("../" + NAME)
    assert board.read(KEY, lambda _: b"c", 1) == b"c"
    assert list(tmp_path.iterdir()) == []


def test_a_board_that_another_user_could_change_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"holdfast-boards-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"holdfast-boards-{os.geteuid()}").chmod(0o777)
    board = joined(tmp_path)
    assert [board.read(KEY, partial(found, value), 1) for value in (b"a", b"b")] == [b"a", b"b"]


def test_a_board_that_is_removed_keeps_nobody_from_reading(tmp_path: Path) -> None:
    first, second = joined(tmp_path), joined(tmp_path)
    assert first.read(KEY, lambda _: b"a", 1) == b"a"
    first.close()
    assert not list(tmp_path.iterdir())
    assert second.read(KEY, lambda _: b"a", 1) == b"a"
    second.close()


def test_a_new_board_removes_those_of_jobs_that_were_killed(tmp_path: Path) -> None:
    old = joined(tmp_path)
    assert old.read(KEY, lambda _: b"a", 1) == b"a"
    (folder,) = tmp_path.glob("holdfast-boards-*/*")
    os.utime(folder, (1, 1))
    other = NodeBoard(tmp_path)
    other.join("f" * 16)
    assert [path.name for path in tmp_path.glob("holdfast-boards-*/*")] == ["f" * 16]
