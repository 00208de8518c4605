"""Checkpoints that released versions wrote load, bit for bit, on other layouts, and pass every check."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from tests.jobs.layout_cells import Cell, build, differing
from tests.released.states import CELLS, FLAT_SHAPE, filled_tensor, values, whole, zoo
from tests.support.command_line import holdfast_command
from tests.support.models import bits
from tests.support.ranks import run_ranks

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))
#: Another kind and number of ranks for each cell.
TARGETS = dict(zip(CELLS, CELLS[3:] + CELLS[:3], strict=True))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def load_cell(cell: Cell, path: str, seed: int) -> list[str]:
    job = build(cell, seed + 1)
    holdfast.load(path, into=job.state)
    return differing(job, seed)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_job_goes_on_on_another_layout_from_what_a_released_version_saved(runs: Path, cell: Cell) -> None:
    target = TARGETS[cell]
    found = run_ranks(target.world_size, load_cell, target, str(runs / str(cell)), CELLS.index(cell))
    assert found == [[]] * target.world_size


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so wherever one is made
def test_every_dtype_and_kind_of_value_is_what_it_was(runs: Path) -> None:
    state = zoo()
    for tensor in state["tensors"].values():
        tensor.zero_()
    state["tied"]["a"].zero_()
    state["values"] = dict.fromkeys(state["values"])
    holdfast.load(runs / "zoo", into=state)
    assert repr(state["values"]) == repr(values())
    for name, tensor in state["tensors"].items():
        assert bits(tensor).tobytes() == whole(f"tensors/{name}", tensor).tobytes(), name
    assert bits(state["tied"]["b"]).tobytes() == whole("tied", state["tied"]["b"]).tobytes()
    assert holdfast.open(runs / "zoo").aliases == {"tied/b": "tied/a"}


def test_flat_ranges_boxes_and_what_is_of_one_rank_are_what_they_were(runs: Path) -> None:
    view = holdfast.open(runs / "pieces")
    for name in ("flat", "boxes"):
        assert torch.equal(view[name][:], filled_tensor(name, torch.empty(FLAT_SHAPE))), name
    for rank in range(3):
        assert view.value(f"own/%rank={rank}/rank") == rank
    np.testing.assert_array_equal(view["own/%rank=2/noise"][:], [2.0, 2.0])


def test_the_history_of_a_released_version_has_its_head_and_its_abandoned_future(runs: Path) -> None:
    job = build(Cell("plain", (1,)), 9)
    assert holdfast.load(runs / "history", into=job.state).next_step == 4
    assert differing(job, 3) == []
    assert holdfast.load(runs / "history@step=1", into=job.state, continues=False).step == 1
    assert differing(job, 1) == []


@pytest.mark.parametrize("name", [*map(str, CELLS), "pieces", "history", "zoo"])
def test_the_command_line_finds_nothing_wrong_with_what_a_released_version_saved(runs: Path, name: str) -> None:
    assert holdfast_command("verify", "--deep", "--all", str(runs / name)).status == 0
    assert holdfast_command("doctor", str(runs / name)).status == 0
