"""Views and lazy tensors in other processes: what spawned and forked workers of a data loader get."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import LazyTensor, NotFoundError, View
from tests.support import nursery

DATA = torch.arange(40.0).reshape(8, 5)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, view: View, rows: LazyTensor) -> None:
        self.view, self.rows = view, rows

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        assert torch.equal(row, self.view["rows"][index])
        return row


@pytest.fixture
def run(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "run", {"rows": DATA}, 1)
    return tmp_path / "run"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_read_from_a_view(run: Path, tmp_path: Path, method: str) -> None:
    # The threads of other tests could hold a lock at the fork, so a process of its own forks.
    process = nursery.start(read_in_a_worker, run, method, err=tmp_path / "err")
    assert process.wait(60) == 0, process.err


def read_in_a_worker(run: Path, method: str) -> None:
    view = holdfast.open(run)
    assert torch.equal(view["rows"][...], DATA)
    rows = Rows(view, view["rows"])
    loader = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader)), DATA)


def test_a_pickled_view_is_of_the_same_checkpoint_when_the_head_has_moved(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    pickled = pickle.dumps((holdfast.open("run"), holdfast.open("run", verify=False)["rows"]))
    holdfast.save(run, {"rows": DATA + 1}, 2)
    monkeypatch.chdir("/")
    view, rows = pickle.loads(pickled)
    assert view.step == 1
    assert torch.equal(view["rows"][2:3], DATA[2:3])
    assert torch.equal(rows[...], DATA)


def test_a_folder_outside_any_history_is_opened_anew(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(holdfast.open(run).path, tmp_path / "folder")
    view = pickle.loads(pickle.dumps(holdfast.open(folder)))
    assert not view.in_history
    assert torch.equal(view["rows"][...], DATA)


def test_another_run_in_the_same_place_is_not_taken_for_the_one_that_was_opened(run: Path) -> None:
    pickled = pickle.dumps(holdfast.open(run))
    shutil.rmtree(run)
    holdfast.save(run, {"rows": DATA}, 1)
    with pytest.raises(NotFoundError, match="no longer the checkpoint"):
        pickle.loads(pickled)
