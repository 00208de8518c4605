"""A node_dir on a disk: a preemption leaves its last step there when storage cannot take it before the deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, EverySteps, Memory, OnPreemption
from holdfast.run.history import Run
from holdfast.store import urls
from holdfast.store.linux import is_on_disk
from holdfast.store.urls import open_store
from tests.checkpointer.test_memory_only import set_state, state_of
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job

#: A store that takes 20 s for each file of data, also for the keeper: it comes from an installed package.
PACKAGE = """
import time
from holdfast.store.posix import PosixStore

class SlowStore(PosixStore):
    def __init__(self, location):
        super().__init__(location.url.removeprefix("slow://"))
        self.location = location

    def writer(self, key, *, nbytes):
        time.sleep(20.0)
        return super().writer(key, nbytes=nbytes)
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a run in a store that is far too slow."""
    packages = tmp_path / "packages"
    info = packages / "slow_store-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "slow_store.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.stores]\nslow = slow_store:SlowStore\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(urls, "_openers", {})  # so that later tests do not find it
    return f"slow://{tmp_path / 'run'}"


@pytest.mark.slow  # it waits for the deadline
def test_a_step_that_a_slow_store_cannot_take_before_the_deadline_is_there_for_the_next_job(
    slow: str, memory: Memory, node_dir: Path
) -> None:
    descriptor = os.open(node_dir, os.O_RDONLY)
    if not is_on_disk(descriptor):
        pytest.skip("the folders of tests are not on a disk")
    state, begun_s = state_of(), 0.0
    with Checkpointer(slow, state, memory=memory, save=EverySteps(100) | OnPreemption(deadline_s=3.0)) as own:
        for step in own.steps(100):
            set_state(state, step)
            if step == 3:
                begun_s = time.monotonic()
                signal.raise_signal(signal.SIGTERM)
            own.step(step)
        assert own.preempted
    assert time.monotonic() - begun_s < 10.0
    end_keepers(node_dir)  # the machine is gone
    assert not list(Run.open(open_store(holdfast.Location(slow))).places())

    start_new_job()
    again = state_of()
    with Checkpointer(slow, again, memory=memory) as own:
        report = own.restore()
        assert (report.step, report.tier) == (3, "node memory")
        assert torch.equal(torch.as_tensor(again["w"]), torch.full((1000,), 3.0))
