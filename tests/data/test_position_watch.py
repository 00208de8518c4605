"""A job that trains on the batches of an order, and never moves its position, hears of it at its second save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import GlobalOrder, MixedOrder, ShardedStream, ShardOfDataset
from holdfast.data.batch_order import BatchOrder
from tests.support.ranks import run_ranks

WARNING = "but its position is still"


def order_of(kind: str = "GlobalOrder", *, rank: int | None = None, world_size: int | None = None) -> BatchOrder:
    if kind == "GlobalOrder":
        return GlobalOrder(64, global_batch_size=4, rank=rank, world_size=world_size)
    return MixedOrder({"web": 40, "code": 24}, weights={"web": 3, "code": 1}, global_batch_size=4)


def loader_of(order: BatchOrder, num_workers: int = 0) -> DataLoader[Any]:
    numbers: Any = torch.arange(64)
    return DataLoader(numbers, batch_sampler=order, num_workers=num_workers)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


def train(run: Path, order: object, batches: Iterator[object], num_steps: int, *, saves_first: bool = False) -> None:
    state = {"w": torch.zeros(2), "data": {"train": order}}
    with holdfast.Checkpointer(run, state, memory=None, save=holdfast.EverySteps(1)) as checkpointer:
        if saves_first:
            checkpointer.restore()
            checkpointer.save(0)
            checkpointer.save(1)
        for step in checkpointer.steps(num_steps):
            next(batches)
            checkpointer.step(step)


@pytest.mark.parametrize("kind", ["GlobalOrder", "MixedOrder"])
def test_an_order_that_is_iterated_without_follow_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    order = order_of(kind)
    train(tmp_path, order, iter(loader_of(order)), 4)
    (told,) = warnings_of(caplog)
    assert kind in told
    assert "order.follow(loader)" in told
    assert "order.advance()" in told


def test_the_second_save_tells_it_also_with_save_and_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = order_of()
    batches = iter(loader_of(order, num_workers=1))
    found = []
    for step in range(2):
        next(batches)
        holdfast.save(tmp_path, {"data": order}, step)
        found.append(len(warnings_of(caplog)))
    assert found == [0, 1]


def test_passes_that_are_begun_again_are_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = order_of()
    for step in range(2):
        assert len(list(islice(order, 3))) == 3
        holdfast.save(tmp_path, {"data": order}, step)
    assert len(warnings_of(caplog)) == 1


def test_a_stream_that_is_iterated_without_follow_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents = list(range(64))
    stream = ShardedStream(
        lambda shard: ShardOfDataset(documents, shard=shard, num_shards=8), num_shards=8, global_batch_size=4
    )
    train(tmp_path, stream.state, iter(DataLoader(stream, batch_size=None)), 3)
    (told,) = warnings_of(caplog)
    assert "stream.follow(loader)" in told
    caplog.clear()
    train(tmp_path, stream.state, stream.follow(DataLoader(stream, batch_size=None)), 6)
    assert warnings_of(caplog) == []


def advancing(order: BatchOrder, loader: DataLoader[Any]) -> Iterator[object]:
    for batch in loader:
        order.advance()
        yield batch


@pytest.mark.parametrize("take", [BatchOrder.follow, advancing])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_orders_that_move_are_not_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    take: Callable[[BatchOrder, DataLoader[Any]], Iterator[object]],
    num_workers: int,
) -> None:
    for num_steps in (3, 6):  # the second job goes on exactly
        order = order_of()
        loader = loader_of(order, num_workers)
        assert next(iter(loader)).numel() == 4  # a look at a batch
        train(tmp_path, order, take(order, loader), num_steps)
        assert order.position == 4 * num_steps
    assert warnings_of(caplog) == []


def test_saves_before_the_first_batch_and_other_orders_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order, judged = order_of(), order_of()
    batches = iter(loader_of(order, num_workers=2))  # draws four batches at once
    train(tmp_path, order, batches, 0, saves_first=True)
    evaluation = iter(loader_of(judged))
    followed = order.follow(loader_of(order))
    for step in range(2, 5):
        assert next(followed) is not None
        assert next(evaluation) is not None
        holdfast.save(tmp_path, {"w": torch.zeros(2), "data": {"train": order}}, step)
    assert warnings_of(caplog) == []


class Hearing(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained_on_a_rank(run: str) -> tuple[int, int]:
    hearing = Hearing()
    logger = logging.getLogger("holdfast")
    logger.addHandler(hearing)
    try:
        order = order_of(rank=0, world_size=1)  # one data-parallel group of two ranks
        batches = iter(loader_of(order))
        for step in range(3):
            next(batches)
            holdfast.save(run, {"w": torch.zeros(2), "data": order}, step)
    finally:
        logger.removeHandler(hearing)
    return dist.get_rank(), sum(WARNING in text for text in hearing.texts)


def test_the_first_rank_alone_tells_it(tmp_path: Path) -> None:
    assert run_ranks(2, trained_on_a_rank, str(tmp_path)) == [(0, 1), (1, 0)]
