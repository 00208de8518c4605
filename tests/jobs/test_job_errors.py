"""Mistakes in real jobs: every rank raises, the error says what to do, and the next correct call works."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import holdfast
from holdfast import (
    ConfigurationError,
    IncompatibleError,
    NotFoundError,
    StateError,
    StorageError,
)
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from tests.jobs.told import TIMEOUT_S, Told, same_on_all, save_small, small, told
from tests.support.models import build, differing, filled, start_new_job
from tests.support.nursery import start, until
from tests.support.rank_worker import HOST
from tests.support.ranks import run_ranks

# The path.


def load_mistyped(run: str) -> tuple[Told, int]:
    error = told(lambda: holdfast.load(run.replace("experiment", "experimnet"), into=small(), timeout_s=TIMEOUT_S))
    return error, holdfast.load(run, into=small(), timeout_s=TIMEOUT_S).step


def test_a_mistyped_run_is_told_its_neighbour(tmp_path: Path) -> None:
    run = str(tmp_path / "experiment-7")
    save_small(run, 4)
    outcomes = run_ranks(2, load_mistyped, run)
    error = same_on_all([error for error, _ in outcomes])
    assert error.kind == "NotFoundError"
    assert error.code == "not_found.run"
    assert "Did you mean 'experiment-7'" in error.text
    assert [step for _, step in outcomes] == [4, 4]
    assert sorted(os.listdir(tmp_path)) == ["experiment-7"]


def save_into(folder: str, run: str) -> tuple[Told, str]:
    start_new_job()
    return told(lambda: save_small(folder, 1)), save_small(run, 1)


def test_a_folder_that_holds_something_else_is_no_place_to_save(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("milk")
    outcomes = run_ranks(2, save_into, str(tmp_path / "notes"), str(tmp_path / "run"))
    error = same_on_all([error for error, _ in outcomes])
    assert (error.kind, error.code) == ("ConfigurationError", "config.not_a_run")
    assert "todo.txt" in error.text
    assert [place for _, place in outcomes] == ["1.1", "1.1"]
    assert os.listdir(tmp_path / "notes") == ["todo.txt"]


@pytest.mark.parametrize("content", [["todo.txt"], []])
def test_a_folder_that_is_no_run_is_not_loaded(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).write_text("milk")
    with pytest.raises(NotFoundError, match=content[0] if content else "empty") as raised:
        holdfast.load(tmp_path, into=small())
    assert raised.value.code == "not_found.run"
    assert raised.value.path == str(tmp_path)


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    assert save_small(str(tmp_path), 1) == "1.1"


def test_one_checkpoint_of_a_run_is_no_place_to_save(tmp_path: Path) -> None:
    save_small(str(tmp_path / "run"), 1)
    with pytest.raises(ConfigurationError, match="is one checkpoint; saves go into a run"):
        save_small(str(tmp_path / "run@step=1"), 2)
    with pytest.raises(ConfigurationError) as raised:
        save_small(holdfast.open(tmp_path / "run").path, 2)
    assert raised.value.code == "config.not_a_run"


def save_apart(folder: str, shared: str) -> tuple[Told, str]:
    """Each rank stands in a folder of its own and gives the same relative path."""
    start_new_job()
    os.chdir(f"{folder}/{dist.get_rank()}")
    return told(lambda: save_small("run", 1)), save_small(shared, 1)


def test_a_path_that_is_not_shared_is_found_on_saving(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    outcomes = run_ranks(2, save_apart, str(tmp_path), str(tmp_path / "shared"))
    error = same_on_all([error for error, _ in outcomes])
    assert (error.kind, error.code, error.rank) == ("StorageError", "storage.not_shared", 1)
    assert "rank 1 does not see" in error.text
    assert re.search(r"'/.*/1/run/.*manifest.*', which rank 0 has just written as '/.*/0/run/", error.text)
    assert [place for _, place in outcomes] == ["1.1", "1.1"]
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        holdfast.open(tmp_path / "0/run")


def load_apart(folder: str, shared: str) -> tuple[Told, float, int]:
    os.chdir(f"{folder}/{dist.get_rank()}")
    start = time.monotonic()
    error = told(lambda: holdfast.load("run", into=small(), timeout_s=TIMEOUT_S))
    seconds = time.monotonic() - start
    return error, seconds, holdfast.load(shared, into=small(), timeout_s=TIMEOUT_S).step


@pytest.mark.parametrize("other", ["nothing", "another run"])
def test_a_path_that_is_not_shared_is_found_on_loading(tmp_path: Path, other: str) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        if rank == 0 or other == "another run":
            save_small(str(tmp_path / str(rank) / "run"), 1)
    outcomes = run_ranks(2, load_apart, str(tmp_path), str(tmp_path / "0/run"))
    error = same_on_all([error for error, _, _ in outcomes])
    assert error.rank == 1
    assert error.kind == ("NotFoundError" if other == "nothing" else "StorageError")
    assert all(seconds < TIMEOUT_S / 2 for _, seconds, _ in outcomes)
    assert [step for _, _, step in outcomes] == [1, 1]


# The state.


class Opaque:
    """Neither a value nor able to describe itself."""


@pytest.fixture(params=["lambda", "set", "file", "object", "array", "class", "module in a scheduler's state"])
def unsupported(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
    with (tmp_path / "log").open("w") as file:
        leaves: dict[str, object] = {
            "lambda": lambda: None,
            "set": {1, 2},
            "file": file,
            "object": Opaque(),
            "array": np.ma.masked_array([1, 2]),
            "class": Opaque,
            "module in a scheduler's state": Describing(nn.Linear(1, 1)),
        }
        yield leaves[request.param]


class Describing:
    """Describes itself by whatever it was given; cannot take a state of 13."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        if self.state == "broken":
            raise RuntimeError("the sampler is broken")
        return self.state

    def load_state_dict(self, state: object) -> None:
        if self.state == 13:
            raise RuntimeError("unlucky")
        self.state = state


def test_what_cannot_be_saved_truthfully_is_named_with_its_path(tmp_path: Path, unsupported: object) -> None:
    run = tmp_path / "run"
    with pytest.raises(StateError, match="cannot be saved without pickle") as raised:
        holdfast.save(run, small(loop=[0, {"callback": unsupported}]), 1)
    assert raised.value.code == "state.unsupported_leaf"
    assert raised.value.path == "loop/1/callback"
    assert not run.exists()
    assert save_small(str(run), 1) == "1.1"


def unsupported_on_one(run: str, rank: int) -> tuple[Told, str]:
    start_new_job()
    changes = {"callback": {1, 2}} if dist.get_rank() == rank else {}
    return told(lambda: save_small(run, 1, **changes)), save_small(run, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path, rank: int) -> None:
    outcomes = run_ranks(3, unsupported_on_one, str(tmp_path / "run"), rank)
    error = same_on_all([error for error, _ in outcomes])
    assert (error.kind, error.code, error.rank, error.path) == (
        "StateError",
        "state.unsupported_leaf",
        rank,
        "callback",
    )
    assert f"rank {rank} failed" in error.text
    assert "1 of 3 ranks failed" in error.text
    assert [place for _, place in outcomes] == ["1.1"] * 3


def broken_on_one(run: str) -> tuple[Told, Told, str]:
    """An object of the user's fails on rank 1, once when it is asked for its state, once when it is given one."""
    start_new_job()
    last = dist.get_rank() == 1
    saving = told(lambda: save_small(run, 1, sampler=Describing("broken" if last else 1)))
    place = save_small(run, 1, sampler=Describing(1))
    into = small(sampler=Describing(13 if last else 2))
    return saving, told(lambda: holdfast.load(run, into=into, timeout_s=TIMEOUT_S)), place


def test_an_object_that_fails_on_one_rank_fails_the_call_on_all(tmp_path: Path) -> None:
    outcomes = run_ranks(2, broken_on_one, str(tmp_path / "run"))
    saving = same_on_all([saving for saving, _, _ in outcomes])
    loading = same_on_all([loading for _, loading, _ in outcomes])
    assert (saving.code, saving.rank) == ("state.object", 1)
    assert (loading.code, loading.rank) == ("incompatible.object", 1)
    assert "RuntimeError: the sampler is broken" in saving.text
    assert "RuntimeError: unlucky" in loading.text
    assert [place for _, _, place in outcomes] == ["1.1", "1.1"]


def diverged(run: str, what: str) -> tuple[Told, str]:
    start_new_job()
    own = float(dist.get_rank() == 2)
    changes: dict[str, dict[str, Any]] = {
        "tensor": {"weight": torch.arange(6.0) + own},
        "bits": {"weight": torch.tensor([-0.0 if own else 0.0])},
        "value": {"progress": {"epoch": 1, "loss": own}},
        "zero": {"progress": {"epoch": 1, "loss": -0.0 if own else 0.0}},
        "type": {"progress": {"epoch": 1, "loss": True if own else 1}},
        "shape": {"weight": torch.zeros(6 + int(own))},
        "dtype": {"weight": torch.zeros(6, dtype=torch.float64 if own else torch.float32)},
        "kind": {"progress": torch.zeros(1) if own else 3},
    }
    return told(lambda: save_small(run, 1, **changes[what])), save_small(run, 1)


@pytest.mark.parametrize(
    ("what", "name", "said"),
    [
        ("tensor", "weight", r"ranks [0, 1] and [2]"),
        ("bits", "weight", r"ranks [0, 1] and [2]"),
        ("value", "progress/loss", "differs between rank 0 and rank 2"),
        ("zero", "progress/loss", "differs between rank 0 and rank 2"),
        ("type", "progress/loss", "differs between rank 0 and rank 2"),
        ("shape", "weight", "float32 [6] on rank 0, but float32 [7] on rank 2"),
        ("dtype", "weight", "float32 [6] on rank 0, but float64 [6] on rank 2"),
        ("kind", "progress", "rank 2"),
    ],
)
def test_ranks_that_disagree_are_named_with_what_they_disagree_about(
    tmp_path: Path, what: str, name: str, said: str
) -> None:
    outcomes = run_ranks(3, diverged, str(tmp_path / "run"), what)
    error = same_on_all([error for error, _ in outcomes])
    assert error.kind == "StateError"
    assert error.code in ("state.diverged", "state.disagree")
    assert name in (error.tensor, error.path)
    assert said in error.text
    assert [place for _, place in outcomes] == ["1.1"] * 3


# The checkpoint and the target.


def model_and_optimizer() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_an_optimizer_that_was_forgotten_is_one_line_of_the_error(tmp_path: Path) -> None:
    state = model_and_optimizer()
    holdfast.save(tmp_path / "run", state, 1)
    with pytest.raises(IncompatibleError, match=r"optimizer \(the whole optimizer: \d+ names\)") as raised:
        holdfast.load(tmp_path / "run", into={"model": state["model"]})
    assert raised.value.code == "incompatible.names"
    assert "strict=False" in raised.value.action
    holdfast.load(tmp_path / "run", into=state)


def test_a_checkpoint_without_the_optimizer_says_so(tmp_path: Path) -> None:
    state = model_and_optimizer()
    holdfast.save(tmp_path / "run", {"model": state["model"]}, 1)
    with pytest.raises(IncompatibleError, match="1 missing from the checkpoint: optimizer"):
        holdfast.load(tmp_path / "run", into=state)


def test_renamed_modules_are_recognised(tmp_path: Path) -> None:
    old = nn.ModuleDict({"attention": nn.Linear(3, 4), "feed_forward": nn.Linear(4, 2)})
    new = nn.ModuleDict({"attention": nn.Linear(3, 4), "feedforward": nn.Linear(4, 2)})
    holdfast.save(tmp_path / "run", {"model": old}, 1)
    with pytest.raises(IncompatibleError) as raised:
        holdfast.load(tmp_path / "run", into={"model": new})
    assert "model/feed_forward.bias -> model/feedforward.bias (and 1 more alike)" in str(raised.value)
    assert "2 missing from the checkpoint" in raised.value.message
    assert "attention" not in raised.value.message


@pytest.mark.parametrize(
    ("live", "code", "said"),
    [
        (torch.zeros(5), "incompatible.shape", "(5,) here, (6,) in the checkpoint"),
        (torch.zeros(6, 1), "incompatible.shape", "(6, 1) here, (6,) in the checkpoint"),
        (torch.zeros(6, dtype=torch.bfloat16), "incompatible.dtype", "bfloat16 here, float32 in the checkpoint"),
        (
            4,
            "incompatible.kind",
            "Under 1 name the live state and the checkpoint differ: 'weight': an int here, a tensor in",
        ),
        ({"a": 1}, "incompatible.kind", "a dict here, a tensor in the checkpoint"),
        (nn.Linear(1, 1), "incompatible", "weight"),
    ],
    ids=["shape", "axes", "dtype", "value", "dict", "module"],
)
def test_what_does_not_fit_is_refused_before_anything_is_touched(
    tmp_path: Path, live: object, code: str, said: str
) -> None:
    save_small(str(tmp_path / "run"), 1)
    into = small(progress={"epoch": 0}, weight=live)
    with pytest.raises(IncompatibleError) as raised:
        holdfast.load(tmp_path / "run", into=into)
    assert raised.value.code.startswith(code)
    assert said in raised.value.message
    assert "weight" in raised.value.message
    assert into["progress"] == {"epoch": 0}
    with pytest.raises(IncompatibleError):
        holdfast.load(tmp_path / "run", into=into, strict=code != "incompatible.shape")


def load_with_more_on_one(run: str) -> tuple[Told, bool]:
    changes = {"extra": torch.zeros(1)} if dist.get_rank() == 1 else {}
    into = small(weight=torch.zeros(6), **changes)
    error = told(lambda: holdfast.load(run, into=into, timeout_s=TIMEOUT_S))
    weight = into["weight"]
    assert isinstance(weight, torch.Tensor)
    return error, weight.any().item() is False


def test_a_name_that_one_rank_misses_is_refused_on_all(tmp_path: Path) -> None:
    save_small(str(tmp_path / "run"), 1)
    outcomes = run_ranks(2, load_with_more_on_one, str(tmp_path / "run"))
    error = same_on_all([error for error, _ in outcomes])
    assert error.code == "incompatible.names"
    assert "1 missing from the checkpoint: extra" in error.text
    assert [untouched for _, untouched in outcomes] == [True, True]


def test_groups_with_different_rates_cannot_become_one(tmp_path: Path) -> None:
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": [saved.weight], "lr": 0.1}, {"params": [saved.bias], "lr": 0.2}]
    holdfast.save(tmp_path / "run", {"model": saved, "optimizer": AdamW(groups)}, 1)
    with pytest.raises(IncompatibleError, match=r"hyper-parameters differ.*\(lr\)") as raised:
        holdfast.load(tmp_path / "run", into={"model": live, "optimizer": AdamW(live.parameters())})
    assert raised.value.code == "incompatible.groups"


def test_an_optimizer_whose_parameters_are_nowhere_is_refused(tmp_path: Path) -> None:
    state = model_and_optimizer()
    with pytest.raises(StateError, match="is not in the state") as raised:
        holdfast.save(tmp_path / "run", {"optimizer": state["optimizer"]}, 1)
    assert raised.value.code == "state.unnamed_parameter"


# The store.


def save_with_little_room(run: str) -> tuple[Told, list[str], str]:
    """Rank 1 may write no file of more than 64 KiB, for a while."""
    start_new_job()
    place = holdfast.save(run, filled("fsdp", 1).state, 1, timeout_s=TIMEOUT_S).place
    job = filled("fsdp", 2)
    big = torch.full((50_000,), float(dist.get_rank()))
    state = {**job.state, f"big{dist.get_rank()}": big}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    error = told(lambda: holdfast.save(run, state, 2, timeout_s=TIMEOUT_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    into = build("fsdp", num_steps=0)
    holdfast.load(run, into=into.state, timeout_s=TIMEOUT_S)
    assert place == "1.1"
    return error, differing(into, 1), holdfast.save(run, state, 2, timeout_s=TIMEOUT_S).place


def test_a_write_that_fails_on_one_rank_leaves_the_head_and_is_raised_on_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcomes = run_ranks(2, save_with_little_room, str(run))
    error = same_on_all([error for error, _, _ in outcomes])
    assert (error.kind, error.rank) == ("StorageError", 1)
    assert error.path is not None
    assert error.path.endswith("data-00001.safetensors")
    assert [names for _, names, _ in outcomes] == [[], []]
    assert [place for _, _, place in outcomes] == ["1.3", "1.3"]  # the load only read
    assert not list(run.rglob(".tmp-*"))


def test_a_run_that_was_deleted_while_the_job_runs_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_small(str(run), 1)
    run.rename(tmp_path / "moved")
    assert save_small(str(run), 2) == "1.1"
    assert holdfast.open(run).step == 2
    assert holdfast.open(tmp_path / "moved").step == 1


def test_a_run_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as raised:
        save_small(str(tmp_path / "file/run"), 1)
    assert str(tmp_path / "file") in str(raised.value)
    assert raised.value.action


_receive_down = Channel._receive_down


def receive_slowly(channel: Channel, phase: str, deadline: Deadline) -> object:
    time.sleep(0.5)
    return _receive_down(channel, phase, deadline)


def load_and_leave_at_once(rank: int, folder: Path) -> None:
    """Load what is not there, as one of three ranks; rank 0 serves the store, and rank 2 hears of the error late."""
    if rank == 0:
        store = dist.TCPStore(HOST, 0, 3, is_master=True, wait_for_workers=False, use_libuv=True)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
    else:
        until((folder / "port").exists)
        store = dist.TCPStore(HOST, int((folder / "port").read_text()), 3, is_master=False, use_libuv=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    if rank == 2:
        patch.object(Channel, "_receive_down", receive_slowly).start()
    try:
        holdfast.load(folder / "nothing", {"w": torch.zeros(2)}, timeout_s=20)
    except holdfast.HoldfastError as error:
        (folder / f"error-{rank}").write_text(type(error).__name__)
    os._exit(0)


def test_ranks_hear_the_cause_though_the_rank_that_serves_the_store_leaves_at_once(tmp_path: Path) -> None:
    ranks = [start(load_and_leave_at_once, rank, tmp_path, err=tmp_path / f"err-{rank}") for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.err for rank in ranks]
    assert [(tmp_path / f"error-{rank}").read_text() for rank in range(3)] == ["NotFoundError"] * 3
