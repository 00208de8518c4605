"""Jobs with workers that are killed, all ranks at once, and go on with other ranks: they train on the samples of a job
that is not killed."""

from __future__ import annotations

import ast
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.data import GlobalOrder, MixedOrder
from tests.data import data_job, test_sharded_stream
from tests.data.data_job import BASE, BATCH, LENGTHS, WEIGHTS
from tests.support import nursery
from tests.support.rank_worker import HOST, environment_of

#: Time until the ranks have trained so many steps, on a machine with few cores that others use too.
DEADLINE_S = 190.0
#: A kill comes a little before or after as many steps of a life.
STEPS_PER_LIFE = 10


def train(environment: dict[str, str], kind: str, folder: Path, node_dir: Path, log: Path, last: int) -> None:
    """Train as the rank that the environment says."""
    os.environ |= environment
    data_job.main(kind, str(folder / "run"), str(node_dir), str(log), last, num_workers=2)


@contextmanager
def started(
    kind: str, folder: Path, node_dir: Path, world_size: int, life: int, last: int
) -> Iterator[list[nursery.Process]]:
    """The ranks of a job; those that still run at the end are killed."""
    store, ranks = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False), []
    try:
        for rank in range(world_size):
            log, err = folder / f"life{life}-rank{rank}", folder / f"life{life}-err{rank}"
            environment = environment_of(rank, world_size, store.port)
            ranks.append(nursery.start(train, environment, kind, folder, node_dir, log, last, err=err))
        yield ranks
    finally:
        kill(ranks)


def lines_of(folder: Path, life: int, rank: int) -> dict[int, list[object]]:
    log = folder / f"life{life}-rank{rank}"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return {int(line.split(" ", 1)[0]): ast.literal_eval(line.split(" ", 1)[1]) for line in whole.splitlines()}


def kill_after(ranks: list[nursery.Process], folder: Path, life: int, num_steps: int) -> None:
    """SIGKILL all ranks when the first one has trained so many steps in this life."""
    end_s = time.monotonic() + DEADLINE_S
    while len(lines_of(folder, life, 0)) < num_steps:
        assert time.monotonic() < end_s
        assert all(rank.is_running for rank in ranks), [rank.err for rank in ranks]
        time.sleep(0.005)
    kill(ranks)


def kill(ranks: list[nursery.Process]) -> None:
    for rank in ranks:
        rank.send(signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def trained(kind: str, folder: Path, worlds: list[int], last: int) -> list[object]:
    """The samples of the steps that were not lost, in the order of their places."""
    steps: dict[int, list[object]] = {}
    for life, world_size in enumerate(worlds):
        logs = [lines_of(folder, life, rank) for rank in range(world_size)]
        for step in set.intersection(*(set(log) for log in logs)) - {last}:
            parts = [log[step] for log in logs]
            if kind == "stream":
                steps[step] = [sample for together in zip(*parts, strict=True) for sample in together]
            else:
                steps[step] = [sample for part in parts for sample in part]
    assert sorted(steps) == list(range(last))
    return [sample for step in range(last) for sample in steps[step]]


def uninterrupted(kind: str, num_steps: int) -> list[object]:
    if kind == "stream":
        return [*test_sharded_stream.trained(test_sharded_stream.streams(1), num_steps)]
    order: GlobalOrder | MixedOrder
    if kind == "mixture":
        order = MixedOrder(LENGTHS, weights=WEIGHTS, global_batch_size=BATCH, seed=4)
    else:
        order = GlobalOrder(1001, global_batch_size=BATCH, seed=4)
    batches = iter(order)
    return [sample for _ in range(num_steps) for sample in next(batches)]


def run_killed(kind: str, folder: Path, node_dir: Path, worlds: list[int]) -> tuple[list[object], set[int]]:
    """The samples that a job trains on that is killed on all numbers of ranks but the last one, and the checksums that
    its ranks end with."""
    last = STEPS_PER_LIFE * len(worlds)
    for life, world_size in enumerate(worlds):
        with started(kind, folder, node_dir, world_size, life, last) as ranks:
            if life < len(worlds) - 1:
                kill_after(ranks, folder, life, num_steps=STEPS_PER_LIFE - 2 + life)
            else:
                assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * world_size, [rank.err for rank in ranks]
    ends = [lines_of(folder, len(worlds) - 1, rank)[last] for rank in range(worlds[-1])]
    return trained(kind, folder, worlds, last), {int(str(number)) % (1 << 64) for end in ends for number in end}


def run_whole(kind: str, num_lives: int) -> tuple[list[object], set[int]]:
    """As `run_killed`, of a job that is not killed."""
    whole, checksum = uninterrupted(kind, STEPS_PER_LIFE * num_lives), 0
    for first in range(0, len(whole), BATCH):
        batch = whole[first : first + BATCH]
        numbers = (sum(sample) if isinstance(sample, list) else int(str(sample)) for sample in batch)
        checksum = (checksum * BASE + sum(numbers)) % (1 << 64)
    return whole, {checksum}


@pytest.mark.slow
def test_a_killed_job_goes_on_with_fewer_ranks_and_trains_on_the_same_samples(tmp_path: Path, node_dir: Path) -> None:
    assert run_killed("order", tmp_path, node_dir, [2, 1]) == run_whole("order", 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["order", "mixture", "stream"])
def test_a_job_that_is_killed_on_8_and_on_3_ranks_ends_on_5_and_trains_on_the_same_samples(
    kind: str, tmp_path: Path, node_dir: Path
) -> None:
    assert run_killed(kind, tmp_path, node_dir, [8, 3, 5]) == run_whole(kind, 3)
