"""An exception at any line of a save, in the thread that trains or in the one that copies, leaves nothing behind.

Python raises KeyboardInterrupt between any two steps of the main thread, and other exceptions come from wherever memory
or a device fails. So the tests raise at one line after another, those of the clean-up included: each time training
goes on, the next save commits, and whatever did commit holds one instant.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.run.history import Run
from holdfast.snapshot import capture as snapshot_module
from holdfast.snapshot import guard as guard_module
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.checkpointer.test_checkpointer import Loop, folder_of
from tests.support.interrupts import leaves_block
from tests.support.keepers import end_keepers
from tests.support.nursery import until

SOURCES: Final = str(Path(holdfast.__file__).parent)
#: Of so many lines the default suite raises at one.
STRIDE: Final = 60

#: A line of code, and the step of the interpreter at which it is reached: a ``with`` has one where its block ends, too.
Line = tuple[CodeType, int]


class Raiser:
    """Raises `error` once per line of the library that a thread reaches, in the order in which they are met."""

    def __init__(self, error: type[BaseException], *, stride: int) -> None:
        self._error = error
        self._stride = stride
        self._met: set[Line] = set()
        #: The line at which it raised last; None if it has not since it was armed.
        self.at: str | None = None
        self._is_armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raise at the next line that was not met before."""
        self.at, self._is_armed = None, True
        try:
            yield
        finally:
            self._is_armed = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line" and self._is_armed and self._is_due(frame):
            self._is_armed = False
            self.at = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
            raise self._error(f"at {self.at}")
        return self

    def _is_due(self, frame: FrameType) -> bool:
        line = frame.f_code, frame.f_lasti
        if line in self._met or leaves_block(frame):
            return False
        self._met.add(line)
        return len(self._met) % self._stride == 0


class Victim:
    """A loop that saves, and what its state was at each save."""

    def __init__(self, run: str, memory: Memory) -> None:
        self._run = run
        self._memory = memory
        self._loop = Loop()
        self._truth: dict[int, dict[str, bytes]] = {}
        self._number = 0
        self.checkpointer = Checkpointer(run, self._loop.state, memory=memory, timeout_s=10)

    def step(self) -> None:
        """One step of training; changes everything that a save may be copying."""
        self._number += 1
        self._loop.step(self._number)
        self._loop.state["progress"]["epoch"] = self._number  # type: ignore[index]

    def save(self) -> None:
        """Save what is there now."""
        self._truth[self._number] = self._loop.bits()
        self.checkpointer.save(self._number)

    def check(self, before: tuple[object, ...], at: str) -> None:
        """Training goes on, the next save is committed, and nothing is left of the one that an exception `at` some line
        ended."""
        try:
            self._check(before)
        except BaseException as error:
            error.add_note(f"after an exception in {at}")
            raise

    def _check(self, before: tuple[object, ...]) -> None:
        self.step()
        self._truth[self._number] = self._loop.bits()
        self.checkpointer.save(self._number).durable.wait(30)
        self.step()
        with folder_of(self._run, self._memory.node_dir) as folder:
            for name in slot_names(folder):
                with Slot(folder, name) as slot:
                    assert slot.state != SlotState.WRITING
        assert not guard_module._live
        until(lambda: held() == before)

    def check_commits(self) -> int:
        """Everything that was committed is of its instant; how many there are."""
        places = Run.open(open_store(Location(self._run))).places()
        for place in places:
            other = Loop(seed=1)
            step = holdfast.load(f"{self._run}@{place}", other.state).step
            assert other.bits() == self._truth[step]
            assert other.state["progress"] == {"epoch": step}
        return len(places)


def held() -> tuple[object, ...]:
    """The process-wide things: threads, and the settings of the interpreter."""
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast"))
    return threads, gc.isenabled(), sys.getswitchinterval(), torch.is_grad_enabled()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    (tmp_path / "node").mkdir()
    victim = Victim(str(tmp_path / "run"), Memory(node_dir=tmp_path / "node"))
    victim.step()
    victim.save()
    victim.step()
    victim.save()
    victim.checkpointer.wait(60)
    yield victim
    victim.checkpointer.close()
    end_keepers(tmp_path / "node")


def attack_the_trainer(victim: Victim, error: type[BaseException], *, stride: int) -> int:
    """Raise at the lines of `save` in the thread that calls it; at how many."""
    raiser, before, count = Raiser(error, stride=stride), held(), 0
    while True:
        victim.step()
        # A MemoryError before ranks have agreed is told to all of them, as a HoldfastError.
        with raiser.armed(), suppress(error, holdfast.HoldfastError):
            sys.settrace(raiser)
            try:
                victim.save()
            finally:
                sys.settrace(None)
        if raiser.at is None:
            return count
        count += 1
        victim.check(before, raiser.at)


def attack_the_copy(victim: Victim, error: type[BaseException], *, stride: int) -> int:
    """Raise at the lines of a save in the background; at how many."""
    raiser, before, count = Raiser(error, stride=stride), held(), 0

    def only_copies(*event: Any) -> Callable[..., Any] | None:
        return raiser(*event) if threading.current_thread().name == "holdfast-stage" else None

    try:
        threading.settrace(only_copies)
        # An exception in the very first or last line of a thread is nobody's but the interpreter's to report.
        with patch.object(threading, "excepthook", lambda _: None):
            while True:
                victim.step()
                with raiser.armed(), suppress(error):
                    victim.save()
                    victim.step()
                    until(lambda: held() == before)
                if raiser.at is None:
                    return count
                count += 1
                victim.check(before, raiser.at)
    finally:
        threading.settrace(None)


def let_go(caplog: pytest.LogCaptureFixture) -> None:
    """Collect what exceptions held, which logged records hold in turn: files that were opened a line before are closed
    now, and warn of it."""
    caplog.clear()
    gc.collect()


ATTACKS: Final = {"training": attack_the_trainer, "copying": attack_the_copy}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("attack", "aside"), [("training", True), ("copying", False)])
@pytest.mark.few(1)
def test_an_interrupt_at_some_lines_of_a_save_leaves_nothing_behind(
    victim: Victim,
    attack: str,
    aside: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not aside:
        monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
    assert ATTACKS[attack](victim, KeyboardInterrupt, stride=STRIDE) > 3
    assert victim.check_commits() > 3
    let_go(caplog)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("aside", [True, False], ids=["aside", "awaited"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_exception_at_any_line_of_a_save_leaves_nothing_behind(
    victim: Victim,
    attack: str,
    aside: bool,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not aside:
        monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
    assert ATTACKS[attack](victim, error, stride=1) > 100
    assert victim.check_commits() > 100
    let_go(caplog)
