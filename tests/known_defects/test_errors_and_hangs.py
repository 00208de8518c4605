"""Defects by which a failure became a hang, another failure, or nothing at all."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import errors
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def save_where_rank_1_stays_away(run: str) -> tuple[float, tuple[int, ...]]:
    start_new_job()
    if dist.get_rank() == 1:
        return 0.0, ()
    start = time.monotonic()
    with pytest.raises(holdfast.DeadlineError, match="rank 1") as raised:
        holdfast.save(run, {"weight": torch.ones(2)}, 1, timeout_s=1)
    return time.monotonic() - start, raised.value.absent


def test_a_rank_that_does_not_call_hangs_the_others(tmp_path: Path) -> None:
    """One rank does not take part; the others wait for the watchdog of the process group, half an hour.

    Seen in: DeepSpeed, deepspeedai/DeepSpeed#297, #797, #801; torchtitan#3065 (for ever).
    """
    (seconds, absent), _ = run_ranks(2, save_where_rank_1_stays_away, str(tmp_path / "run"))
    assert absent == (1,)
    assert seconds < 20


class Failing:
    """An object that fails on one rank while its state is taken."""

    def state_dict(self) -> dict[str, object]:
        if dist.get_rank() == 1:
            raise RuntimeError("the loader lost its worker")
        return {"epoch": 1}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError("not loaded")


def save_where_rank_1_fails(run: str) -> tuple[str, float]:
    start_new_job()
    start = time.monotonic()
    with pytest.raises(Exception, match="the loader lost its worker") as raised:
        holdfast.save(run, {"loader": Failing()}, 1, timeout_s=30)
    return f"{raised.value}", time.monotonic() - start


def test_the_cause_is_hidden_behind_a_timeout(tmp_path: Path) -> None:
    """A rank fails early; the others wait in a collective until it times out, and report that.

    Seen in: PyTorch, pytorch/pytorch#122529; mosaicml/composer#3080.
    """
    for text, seconds in run_ranks(2, save_where_rank_1_fails, str(tmp_path / "run")):
        assert "rank 1" in text
        assert seconds < 20


def save_to_a_path_of_its_own(run: str) -> str:
    start_new_job()
    with pytest.raises(holdfast.HoldfastError) as raised:
        holdfast.save(f"{run}-{dist.get_rank()}", {"weight": torch.ones(1000)}, 1, timeout_s=30)
    return raised.value.code


def test_nodes_that_do_not_share_the_folder_save_a_part_each(tmp_path: Path) -> None:
    """Each node writes its shards to a disk of its own; the save succeeds and no node can load it.

    Seen in: VeOmni, ByteDance-Seed/VeOmni#891 (replicas are shared out between nodes with disks of their own).
    """
    assert run_ranks(2, save_to_a_path_of_its_own, str(tmp_path / "run")) == ["storage.not_shared"] * 2


def save_or_load(run: str) -> str:
    start_new_job()
    state = {"weight": torch.ones(2)}
    try:
        if dist.get_rank() == 0:
            holdfast.save(run, state, 2, takeover=True, timeout_s=3)
        else:
            holdfast.load(run, into=state, timeout_s=3)
    except holdfast.HoldfastError as error:
        return str(error)
    raise AssertionError("one call of each cannot succeed")


def test_ranks_in_different_calls_wait_for_each_other(tmp_path: Path) -> None:
    """One rank saves while another loads: a deadlock, ended by a watchdog that names a collective.

    Seen in: huggingface/accelerate#4105, NVIDIA-NeMo/Automodel#3824.
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(2)}, 1)
    messages = run_ranks(2, save_or_load, str(tmp_path / "run"))
    assert any("load" in message and "save" in message for message in messages)


def test_errors_escape_except_exception() -> None:
    """The library's error is no `Exception`, so that code which means to survive a failed save does not.

    Seen in: PyTorch DCP 2.13 (`CheckpointException` is a `BaseException`); DataStates-LLM (`sys.exit`).
    """
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert len(kinds) > 8
    assert all(issubclass(kind, Exception) for kind in kinds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_divergence": "ignore"}, "'warn' or 'error'"),
        ({"timeout_s": 0}, "positive"),
        ({"metrics": {1: 2.0}}, "str"),
    ],
    ids=["choice", "number", "metrics"],
)
def test_a_wrong_option_ends_in_an_error_about_something_else(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    """An unknown option gives `'set' object is not subscriptable`, or an assertion with an inverted message.

    Seen in: ByteCheckpoint 0.0.3 (``role``), PyTorch DCP 2.13.
    """
    with pytest.raises((ValueError, TypeError), match=said):
        holdfast.save(tmp_path / "run", {"weight": torch.ones(1)}, 1, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def surroundings() -> dict[str, object]:
    """The process-wide settings that a library could leave changed."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "collector": gc.isenabled(),
        "random": torch.random.get_rng_state().sum().item(),
    }


def test_processes_handlers_and_settings_stay_behind(tmp_path: Path) -> None:
    """After a save there are server processes, threads and signal handlers that were not there before.

    Seen in: ByteCheckpoint 0.0.3 (orphan server), GaTech-RL2/EgoVerse#621 (handlers), PyTorch DCP 2.13 (daemon).
    """
    state = {"weight": torch.ones(100), "epoch": 3}
    holdfast.save(tmp_path / "warm", state, 1)
    before = surroundings()
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.load(tmp_path / "run", into=state)
    with pytest.raises(holdfast.StateError):
        holdfast.save(tmp_path / "run", {**state, "bad": object()}, 2)
    with pytest.raises(holdfast.IncompatibleError):
        holdfast.load(tmp_path / "run", into={"weight": torch.ones(3)})
    assert surroundings() == before
