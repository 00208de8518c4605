"""torchdata's `StatefulDataLoader`: exact on as many ranks, refused on others, and elastic with an order of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast import IncompatibleError
from holdfast.data import GlobalOrder
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

#: torchdata 0.11 calls it where it makes a loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def loader_of(**options: object) -> Any:
    loader: Any = StatefulDataLoader(torch.arange(40), **options)
    return loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_goes_on_behind_the_batches_that_it_gave(num_workers: int, tmp_path: Path) -> None:
    options = {"batch_size": 4, "num_workers": num_workers, "shuffle": True, "generator": torch.Generator()}
    loader, other = loader_of(**options), loader_of(**options)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    holdfast.save(tmp_path / "run", {"loader": holdfast.PerRank(loader)}, 0)
    holdfast.load(tmp_path / "run", into={"loader": holdfast.PerRank(other)})
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in batches]


def save_or_load(run: str) -> list[int]:
    start_new_job()
    loader = loader_of(batch_size=4)
    if Path(run).exists():
        holdfast.load(run, into={"loader": holdfast.PerRank(loader)})
    batches = iter(loader)
    found: list[int] = next(batches).tolist()
    holdfast.save(run, {"loader": holdfast.PerRank(loader)}, found[0])
    return found


def test_it_is_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(2, save_or_load, run) == [[0, 1, 2, 3]] * 2
    assert run_ranks(2, save_or_load, run) == [[4, 5, 6, 7]] * 2
    start_new_job()
    with pytest.raises(IncompatibleError, match=r"incompatible\.per_rank"):
        holdfast.load(run, into={"loader": holdfast.PerRank(loader_of(batch_size=4))})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_order_as_its_batch_sampler_goes_on_with_any_number_of_workers(num_workers: int) -> None:
    order = GlobalOrder(40, global_batch_size=4)
    batches = order.follow(loader_of(batch_sampler=order, num_workers=num_workers))
    first = [next(batches).tolist() for _ in range(3)]
    other = GlobalOrder(40, global_batch_size=4)
    other.load_state_dict(order.state_dict())
    follower = other.follow(loader_of(batch_sampler=other, num_workers=2 - num_workers))
    whole = GlobalOrder(40, global_batch_size=4)
    wanted = whole.follow(whole)
    assert first + [next(follower).tolist() for _ in range(9)] == [next(wanted) for _ in range(12)]
