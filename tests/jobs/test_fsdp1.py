"""Jobs under FSDP1: what a rank holds in flat parameters is stored under the names of the unwrapped model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.jobs.fsdp1_cells import Wrapping, reload, save_trained, stored
from tests.support.ranks import run_ranks

FULL, FLAT = Wrapping("FULL_SHARD"), Wrapping("FULL_SHARD", original=False)
ALL = [
    FULL,
    FLAT,
    *(
        Wrapping(way, original)
        for way in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        for original in (True, False)
    ),
]
OPTIONS = [
    Wrapping("FULL_SHARD", original, **{option: True})
    for original in (True, False)
    for option in ("bf16", "frozen", "ignores")
]


def check_job(tmp_path: Path, wrapping: Wrapping, others: list[Wrapping], *, world_size: int = 4) -> None:
    """Save a job, compare the checkpoint with what torch gathers, and load it in other layouts on two ranks."""
    run = str(tmp_path / "run")
    (truth, during), *_ = run_ranks(world_size, save_trained, run, wrapping)
    found = stored(run)
    assert during == 0
    if truth:
        assert found.keys() == truth.keys()
        assert [name for name in truth if not torch.equal(found[name], truth[name])] == []
    for number, other in enumerate(others):
        again = str(tmp_path / str(number))
        run_ranks(1 if other.way == "plain" else 2, reload, run, again, other)
        loaded = stored(again)
        assert loaded.keys() == found.keys(), other
        assert [name for name in found if not torch.equal(found[name], loaded[name])] == [], other


def test_a_flat_parameter_on_four_ranks_loads_on_two_ranks_into_original_parameters(tmp_path: Path) -> None:
    check_job(tmp_path, FLAT, [FULL])


def test_original_parameters_on_four_ranks_load_on_two_ranks_into_flat_ones(tmp_path: Path) -> None:
    check_job(tmp_path, FULL, [FLAT])


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ALL, ids=str)
def test_a_job_loads_in_every_other_layout(tmp_path: Path, wrapping: Wrapping) -> None:
    others = [*ALL, Wrapping("fsdp2"), Wrapping("ddp"), Wrapping("plain")]
    check_job(tmp_path, wrapping, others)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", [Wrapping("fsdp2"), Wrapping("ddp")], ids=str)
def test_a_job_of_another_layout_loads_under_fsdp1(tmp_path: Path, wrapping: Wrapping) -> None:
    check_job(tmp_path, wrapping, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", OPTIONS, ids=str)
def test_a_job_with_an_option_of_fsdp1_loads_on_another_number_of_ranks(tmp_path: Path, wrapping: Wrapping) -> None:
    check_job(tmp_path, wrapping, [wrapping, wrapping._replace(original=not wrapping.original)], world_size=3)
