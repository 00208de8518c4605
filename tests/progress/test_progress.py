"""Long saves, loads and restores show their progress at a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.store.posix import PosixReader, PosixWriter
from tests.support.ranks import run_ranks

NUMEL = 6 << 20
SHOW_CURSOR = "\x1b[?25"
ERASE_LINE = "\x1b[2K"


class Screen:
    """A terminal that records the characters that it was sent."""

    def __init__(self) -> None:
        self.text = ""


@contextmanager
def terminal(patch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Standard error is a real terminal within the block; what it was sent is complete behind it."""
    for name, value in {"TERM": "xterm", "COLUMNS": "110"}.items():
        patch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        patch.delenv(name, raising=False)
    screen, sent = Screen(), bytearray()
    reader, end = pty.openpty()

    def listen() -> None:
        try:
            while data := os.read(reader, 4096):
                sent.extend(data)
        except OSError:  # a terminal that nobody holds any more says EIO
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        with os.fdopen(end, "w", encoding="utf-8") as file, patch.context() as inner:
            inner.setattr(sys, "stderr", file)
            yield screen
    finally:
        listener.join()
        os.close(reader)
        screen.text = sent.decode()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch)
        yield patch


def slow_down(patch: pytest.MonkeyPatch, *, patience_s: float = 0.05) -> None:
    """A store that takes its time for each request, and people with little patience."""
    read_at, write_at = PosixReader.read_at, PosixWriter.write_at

    def slow_read(*args: object) -> object:
        time.sleep(0.1)
        return read_at(*args)  # type: ignore[arg-type]

    def slow_write(*args: object) -> object:
        time.sleep(0.1)
        return write_at(*args)  # type: ignore[arg-type]

    patch.setattr(PosixReader, "read_at", slow_read)
    patch.setattr(PosixWriter, "write_at", slow_write)
    for module in ("saving", "loading.one_load"):
        patch.setattr(f"holdfast.{module}.PATIENCE_S", patience_s)


def save_load_and_restore(run: str) -> None:
    state = {"w": torch.ones(NUMEL)}
    holdfast.save(run, state, 3)
    holdfast.load(run, into=state)
    with holdfast.Checkpointer(run, state, memory=None) as checkpointer:
        checkpointer.restore()


def test_long_saves_loads_and_restores_show_their_progress_at_a_terminal(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    with terminal(patch) as screen:
        save_load_and_restore(str(tmp_path / "run"))
    assert "saving step 3 " in screen.text
    assert screen.text.count("loading step 3 ") >= 2
    assert "of 24.0 MiB" in screen.text
    assert "MiB/s" in screen.text
    assert screen.text.endswith(ERASE_LINE), "it clears itself"
    assert SHOW_CURSOR not in screen.text, "a killed process could not bring the cursor back"
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-progress"]


def test_what_is_quick_shows_nothing(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slow_down(patch, patience_s=60)
    with terminal(patch) as screen:
        save_load_and_restore(str(tmp_path / "run"))
    assert screen.text == ""


def test_no_progress_goes_into_a_pipe_or_a_log(
    tmp_path: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = io.StringIO()
    with patch.context() as inner:
        inner.setattr(sys, "stderr", pipe)
        save_load_and_restore(str(tmp_path / "run"))
    assert pipe.getvalue() == ""
    assert "MiB/s" not in caplog.text


def test_an_error_leaves_no_progress_behind(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        time.sleep(0.3)
        raise KeyboardInterrupt

    patch.setattr(PosixWriter, "publish", fail)
    with terminal(patch) as screen, pytest.raises(KeyboardInterrupt):
        holdfast.save(str(tmp_path / "run"), {"w": torch.ones(NUMEL)}, 3)
    assert "saving step 3 " in screen.text
    assert screen.text.endswith(ERASE_LINE)


def seen_by_rank(run: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch)
        with terminal(patch) as screen:
            save_load_and_restore(run)
    return screen.text


def test_the_first_rank_alone_shows_progress(tmp_path: Path) -> None:
    first, second = run_ranks(2, seen_by_rank, str(tmp_path / "run"))
    assert "saving step 3 (rank 0 of 2) " in first
    assert "loading step 3 (rank 0 of 2) " in first
    assert second == ""
