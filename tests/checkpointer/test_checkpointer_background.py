"""A `Checkpointer` works in the background beside a loop that leaves it little time."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from tests.checkpointer.test_checkpointer import late_copies
from tests.support.keepers import end_keepers

#: More than threads of Python get done in the time that a test has, if each call of torch waits for its turn.
NUM_TENSORS = 1500
PATIENCE_S = 20.0


def compute_until_staged(checkpointer: Checkpointer, step: int) -> float:
    """Save, and run nothing but Python until that is staged; returns the seconds of it."""
    handle = checkpointer.save(step)
    end_s, total = time.monotonic() + 10 * PATIENCE_S, 0
    while not handle.staged.is_over and time.monotonic() < end_s:
        for number in range(100_000):
            total += number
    assert handle.staged.seconds is not None
    return handle.staged.seconds


def test_a_copy_beside_a_loop_of_python_takes_no_minute(tmp_path: Path) -> None:
    state = {"tensors": {f"{number}": torch.full((64,), float(number)) for number in range(NUM_TENSORS)}}
    interval_s = sys.getswitchinterval()
    with Checkpointer(tmp_path / "run", state, memory=Memory(node_dir=tmp_path)) as checkpointer:
        # Into each slot there is a first copy, and only then is it known where everything goes.
        seconds = [compute_until_staged(checkpointer, step) for step in range(3)]
        assert max(seconds) < PATIENCE_S
    assert sys.getswitchinterval() == interval_s, "as it was"
    end_keepers(tmp_path)


def test_a_save_that_is_over_keeps_nothing_of_the_state_alive(tmp_path: Path) -> None:
    state = {"weight": torch.nn.Linear(30, 40)}
    weight = weakref.ref(state["weight"].weight)
    with Checkpointer(tmp_path / "run", state, memory=Memory(node_dir=tmp_path)) as checkpointer:
        checkpointer.save(1).durable.wait()
        del state["weight"]
        gc.collect()
        assert weight() is None
    end_keepers(tmp_path)


def test_the_folder_of_a_node_may_be_text(tmp_path: Path) -> None:
    memory = Memory(node_dir=str(tmp_path))  # type: ignore[arg-type]
    with Checkpointer(tmp_path / "run", {"weight": torch.ones(3)}, memory=memory) as checkpointer:
        handle = checkpointer.save(1)
    assert handle.durable.is_done
    end_keepers(tmp_path)


@pytest.mark.parametrize("how", ["in the state", "under the guard"])
def test_the_ways_that_the_guide_names_keep_fused_steps_of_another_optimizer_out_of_a_save(
    tmp_path: Path, how: str
) -> None:
    model = torch.nn.Linear(30, 40)
    own, other = (torch.optim.Adam(model.parameters(), fused=fused) for fused in (False, True))
    model(torch.ones(30)).sum().backward()
    own.step()
    other.step()
    state: dict[str, object] = {"model": model, "own": own}
    if how == "in the state":
        state["other"] = other
    with Checkpointer(tmp_path / "run", state, memory=Memory(node_dir=tmp_path)) as checkpointer:
        checkpointer.save(0)
        before = model.weight.detach().clone()
        with late_copies():
            checkpointer.save(1)
            if how == "in the state":
                other.step()
            else:
                with checkpointer.guard():
                    other.step()
    assert not torch.equal(model.weight, before)
    assert torch.equal(holdfast.open(tmp_path / "run")["model/weight"][...], before)
    end_keepers(tmp_path)
