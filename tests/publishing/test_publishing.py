"""Transfers between live layouts: every target ends up with the bits of its part of the full tensors."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, assert_type
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import holdfast
from holdfast import (
    FlatRange,
    HoldfastError,
    IncompatibleError,
    PerRank,
    Piecewise,
    StateError,
    TransferReport,
    publishing,
)
from holdfast.checkpoint.data_files import DataFiles
from holdfast.cooperative import reading as together
from holdfast.cooperative.neighbours import node_id
from holdfast.format.manifest import DecodedTable
from holdfast.publishing import live
from holdfast.store.base import Bytes
from holdfast.store.memory import FilesInMemory
from tests.support import models
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks

MIB = 1 << 20
TIMEOUT_S = 6.0
SLACK_S = 8.0

Bits = npt.NDArray[np.uint8]

#: Extents that no world divides evenly, and every kind of dtype.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((7, 10), torch.float32),
    "wide": ((3, 1000, 2), torch.bfloat16),
    "short": ((1, 5), torch.float64),
    "scalar": ((), torch.int64),
    "empty": ((0, 4), torch.float32),
    "flags": ((9, 3), torch.bool),
    "bytes": ((11,), torch.uint8),
    "eighths": ((5, 6), torch.float8_e4m3fn),
    "complex": ((6, 5), torch.complex128),
    "large": ((1500, 1601), torch.float32),
}


def bits(name: str, shape: Sequence[int], itemsize: int, seed: int = 0) -> Bits:
    """The bytes of a full tensor; of bools, too: 0 or 1."""
    generator = np.random.default_rng([seed, crc32(name.encode())])
    return generator.integers(0, 2 if name == "flags" else 256, (*shape, itemsize), np.uint8)


def tensor_of(data: Bits, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with these bytes."""
    tensor = torch.empty(data.shape[:-1], dtype=dtype)
    models.write(tensor, data)
    return tensor


def chunk(data: Bits, axis: int, index: int, count: int) -> Bits:
    """Chunk `index` of `count` along an axis, as ``torch.chunk`` divides it."""
    size = -(-data.shape[axis] // count)
    return data[(slice(None),) * axis + (slice(size * index, size * (index + 1)),)]


def is_bits(tensor: torch.Tensor, expected: Bits) -> bool:
    """Whether a tensor's local memory has these bytes."""
    found = models.bits(tensor)
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


@contextlib.contextmanager
def on_node(number: int | None) -> Iterator[None]:
    """Have this rank be on another node than those with another number."""
    with pytest.MonkeyPatch.context() as patch:
        if number is not None:
            name = bytes([*node_id()[:15], number])
            patch.setattr(together, "node_id", lambda: name)
        yield


# Models: the layouts of a trainer and of inference


class Net(nn.Module):
    """A column-wise and a row-wise layer, one that is not divided, and a tied weight; extents that divide unevenly."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            values = torch.zeros_like(parameter) if seed is None else tensor_of(self.bits(name, seed), torch.float32)
            parameter.data.copy_(values)

    def bits(self, name: str, seed: int) -> Bits:
        return bits(name, self.get_parameter(name).shape, 4, seed)


PLAN: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(mesh: DeviceMesh, seed: int | None) -> Net:
    net = Net(seed)
    parallelize_module(net, mesh, PLAN)
    return net


def wrong_in(net: Net, seed: int, index: int, count: int) -> list[str]:
    """Parameters of an inference model, part `index` of `count` tensor-parallel ones, that are not those of `seed`."""
    full = Net(seed)
    axes = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    wrong = []
    for name, parameter in net.named_parameters():
        data = full.bits(name, seed)
        expected = chunk(data, axes[name], index, count) if name in axes else data
        wrong += [] if is_bits(parameter, expected) else [name]
    return wrong


def publish(nodes: tuple[int, ...] | None) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    inference = tensor_parallel(mesh["tp"], None)
    wrong = []
    with on_node(None if nodes is None else nodes[dist.get_rank()]):
        for seed in (1, 2):
            trainer = fully_shard(tensor_parallel(mesh["tp"], seed), mesh=mesh["shard"])
            holdfast.transfer({"model": trainer}, {"model": inference})
            wrong += wrong_in(inference, seed, mesh.get_local_rank("tp"), 2)
    return wrong if inference.head.weight is inference.embed.weight else [*wrong, "tie"]


@pytest.mark.parametrize("nodes", [None, (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)], ids=str)
@pytest.mark.few(2)
def test_fsdp_over_tensor_parallel_becomes_tensor_parallel_replicas(nodes: tuple[int, ...] | None) -> None:
    assert run_ranks(4, publish, nodes) == [[]] * 4


def publish_to_others(nodes: tuple[int, ...] | None) -> tuple[list[str], int, int]:
    training = DeviceMesh("cpu", [0, 2], mesh_dim_names=("shard",))
    serving = DeviceMesh("cpu", [1, 3], mesh_dim_names=("tp",))
    with on_node(None if nodes is None else nodes[dist.get_rank()]):
        if dist.get_rank() in (0, 2):
            net = fully_shard(Net(3), mesh=training)
            report = holdfast.transfer({"model": net, "step": 7}, None)
            return [], report.moved_nbytes, report.received_nbytes
        inference = tensor_parallel(serving, None)
        state: dict[str, object] = {"model": inference, "step": 0}
        report = holdfast.transfer(None, state)
    wrong = wrong_in(inference, 3, serving.get_local_rank(), 2)
    return wrong if state["step"] == 7 else [*wrong, "step"], report.moved_nbytes, report.received_nbytes


@pytest.mark.parametrize("nodes", [None, (0, 1, 0, 1), (0, 0, 1, 1)], ids=str)
def test_trainer_and_inference_may_be_different_ranks(nodes: tuple[int, ...] | None) -> None:
    outcomes = run_ranks(4, publish_to_others, nodes)
    assert [wrong for wrong, _, _ in outcomes] == [[]] * 4
    for rank, (_, moved, received) in enumerate(outcomes):
        assert (moved > 0, received > 0) == (rank in (0, 2), rank in (1, 3))


def migrate(before: models.Kind, after: models.Kind) -> list[str]:
    """A whole job, with its optimizer, scheduler and progress, into a new one of another kind."""
    source, target = models.filled(before, 5), models.build(after, num_steps=0)
    holdfast.transfer(source.state, target.state)
    return models.differing(target, 5) + models.differing(source, 5) if before != "ddp" else models.differing(target, 5)


@pytest.mark.parametrize(("before", "after"), [("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp")])
def test_a_job_moves_into_another_one(before: models.Kind, after: models.Kind) -> None:
    assert run_ranks(3, migrate, before, after) == [[]] * 3


# Tensors, however they are divided


def divided(placement: Placement | None, name: str, seed: int | None) -> torch.Tensor:
    """A tensor on all ranks, of zeros without a seed."""
    shape, dtype = TENSORS[name]
    data = bits(name, shape, dtype.itemsize, seed or 0)
    full = torch.zeros(shape, dtype=dtype) if seed is None else tensor_of(data, dtype)
    if placement is None:
        return full
    count, index = dist.get_world_size(), dist.get_rank()
    if isinstance(placement, Shard) and placement.dim < len(shape):
        part = chunk(data, placement.dim, index, count)
        full = torch.zeros(part.shape[:-1], dtype=dtype) if seed is None else tensor_of(part, dtype)
        placements: list[Placement] = [placement]
    else:
        placements = [Replicate()]
    stride = torch.empty(shape, device="meta").stride()
    mesh = init_device_mesh("cpu", (count,))
    return DTensor.from_local(full, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def wrong_tensors(state: dict[str, Any], placement: Placement | None, seed: int) -> list[str]:
    wrong = []
    for name, (shape, dtype) in TENSORS.items():
        expected = bits(name, shape, dtype.itemsize, seed)
        if isinstance(placement, Shard) and placement.dim < len(shape):
            expected = chunk(expected, placement.dim, dist.get_rank(), dist.get_world_size())
        wrong += [] if is_bits(state[name], expected) else [name]
    return wrong


def convert(before: Placement | None, after: Placement | None, nodes: tuple[int, ...] | None) -> tuple[list[str], int]:
    target = {name: divided(after, name, None) for name in TENSORS}
    with on_node(None if nodes is None else nodes[dist.get_rank()]):
        report = holdfast.transfer({name: divided(before, name, 4) for name in TENSORS}, target)
    return wrong_tensors(target, after, 4), report.moved_nbytes


@pytest.mark.parametrize("nodes", [None, (0, 0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("before", "after"),
    [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Shard(0), None), (None, Shard(1))],
    ids=str,
)
@pytest.mark.few(6)
def test_any_layout_becomes_any_other_bit_for_bit(
    before: Placement | None, after: Placement | None, nodes: tuple[int, ...] | None
) -> None:
    outcomes = run_ranks(3, convert, before, after, nodes)
    assert [wrong for wrong, _ in outcomes] == [[]] * 3
    # Every byte is copied out of one source, once, and a little around it.
    nbytes = sum(np.prod(shape, dtype=int) * dtype.itemsize for shape, dtype in TENSORS.values())
    assert nbytes <= sum(moved for _, moved in outcomes) <= 1.02 * nbytes + 3 * 64 * 1024


def gather_ranges(nodes: tuple[int, ...] | None) -> list[int]:
    """Flat ranges of the source, as ZeRO cuts them, some of them on no rank of the target."""
    rank = dist.get_rank()
    start, stop = ((0, 7), (7, 8), (8, 35))[rank]
    source = Piecewise((5, 7), [(FlatRange(start, stop), torch.arange(start, stop))])
    target = torch.zeros(5, 7, dtype=torch.int64)
    with on_node(None if nodes is None else nodes[rank]):
        holdfast.transfer({"w": source}, {"w": target} if rank == 1 else None)
    return target.reshape(-1).tolist()


@pytest.mark.parametrize("nodes", [None, (0, 1, 0)], ids=str)
def test_flat_ranges_become_a_tensor_of_one_rank(nodes: tuple[int, ...] | None) -> None:
    assert run_ranks(3, gather_ranges, nodes) == [[0] * 35, list(range(35)), [0] * 35]


def transfer_in_group(nodes: tuple[int, ...]) -> list[int] | None:
    """Among ranks 1 and 3 of four: rows of both become a whole tensor of each."""
    group = dist.new_group([1, 3])
    mesh = DeviceMesh("cpu", [1, 3])
    rank = dist.get_rank()
    if rank not in (1, 3):
        return None
    part = torch.arange(6) + (0 if rank == 1 else 6)
    target = torch.zeros(12, dtype=torch.int64)
    with on_node(nodes[rank]):
        holdfast.transfer({"w": DTensor.from_local(part, mesh, [Shard(0)])}, {"w": target}, group=group)
    return target.tolist()


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 1, 0, 2)], ids=str)
def test_a_group_transfers_among_its_ranks(nodes: tuple[int, ...]) -> None:
    whole = list(range(12))
    assert run_ranks(4, transfer_in_group, nodes) == [None, whole, None, whole]


def test_what_is_not_contiguous_is_read_and_filled() -> None:
    source = torch.arange(24).reshape(4, 6)
    target = torch.zeros(6, 4, dtype=torch.int64)
    holdfast.transfer({"w": source.t()}, {"w": target})
    holdfast.transfer({"w": target}, {"w": (back := torch.zeros(4, 6, dtype=torch.int64)).t()})
    assert torch.equal(target, source.t())
    assert torch.equal(back, source)


def test_tied_weights_stay_tied_and_fill_tensors_that_are_not() -> None:
    weight = torch.arange(6.0)
    tied = torch.zeros(6)
    holdfast.transfer({"a": weight, "b": weight}, {"a": tied, "b": tied})
    apart: dict[str, object] = {"a": torch.zeros(6), "b": torch.zeros(6)}
    holdfast.transfer({"a": weight, "b": weight}, apart)
    assert torch.equal(tied, weight)
    assert all(isinstance(each, torch.Tensor) and torch.equal(each, weight) for each in apart.values())


# Values


def test_values_are_put_in_place_as_by_a_load() -> None:
    history: list[object] = [0]
    target: dict[str, object] = {"pair": (0, torch.zeros(2)), "history": history, "name": ""}
    report = holdfast.transfer({"pair": (2**70, torch.ones(2)), "history": [1, 2.5, None], "name": "x"}, target)
    assert target["history"] is history
    assert history == [1, 2.5, None]
    assert report.state is target
    assert isinstance(pair := target["pair"], tuple)
    assert pair[0] == 2**70
    assert torch.equal(pair[1], torch.ones(2))
    assert set(report.loaded) == {"history/0", "history/1", "history/2", "name", "pair/0", "pair/1"}


def transfer_own() -> tuple[int, list[float]]:
    rank = dist.get_rank()
    seed, noise = PerRank(0), PerRank(torch.zeros(3))
    holdfast.transfer(
        {"seed": PerRank(10 + rank), "noise": PerRank(torch.full((3,), float(rank)))}, {"seed": seed, "noise": noise}
    )
    return seed.value, noise.value.tolist()


def test_what_belongs_to_each_rank_stays_its_own() -> None:
    assert run_ranks(2, transfer_own) == [(10, [0.0] * 3), (11, [1.0] * 3)]


# Repeated transfers


def repeat() -> list[tuple[list[str], int]]:
    """After each of several transfers: what is wrong, and how many plans were learned."""
    publishing._sources.clear()
    learned = 0

    def learn(table: DecodedTable, store: FilesInMemory, holders: Sequence[int]) -> DataFiles:
        nonlocal learned
        learned += 1
        return live.live_files(table, store, holders)

    rounds: list[tuple[Placement, int]] = [(Shard(0), 1), (Shard(0), 2), (Shard(1), 3), (Shard(1), 4), (Shard(1), 5)]
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "live_files", learn)
        for number, (placement, seed) in enumerate(rounds):
            if number == 4 and dist.get_rank() == 1:
                publishing._sources.clear()  # as in a rank that was started anew
            target: dict[str, object] = {name: divided(Replicate(), name, None) for name in TENSORS}
            source = {name: divided(placement, name, seed) for name in TENSORS}
            holdfast.transfer({**source, "step": seed}, {**target, "step": 0})
            outcomes.append((wrong_tensors(target, Replicate(), seed), learned))
    return outcomes


def test_later_transfers_use_the_plan_while_the_layout_stays() -> None:
    knowing, forgetful = run_ranks(2, repeat)
    assert knowing == [([], 1), ([], 1), ([], 2), ([], 2), ([], 2)]
    assert forgetful == [([], 1), ([], 1), ([], 2), ([], 2), ([], 3)]


def test_nothing_of_a_state_is_kept_alive_by_what_is_remembered() -> None:
    source = {"w": torch.ones(3)}
    gone = weakref.ref(source["w"].untyped_storage())
    holdfast.transfer(source, {"w": torch.zeros(3)})
    source.clear()
    assert gone() is None


# States that do not fit


def told(source: dict[str, object], target: dict[str, object], **options: Any) -> HoldfastError:
    with pytest.raises(HoldfastError) as raised:
        holdfast.transfer(source, target, **options)
    return raised.value


def test_names_dtypes_and_shapes_that_differ_are_named_before_anything_changes() -> None:
    weight = torch.zeros(2, 3)
    source: dict[str, object] = {"w": torch.ones(2, 3), "only_here": torch.ones(1), "step": 1}
    names = told(source, {"w": weight, "only_there": torch.ones(1), "step": 0})
    assert (type(names), names.code) == (IncompatibleError, "incompatible.names")
    assert "1 missing from the checkpoint: only_there" in str(names)
    assert "1 in the checkpoint but not in the live state: only_here" in str(names)
    assert "the checkpoint is the source" in str(names)
    dtype = told({"w": torch.ones(2, 3, dtype=torch.float64)}, {"w": weight})
    assert (dtype.code, dtype.tensor) == ("incompatible.dtype", "w")
    shape = told({"w": torch.ones(3, 2)}, {"w": weight})
    assert (shape.code, shape.tensor) == ("incompatible.shape", "w")
    assert told({"w": 1}, {"w": weight}).code == "incompatible.kind"
    assert not weight.any()


def test_select_leaves_all_else_as_it_is() -> None:
    source: dict[str, object] = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "optimizer": torch.ones(3)}
    target: dict[str, object] = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "more": torch.zeros(1)}
    report = holdfast.transfer(source, target, select="model/a")
    assert report.loaded == ("model/a",)
    assert report.received_nbytes == 8
    assert str(target) == str({"model": {"a": torch.ones(2), "b": torch.zeros(2)}, "more": torch.zeros(1)})
    assert told(source, target, select="model/c").code == "incompatible.select"


def lack() -> tuple[str, str, list[float]]:
    """Only rank 1 expects something that no rank has."""
    weight = torch.zeros(2)
    target: dict[str, object] = {"w": weight}
    if dist.get_rank() == 1:
        target["x"] = torch.zeros(1)
    error = told({"w": torch.ones(2)} if dist.get_rank() == 0 else {}, target)
    return error.code, str(error.tensor), weight.tolist()


def test_what_one_rank_lacks_is_an_error_on_all() -> None:
    assert run_ranks(3, lack) == [("incompatible.names", "x", [0.0, 0.0])] * 3


def diverge() -> list[tuple[str, str | None]]:
    """Two transfers: copies that differ from the start, and later."""
    weight = torch.ones(4)
    errors = [told({"w": weight + dist.get_rank()}, {"w": torch.zeros(4)})]
    holdfast.transfer({"w": weight}, {"w": torch.zeros(4)})
    errors.append(told({"w": weight + dist.get_rank()}, {"w": torch.zeros(4)}))
    return [(error.code, error.tensor) for error in errors]


def test_copies_in_the_source_that_differ_are_refused() -> None:
    assert run_ranks(2, diverge) == [[("state.diverged", "w")] * 2] * 2


# Memory in common


def test_a_target_that_shares_memory_with_a_source_is_refused_with_both_names() -> None:
    memory = torch.arange(12.0)
    for target in (memory[4:8], memory[:6], memory):
        error = told({"w": memory[2:6].clone(), "x": memory[2:6]}, {"w": target[:4], "x": torch.zeros(4)})
        assert (type(error), error.code, error.tensor) == (StateError, "state.overlap", "w")
        assert "'x'" in str(error)
    # The same tensor, and not the same elements of it.
    assert told({"w": memory[:4]}, {"w": memory[1:5]}).code == "state.overlap"
    assert torch.equal(memory, torch.arange(12.0))


def test_parts_of_one_memory_that_do_not_meet_are_no_overlap() -> None:
    memory = torch.arange(12.0)
    holdfast.transfer({"w": memory[2:6]}, {"w": memory[6:10]})
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 10, 11]


def test_one_part_that_is_source_and_target_stays_as_it_is() -> None:
    shared, copied = torch.arange(6.0).reshape(2, 3), torch.zeros(2)
    report = holdfast.transfer({"a": shared, "b": torch.ones(2)}, {"a": shared, "b": copied})
    assert report.loaded == ("a", "b")
    assert report.received_nbytes == 8
    assert torch.equal(shared, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(copied, torch.ones(2))
    assert told({"a": shared}, {"a": shared.reshape(3, 2)}).code == "incompatible.shape"
    square = torch.arange(4).reshape(2, 2)
    assert told({"a": square}, {"a": square.t()}).code == "state.overlap"


# One rank suffers


class Told:
    """The error that a rank was told, as plain values."""

    def __init__(self, error: HoldfastError, took_s: float) -> None:
        self.kind, self.code, self.text = type(error).__name__, error.code, str(error)
        self.absent, self.took_s = error.absent, took_s


def transfer_badly(act: str, nodes: tuple[int, ...] | None) -> Told | None:
    """A transfer in which something happens to rank 1 when it reads its part of the source; then another one."""
    read_at = live.LiveFile.read_at

    def watched(file: live.LiveFile, offset: int, out: Bytes) -> None:
        if dist.get_rank() == 1 and len(out) > MIB:
            if act == "fail":
                raise OSError(5, "Input/output error")
            os.kill(os.getpid(), signal.SIGKILL if act == "die" else signal.SIGSTOP)
        read_at(file, offset, out)

    source = {name: divided(Shard(0), name, 6) for name in TENSORS}
    target = {name: divided(Replicate(), name, None) for name in TENSORS}
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, on_node(None if nodes is None else nodes[dist.get_rank()]):
        patch.setattr(live.LiveFile, "read_at", watched)
        try:
            holdfast.transfer(source, target, timeout_s=TIMEOUT_S)
        except HoldfastError as error:
            suffered = Told(error, time.monotonic() - start)
        else:
            return None
    if act == "fail":
        holdfast.transfer(source, target, timeout_s=TIMEOUT_S)
        assert wrong_tensors(target, Replicate(), 6) == []
    return suffered


@pytest.mark.parametrize(
    ("act", "nodes"),
    [
        ("die", None),
        pytest.param("die", (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("stop", None, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_named_in_time(act: str, nodes: tuple[int, ...] | None) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, transfer_badly, act, nodes, timeout_s=TIMEOUT_S + SLACK_S)
    if act == "die":
        assert isinstance(failed.value.by_rank[1], RankDiedError)
    for rank in (0, 2):
        told = failed.value.results[rank]
        assert isinstance(told, Told)
        assert (told.kind, told.absent) == ("DeadlineError", (1,))
        assert told.code in ("timeout.ranks", "timeout.rank_ended")
        assert told.took_s < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("nodes", [None, (0, 1, 2)], ids=["one node", "several nodes"])
def test_what_fails_on_one_rank_is_raised_on_all_at_once_and_can_be_repeated(nodes: tuple[int, ...] | None) -> None:
    for told in run_ranks(3, transfer_badly, "fail", nodes):
        assert isinstance(told, Told)
        assert "rank 1 failed in 'read' of transfer" in told.text
        assert "Input/output error" in told.text
        assert told.took_s < TIMEOUT_S


# The name


def test_the_function_says_what_it_takes() -> None:
    assert inspect.signature(holdfast.transfer) == inspect.signature(publishing.transfer)
    assert "transfer" in holdfast.__all__
    assert_type(holdfast.transfer({"a": 1}, {"a": 0}), TransferReport)
    with pytest.raises(TypeError, match="positional"):
        holdfast.transfer({}, {}, "model")  # type: ignore[call-arg]
