"""New runs are for their owner alone; what is created in a run has the mode of the run's folder."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, Memory, StorageError
from holdfast.observing import JsonLines
from holdfast.store.modes import VARIABLE
from tests.support.models import start_new_job
from tests.support.ranks import run_processes


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(root: Path) -> tuple[set[int], set[int]]:
    """The modes of the folders and of the files at and below `root`."""
    every = [root, *root.rglob("*")]
    found = [{stat.S_IMODE(path.stat().st_mode) for path in every if path.is_dir() is kind} for kind in (True, False)]
    return found[0], found[1]


def save(run: Path, step: int = 1) -> None:
    start_new_job()
    into = {"w": torch.arange(100.0)}
    if (run / "holdfast.json").exists():
        holdfast.load(run, into)
    holdfast.save(run, into, step)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_new_run_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        save(tmp_path / "runs" / "gpt")
        save(tmp_path / "runs" / "gpt", 2)
    assert modes(tmp_path / "runs" / "gpt") == ({0o700}, {0o600})
    # The folder above belongs to no run.
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o777 & ~mask


def test_a_run_in_a_folder_that_exists_has_its_mode(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o2750)
    with umask(0o022):
        save(run)
    assert modes(run)[1] == {0o640}
    assert {mode & 0o777 for mode in modes(run)[0]} == {0o750}


def test_an_older_run_stays_as_readable_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with umask(0o022):
        save(run)
        for path in [run, *run.rglob("*")]:  # as an older version made them
            path.chmod(0o755 if path.is_dir() else 0o644)
        save(run, 2)
    assert modes(run) == ({0o755}, {0o644})
    with umask(0o077):  # the umask of a job holds as ever
        save(run, 3)
    assert modes(run) == ({0o755, 0o700}, {0o644, 0o600})


@pytest.mark.parametrize(("mask", "folders", "files"), [(0o002, 0o770, 0o660), (0o022, 0o750, 0o640)])
def test_the_mode_of_new_runs_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int, folders: int, files: int
) -> None:
    monkeypatch.setenv(VARIABLE, "770")
    with umask(mask):
        save(tmp_path / "run")
    assert modes(tmp_path / "run") == ({folders}, {files})


@pytest.mark.parametrize("mode", ["group", "888", "070", "1777", "-7", "0o750"])
def test_a_mode_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    with pytest.raises(ConfigurationError) as error:
        save(tmp_path / "run")
    assert error.value.code == "config.folder_mode"
    assert not (tmp_path / "run").exists()


def test_what_a_keeper_writes_and_events_are_private_too(tmp_path: Path) -> None:
    run, node_dir = tmp_path / "run", tmp_path / "memory"
    node_dir.mkdir()
    state = {"w": torch.zeros(100)}
    start_new_job()
    with (
        umask(0o022),
        Checkpointer(
            run, state, save=EverySteps(1), memory=Memory(node_dir=node_dir), listeners=[JsonLines()]
        ) as checkpointer,
    ):
        for step in checkpointer.steps(3):
            checkpointer.step(step)
    assert modes(run) == ({0o700}, {0o600})
    (user,) = node_dir.iterdir()
    assert modes(user)[0] == {0o700}
    assert modes(user)[1] <= {0o600}
    events = [path for path in tmp_path.rglob("rank-*") if path.is_file()]
    assert events
    assert modes(events[0].parent) == ({0o700}, {0o600})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_that_the_run_is_private() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        save(Path(folder) / "run")
        ((code, action),) = run_processes(1, load_as_nobody, f"{folder}/run")
    assert code == "storage.denied"
    assert "a run is private unless its folder has a wider mode" in action


def load_as_nobody(rank: int, run: str) -> tuple[str, str]:
    holdfast.load(run, {"w": torch.zeros(100)})  # imports what another user may not be able to import
    os.seteuid(65534)
    try:
        holdfast.load(run, {"w": torch.zeros(100)})
    except StorageError as error:
        return error.code, error.action
    finally:
        os.seteuid(0)
    return "", ""
