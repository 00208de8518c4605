"""Loads of several ranks: they read shared bytes once, and all of them hear of an error on one."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast import HoldfastError
from holdfast.cooperative import reading as together
from holdfast.cooperative.neighbours import node_id
from holdfast.plan.exchange import Bandwidths
from tests.support.faulty_storage import watched_store
from tests.support.models import start_new_job
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks

MIB = 1 << 20
TIMEOUT_S = 4.0
SLACK_S = 8.0
#: 4 tensors of 8 MiB, and a few small ones.
SHAPES = {**{f"large-{number}": (2048, 1024) for number in range(4)}, **{f"small-{n}": (7, 12) for n in range(9)}}
NBYTES = sum(4 * rows * columns for rows, columns in SHAPES.values())


def full(name: str) -> torch.Tensor:
    """The content that is stored under a name: no long stretches of equal elements."""
    rows, columns = SHAPES[name]
    seed = sum(map(ord, name))
    return torch.arange(seed, seed + rows * columns, dtype=torch.int32).view(rows, columns)


def local_state(placement: Placement | None, *, empty: bool) -> dict[str, object]:
    """The state of this rank: plain tensors, which all ranks hold, or DTensors over all ranks."""
    if placement is None:
        return {name: torch.zeros_like(full(name)) if empty else full(name) for name in SHAPES}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: DTensor.from_local(full(name), mesh, [Replicate()], run_check=False) for name in SHAPES}
    parts = {name: tensor.redistribute(placements=[placement]) for name, tensor in tensors.items()}
    return {name: torch.zeros_like(part) if empty else part for name, part in parts.items()}


def differing(state: dict[str, object], placement: Placement | None) -> list[str]:
    """The names whose local memory is not what it should be."""
    expected = local_state(placement, empty=False)
    return [name for name, tensor in state.items() if not torch.equal(_local(tensor), _local(expected[name]))]


def _local(tensor: object) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_all(run: str, placement: Placement | None) -> None:
    start_new_job()
    holdfast.save(run, local_state(placement, empty=False), 1)


def bytes_asked_for() -> int:
    """Bytes that this process has asked the kernel to read, from its start on."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def load_and_count(
    run: str, placement: Placement | None, nodes: tuple[int, ...] | None, bandwidths: Bandwidths | None = None
) -> tuple[list[str], int, int]:
    """Load; return the differences, the bytes read according to the report, and the bytes that the kernel read."""
    state = local_state(placement, empty=True)
    with on_node(None if nodes is None else nodes[dist.get_rank()]):
        before = bytes_asked_for()
        report = holdfast.load(run, into=state, bandwidths=bandwidths)
        read = bytes_asked_for() - before
    return differing(state, placement), report.read_nbytes, read


@contextlib.contextmanager
def on_node(number: int | None) -> Iterator[None]:
    """Have this rank be on another node than those with another number; on a node of its own for -1."""
    with pytest.MonkeyPatch.context() as patch:
        if number is not None:
            name = secrets.token_bytes(16) if number < 0 else bytes([*node_id()[:15], number])
            patch.setattr(together, "node_id", lambda: name)
        yield


@pytest.fixture(scope="module")
def run_of_rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved by two ranks, each with half of the rows."""
    run = str(tmp_path_factory.mktemp("rows") / "run")
    run_ranks(2, save_all, run, Shard(0))
    return run


@pytest.fixture(scope="module")
def run_of_one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved by one rank."""
    run = str(tmp_path_factory.mktemp("one") / "run")
    run_ranks(1, save_all, run, None)
    return run


@pytest.mark.parametrize("placement", [None, Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_byte_is_read_once_per_node(run_of_rows: str, placement: Placement | None, world_size: int) -> None:
    outcomes = run_ranks(world_size, load_and_count, run_of_rows, placement, None)
    assert [differing for differing, _, _ in outcomes] == [[]] * world_size
    assert sum(reported for _, reported, _ in outcomes) <= 1.02 * NBYTES
    assert sum(read for _, _, read in outcomes) <= 1.02 * NBYTES + world_size * MIB
    shares = [reported for _, reported, _ in outcomes]
    assert max(shares) - min(shares) <= 9 * MIB


def test_ranks_of_different_nodes_read_for_their_own(run_of_one: str) -> None:
    outcomes = run_ranks(4, load_and_count, run_of_one, None, (0, 0, 1, 1))
    assert [differing for differing, _, _ in outcomes] == [[]] * 4
    for node in (outcomes[:2], outcomes[2:]):
        assert NBYTES <= sum(reported for _, reported, _ in node) <= 1.02 * NBYTES


def test_ranks_without_neighbours_read_by_themselves(run_of_one: str) -> None:
    outcomes = run_ranks(2, load_and_count, run_of_one, Shard(1), (-1, -1))
    assert [differing for differing, _, _ in outcomes] == [[]] * 2
    assert all(NBYTES <= reported <= 1.02 * NBYTES for _, reported, _ in outcomes)


#: All nodes together read less than each of them could alone, and networks are fast.
SLOW_STORE = Bandwidths(node_storage=2e9, all_storage=2e9, node_network=20e9)


@pytest.mark.parametrize(
    "nodes", [(0, 0, 1, 1), pytest.param((0, 1, 2), marks=pytest.mark.slow), (0, 1, 1, 0, 1)], ids=str
)
@pytest.mark.parametrize("placement", [None, Shard(1)], ids=str)
def test_nodes_send_each_other_what_they_read_where_storage_is_the_slower_way(
    run_of_rows: str, nodes: tuple[int, ...], placement: Placement | None
) -> None:
    outcomes = run_ranks(len(nodes), load_and_count, run_of_rows, placement, nodes, SLOW_STORE)
    assert [differing for differing, _, _ in outcomes] == [[]] * len(nodes)
    assert sum(reported for _, reported, _ in outcomes) <= 1.02 * NBYTES


def test_nodes_read_for_themselves_where_the_network_is_the_slower_way(run_of_one: str) -> None:
    slow_network = Bandwidths(node_storage=2e9, all_storage=20e9, node_network=1e8)
    outcomes = run_ranks(2, load_and_count, run_of_one, None, (0, 1), slow_network)
    assert [differing for differing, _, _ in outcomes] == [[]] * 2
    assert all(NBYTES <= reported <= 1.02 * NBYTES for _, reported, _ in outcomes)


# One rank suffers.


Load = Callable[[str, int, Callable[[], None] | None], "Told | int"]


class Told:
    """The error that a rank was told, as plain values."""

    def __init__(self, error: HoldfastError, took_s: float) -> None:
        self.kind, self.code, self.text = type(error).__name__, error.code, str(error)
        self.path, self.absent, self.took_s = error.path, error.absent, took_s


def load_badly(run: str, at: int, act: Callable[[], None] | None, *, apart: bool = False) -> Told | int:
    """Load replicas, with something happening to rank 1 at its read number `at` of data; the step where nothing is
    wrong. With `apart` every rank is a node, and nodes send each other what they read."""
    count = 0

    def watch(_: int, when: str, name: str, path: str) -> None:
        nonlocal count
        if (when, name, dist.get_rank()) == ("before", "read_at", 1) and "data-" in path:
            count += 1
            if count == at and act is not None:
                act()

    start = time.monotonic()
    try:
        with watched_store(watch), on_node(dist.get_rank() if apart else None):
            into, bandwidths = local_state(None, empty=True), SLOW_STORE if apart else None
            return holdfast.load(run, into=into, bandwidths=bandwidths, timeout_s=TIMEOUT_S).step
    except HoldfastError as error:
        return Told(error, time.monotonic() - start)


def break_disk() -> None:
    raise OSError(5, "Input/output error")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def load_apart_badly(run: str, at: int, act: Callable[[], None] | None) -> Told | int:
    """`load_badly` of ranks on different nodes."""
    return load_badly(run, at, act, apart=True)


LOADS = pytest.mark.parametrize("load", [load_badly, load_apart_badly], ids=["one node", "several nodes"])
SOME_LOADS = pytest.mark.parametrize(
    "load",
    [
        pytest.param(load_badly, id="one node"),
        pytest.param(load_apart_badly, id="several nodes", marks=pytest.mark.slow),
    ],
)


@LOADS
@pytest.mark.few(1)
def test_a_rank_killed_while_it_reads_for_others_is_named_in_time(run_of_one: str, load: Load) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, load, run_of_one, 3, die)
    assert isinstance(failed.value.by_rank[1], RankDiedError)
    for rank in (0, 2):
        told = failed.value.results[rank]
        assert isinstance(told, Told)
        assert (told.kind, told.absent) == ("DeadlineError", (1,))
        assert told.code in ("timeout.ranks", "timeout.rank_ended")
        assert told.took_s < TIMEOUT_S + SLACK_S


@LOADS
@pytest.mark.slow
def test_a_rank_stopped_while_it_reads_for_others_is_named_in_time(run_of_one: str, load: Load) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, load, run_of_one, 3, stop, timeout_s=TIMEOUT_S + SLACK_S)
    for rank in (0, 2):
        told = failed.value.results[rank]
        assert isinstance(told, Told)
        assert (told.kind, told.absent) == ("DeadlineError", (1,))
        assert told.code in ("timeout.ranks", "timeout.rank_ended")
        assert told.took_s < TIMEOUT_S + SLACK_S


@LOADS
def test_a_read_that_fails_on_one_rank_is_raised_on_all_at_once(run_of_one: str, load: Load) -> None:
    outcomes = run_ranks(3, load, run_of_one, 3, break_disk)
    for told in outcomes:
        assert isinstance(told, Told)
        assert "rank 1 failed in 'read'" in told.text
        assert "Input/output error" in told.text
        assert told.took_s < TIMEOUT_S


def damaged_copy(run: str, to: Path, offset: int) -> tuple[str, str]:
    """A copy of a run with a flipped bit in a data file; its path, and that of the file."""
    files = sorted(Path(run).rglob("*"))
    for file in files:
        if file.is_file():
            target = to / file.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    data = next(to.rglob("data-*"))
    content = bytearray(data.read_bytes())
    content[offset] ^= 1
    data.write_bytes(content)
    return str(to), str(data)


@SOME_LOADS
@pytest.mark.parametrize("offset", [9 * MIB, 20 * MIB])
def test_a_bad_block_that_one_rank_reads_is_told_to_all(
    run_of_one: str, tmp_path: Path, offset: int, load: Load
) -> None:
    run, data = damaged_copy(run_of_one, tmp_path / "run", offset)
    outcomes = run_ranks(3, load, run, 0, None)
    for told in outcomes:
        assert isinstance(told, Told)
        assert (told.kind, told.code, told.path) == ("CorruptError", "corrupt.file", data)
        assert "large-" in told.text
        assert told.took_s < TIMEOUT_S


def restore_and_count(run: str, node_dir: Path, sharded: bool) -> tuple[bool, int]:
    """Whether all is as it was saved by two ranks, and how much of memory this one has read."""
    start_new_job()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(3 << 20, dtype=torch.float32).view(3, 1 << 20)
    state: dict[str, object] = {
        f"w{number}": distribute_tensor(whole + number, mesh, [Shard(0) if sharded else Replicate()])
        for number in range(2)
    }
    before = torch.cat([tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)])
    with holdfast.Checkpointer(run, state, memory=holdfast.Memory(node_dir=node_dir)) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        for tensor in state.values():
            assert isinstance(tensor, DTensor)
            tensor.to_local().zero_()
        report = checkpointer.restore()
    assert report.tier == "node memory"
    assert report.load is not None
    after = torch.cat([tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)])
    return torch.equal(after.view(torch.uint8), before.view(torch.uint8)), report.load.read_nbytes


@pytest.mark.parametrize("sharded", [True, False])
def test_ranks_read_memory_apart_unless_they_want_the_same(tmp_path: Path, node_dir: Path, sharded: bool) -> None:
    outcomes = run_ranks(2, restore_and_count, str(tmp_path / "run"), node_dir, sharded)
    assert all(is_same for is_same, _ in outcomes)
    mine, others = sorted((read for _, read in outcomes), reverse=True)
    blocks, nbytes = 4 << 20, 2 * 3 * (4 << 20)
    assert nbytes <= mine + others <= nbytes + blocks
    # Shards of 3 rows are of 2 rows and 1; what both want is shared out between them.
    assert abs(mine - (2 / 3 if sharded else 1 / 2) * nbytes) <= blocks
