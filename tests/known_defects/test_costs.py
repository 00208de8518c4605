"""Cliffs: costs that grow with the wrong quantity. Counted, not timed, except where the cliff is minutes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast.format.records import Place
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Mesh, Placed, Shard, TensorLayout
from holdfast.plan.save import CheckpointIdentity, RankMessage, encode_plan, plan_save
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixReader
from tests.known_defects.saved import data_file, folder, told_of_calls


@contextmanager
def read_nbytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of all reads of data files within the block."""
    sizes: list[int] = []
    read_at = PosixReader.read_at

    def counted(self: PosixReader, offset: int, out: Bytes) -> None:
        sizes.append(len(out))
        read_at(self, offset, out)

    with monkeypatch.context() as patch:
        patch.setattr(PosixReader, "read_at", counted)
        yield sizes


def test_a_slice_reads_the_whole_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are wanted and whole shards are read: twice to eight times the bytes when resharding.

    Seen in: PyTorch DCP 2.13 (2.02x for two ranks), ByteCheckpoint (1.5x to 4x), Megatron torch_dist.
    """
    weight = torch.arange(16 * 2**20 // 4).reshape(-1, 1024)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    with read_nbytes(monkeypatch) as sizes:
        rows = holdfast.open(tmp_path / "run")["weight"][1500:1510]
    assert torch.equal(rows, weight[1500:1510])
    assert sum(sizes) <= 2 * 2**20 + 8192


def test_a_load_reads_bytes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading everything reads more than is stored.

    Seen in: DeepSpeed 0.19.6 (every rank reads all atoms), PyTorch DCP 2.13 (each replica reads all).
    """
    state = {f"weight-{n}": torch.full((n * 997 + 1,), float(n)) for n in range(200)}
    holdfast.save(tmp_path / "run", state, 1)
    with read_nbytes(monkeypatch) as sizes:
        holdfast.load(tmp_path / "run", into=state)
    assert sum(sizes) <= 1.02 * data_file(tmp_path / "run").stat().st_size + 2**20


def test_a_view_drags_its_whole_storage_along(tmp_path: Path) -> None:
    """Ten elements of a large tensor are saved; the storage behind them, 100 MB, is copied or written.

    Seen in: PyTorch DCP 2.13 (stagers copy storages).
    """
    large = torch.zeros(2**22)
    large[100:110] = torch.arange(10.0)
    holdfast.save(tmp_path / "run", {"view": large[100:110]}, 1)
    assert data_file(tmp_path / "run").stat().st_size <= 16384
    assert torch.equal(holdfast.open(tmp_path / "run")["view"][:], torch.arange(10.0))


def test_a_scalar_costs_kilobytes(tmp_path: Path) -> None:
    """A tensor of one element takes 1,577 bytes of data and 198 of metadata; a number as much.

    Seen in: PyTorch DCP 2.13, Megatron torch_dist.
    """
    state: dict[str, object] = {f"t{n:04}": torch.tensor(float(n)) for n in range(1000)}
    state["numbers"] = {f"v{n:04}": n for n in range(1000)}
    holdfast.save(tmp_path / "run", state, 1)
    nbytes = sum(path.stat().st_size for path in folder(tmp_path / "run").iterdir())
    assert nbytes < 2000 * 100


def test_a_parameter_costs_files(tmp_path: Path) -> None:
    """Every parameter and optimizer slot is a file of its own: 1.1 million for a model of 70B.

    Seen in: DeepSpeed 0.19.6 (`ds_to_universal`).
    """
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(60)])
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    report = holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    assert report.num_tensors == 480
    assert len(list(folder(tmp_path / "run").iterdir())) == 3


def test_a_tensor_costs_a_file_descriptor(tmp_path: Path) -> None:
    """Each staged tensor holds a descriptor: "received 0 items of ancdata" for a few thousand tensors.

    Seen in: xtuner, InternLM/xtuner#1859 and #1852.
    """
    highest = [0]

    def note(call: str, args: tuple[Any, ...], result: Any) -> None:
        if call in ("open", "pwrite", "fsync", "link"):
            highest[0] = max(highest[0], len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd"))
    with told_of_calls(note):
        holdfast.save(tmp_path / "run", {f"t{n}": torch.zeros(3) for n in range(1000)}, 1)
    assert before < highest[0] <= before + 8


NUM_RANKS, NUM_TENSORS = 1024, 1024


def test_planning_takes_minutes_and_metadata_a_gigabyte() -> None:
    """1,024 tensors on 1,024 ranks: all pairs of shards are compared in over 200 s, metadata is 180 bytes per shard.

    Seen in: PyTorch DCP, pytorch/pytorch#163548, #149785; ByteCheckpoint 0.0.3 (37 s for 100 tensors).
    """
    mesh = Mesh((NUM_RANKS,), tuple(range(NUM_RANKS)))
    layouts = [
        TensorLayout(f"layer-{n:04}", "float32", (8192, 64 + n % 7), Placed(mesh, (Shard(0),)))
        for n in range(NUM_TENSORS)
    ]
    start = time.monotonic()
    rank = RankLayout.of(layouts, {})
    plan = plan_save([RankMessage(rank.digest, rank.columns)] * NUM_RANKS, {rank.digest: rank.body})
    identity = CheckpointIdentity("0" * 16, "0" * 32, Place(1, 1), 1, 0.0, {})
    manifest = encode_plan(plan, identity=identity, values=())
    assert time.monotonic() - start < 20
    assert len(manifest) < 2**20
