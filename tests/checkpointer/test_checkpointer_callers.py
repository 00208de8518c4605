"""A `Checkpointer` serves one thread of one process; calls from any other raise an error at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, Memory
from holdfast.checkpointer.memory_tier import MemoryTier
from tests.checkpointer.test_checkpointer import late_copies
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    start_new_job()
    made = Checkpointer(tmp_path / "run", {"w": torch.zeros(1000)}, memory=Memory(node_dir=tmp_path))
    yield made
    made.close()
    end_keepers(tmp_path)


def test_a_second_thread_that_saves_is_refused_and_the_save_of_the_first_is_not_affected(
    checkpointer: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_inside, goes_on = Event(), Event()
    settle = MemoryTier.settle

    def late_settle(self: MemoryTier) -> None:
        is_inside.set()
        assert goes_on.wait(30)
        settle(self)

    monkeypatch.setattr(MemoryTier, "settle", late_settle)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(checkpointer.save, 1)
        assert is_inside.wait(30)
        for call in (lambda: checkpointer.save(1), checkpointer.restore):
            with pytest.raises(ConfigurationError, match=r"config\.threads"):
                call()
        goes_on.set()
        first.result(30).durable.wait(60)
    checkpointer.save(2).durable.wait(60)
    assert holdfast.open(tmp_path / "run").step == 2


def test_a_forked_child_leaves_the_saves_of_its_parent_alone_and_ends_at_once(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    checkpointer.save(1).durable.wait(60)
    with late_copies():
        handle = checkpointer.save(2)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                begun_s = time.monotonic()
                with pytest.raises(ConfigurationError, match=r"config\.forked"):
                    checkpointer.save(3)
                checkpointer.close()
                status = 0 if time.monotonic() - begun_s < 5 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        handle.durable.wait(60)
    assert holdfast.open(tmp_path / "run").step == 2


ENDS = """
import os, sys
from pathlib import Path
import torch
from holdfast import Checkpointer, Memory

run, node_dir, how = sys.argv[1:]
state = {"w": torch.zeros(1 << 20)}

def loop():
    with Checkpointer(run, state, memory=Memory(node_dir=Path(node_dir))) as checkpointer:
        for step in range(100):
            state["w"].fill_(step)
            checkpointer.save(step)
            yield step

class Trainer:
    def __init__(self):
        self.checkpointer = Checkpointer(run, state, memory=Memory(node_dir=Path(node_dir)))
        for step in range(3):
            state["w"].fill_(step)
            self.checkpointer.save(step)

    def __del__(self):
        self.checkpointer.close()

left = loop() if how == "generator" else Trainer()
if how == "generator":
    for _ in range(3):
        next(left)
if how == "saves at the end":
    class Late:
        def __del__(self, trainer=left):
            try:
                trainer.checkpointer.save(9)
            except Exception as error:
                os.write(1, str(error).encode())
    late = Late()
"""


@pytest.mark.parametrize("how", ["generator", "close in __del__", "saves at the end"])
@pytest.mark.few(1)
def test_a_job_ends_where_the_interpreter_closes_what_nobody_closed(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(run), str(tmp_path), how],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Error" not in done.stderr
    if how == "saves at the end":
        assert "config.closed" in done.stdout
    until(lambda: holdfast.open(run).step == 2)  # the keeper goes on: nothing that was saved is lost
    assert set(holdfast.open(run)["w"][...].tolist()) == {2.0}
    end_keepers(tmp_path)
