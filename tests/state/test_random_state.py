"""`RandomState`: every rank's generators go on where they were; on another number of ranks each is seeded anew."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import LoadReport, RandomState
from tests.support.ranks import run_ranks


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator
    torch.manual_seed(number)


def draws() -> tuple[object, ...]:
    """Of every generator, with what a normal draw leaves behind in it."""
    numpy = [np.random.normal(), np.random.random()]  # noqa: NPY002 - the global generator
    return random.gauss(0, 1), random.random(), *numpy, torch.rand(2).tolist(), torch.randn(1).item()


def load(path: Path) -> LoadReport:
    return holdfast.load(path, {"random": RandomState()})


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    seed(1)
    draws()
    holdfast.save(tmp_path / "run", {"random": RandomState()}, 1)
    expected = draws(), draws()
    seed(2)
    assert load(tmp_path / "run").reseeded == ()
    assert (draws(), draws()) == expected


class Greedy:
    """Draws while it is restored."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        draws()


def test_generators_are_restored_after_everything_that_may_draw(tmp_path: Path) -> None:
    seed(1)
    state = {"random": RandomState(), "greedy": Greedy(), "numpy": np.random.default_rng(1)}
    holdfast.save(tmp_path / "run", state, 1)
    expected = draws()
    holdfast.load(tmp_path / "run", state)
    assert draws() == expected


def test_one_value_of_each_rank_holds_no_tensors(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "run", {"random": RandomState()}, 1)
    assert report.num_tensors == 0


def saved(path: Path) -> tuple[object, ...]:
    seed(10 + dist.get_rank())
    draws()
    holdfast.save(path, {"random": RandomState()}, 1)
    return draws()


def resumed(path: Path) -> tuple[tuple[object, ...], tuple[str, ...]]:
    seed(dist.get_rank())
    report = load(path)
    return draws(), report.reseeded


def test_each_rank_goes_on_where_it_was_and_others_are_seeded_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    drawn = run_ranks(2, saved, path)
    assert [found for found, _ in run_ranks(2, resumed, path)] == drawn
    three = run_ranks(3, resumed, path)
    assert {reseeded for _, reseeded in three} == {("random",)}
    streams = [found for found, _ in three]
    assert len({str(value) for stream in streams for value in stream}) == 3 * len(streams[0])
    assert not {str(value) for stream in streams for value in stream} & {str(v) for stream in drawn for v in stream}
    assert run_ranks(3, resumed, path) == three


def test_a_world_of_another_size_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    run_ranks(2, saved, path)
    assert not dist.is_initialized()
    assert load(path).reseeded == ("random",)
    assert "random" in caplog.text
