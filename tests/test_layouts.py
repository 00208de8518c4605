"""Every kind of parallelism into every other: saved as one, loaded as another, bit for bit.

`python -m pytest -rA tests/test_layouts.py` lists source, target, seed and number of processes of each pair.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import holdfast
from holdfast.errors import HoldfastError, StateError
from tests.layout_cells import UNITS, Cell, build, cut, differing, filled, held, holds, model_of, spread
from tests.models import bits, full, start_new_job, write
from tests.ranks import RanksFailedError, run_ranks

CELLS = [
    Cell("plain", (1,)),
    Cell("tp", (1,)),
    Cell("pp", (1,)),
    Cell("fsdp", (2,)),
    Cell("hsdp", (1, 2)),
    Cell("hsdp", (2, 1)),
    Cell("fsdp_tp", (1, 2)),
    Cell("ep_fsdp", (2, 1)),
    Cell("pp", (2,)),
    Cell("ddp", (3,)),
    Cell("tp", (3,)),
    Cell("fsdp_tp", (1, 3)),
    Cell("ep", (1, 3)),
    Cell("pp", (3,)),
    Cell("tp", (4,)),
    Cell("hsdp", (2, 2)),
    Cell("fsdp_tp", (2, 2)),
    Cell("pp_fsdp", (2, 2)),
    Cell("ep", (2, 2)),
    Cell("ep_fsdp", (2, 2)),
    Cell("fsdp", (8,)),
    Cell("hsdp", (2, 4)),
    Cell("tp", (8,)),
    Cell("fsdp_tp", (4, 2)),
    Cell("fsdp_tp", (2, 4)),
    Cell("hsdp_tp", (2, 2, 2)),
    Cell("pp", (8,)),
    Cell("pp_fsdp", (4, 2)),
    Cell("ep", (2, 4)),
    Cell("ep_fsdp", (2, 4)),
    Cell("ep_fsdp", (4, 2)),
]
#: Hard pairs: what one side shards strided, unevenly, along other axes or not at all, the other divides differently.
#: Every kind is a source and a target.
HARD = [
    (Cell("fsdp_tp", (2, 2)), Cell("tp", (3,))),
    (Cell("tp", (3,)), Cell("fsdp_tp", (2, 2))),
    (Cell("fsdp_tp", (1, 3)), Cell("fsdp_tp", (2, 2))),
    (Cell("hsdp", (2, 2)), Cell("fsdp_tp", (1, 3))),
    (Cell("ddp", (3,)), Cell("hsdp", (2, 2))),
    (Cell("ep_fsdp", (2, 2)), Cell("ep", (1, 3))),
    (Cell("ep", (2, 2)), Cell("pp", (3,))),
    (Cell("pp", (3,)), Cell("ep_fsdp", (2, 2))),
    (Cell("pp_fsdp", (2, 2)), Cell("fsdp", (3,))),
    (Cell("fsdp", (3,)), Cell("pp_fsdp", (2, 2))),
    (Cell("tp", (4,)), Cell("plain", (1,))),
    (Cell("plain", (1,)), Cell("tp", (4,))),
    (Cell("pp", (2,)), Cell("ddp", (2,))),
    (Cell("hsdp_tp", (2, 2, 2)), Cell("pp", (8,))),
    (Cell("pp", (8,)), Cell("hsdp_tp", (2, 2, 2))),
]


def save(cell: Cell, run: str, seed: int) -> tuple[int, int]:
    start_new_job()
    report = holdfast.save(run, filled(cell, seed).state, 30, timeout_s=60)
    return report.nbytes, report.written_nbytes


def load(cell: Cell, run: str, seed: int) -> tuple[list[str], set[str]]:
    """What differs from the truth, and what was not loaded. Optimizers that never stepped get their state, too."""
    job = build(cell, seed + 1, num_steps=seed % 2)
    report = holdfast.load(run, into=job.state, timeout_s=60)
    return differing(job, seed), {name for name, _, _ in held(job)} - set(report.loaded)


def check_stored(run: Path, seed: int) -> None:
    """The files hold the full tensors, whoever wrote them."""
    view = holdfast.open(run)
    truth = {name: full(seed, name, tensor) for name, tensor, _ in held(build(Cell("plain", (1,)), seed))}
    assert view.names() == sorted(truth)
    assert [name for name, whole in truth.items() if view[name].numpy().tobytes() != whole.tobytes()] == []


def check_saved(run: Path, source: Cell, seed: int) -> None:
    sizes = run_ranks(source.world_size, save, source, str(run), seed, timeout_s=100)
    assert {nbytes for nbytes, _ in sizes} == {sum(written for _, written in sizes)}
    check_stored(run, seed)


def check_loaded(run: Path, target: Cell, seed: int) -> None:
    found = run_ranks(target.world_size, load, target, str(run), seed, timeout_s=100)
    assert found == [([], set())] * target.world_size


def pair_id(value: object) -> str:
    return f"seed{value}" if isinstance(value, int) else str(value)


def case(source: Cell, target: Cell, seed: int) -> object:
    processes = source.world_size + target.world_size
    return pytest.param(source, target, seed, id=f"{source}-to-{target}-seed{seed}-{processes}processes")


@pytest.mark.parametrize(
    ("source", "target", "seed"), [case(source, target, seed) for seed, (source, target) in enumerate(HARD)]
)
def test_any_parallelism_loads_any_other(tmp_path: Path, source: Cell, target: Cell, seed: int) -> None:
    check_saved(tmp_path / "run", source, seed)
    check_loaded(tmp_path / "run", target, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("source", "seed"),
    [
        pytest.param(cell, 100 + i, id=f"{cell}-to-{len(CELLS) - 1}-others-seed{100 + i}")
        for i, cell in enumerate(CELLS)
    ],
)
def test_every_parallelism_loads_every_other(tmp_path: Path, source: Cell, seed: int) -> None:
    check_saved(tmp_path / "run", source, seed)
    for target in CELLS:
        if target != source:
            check_loaded(tmp_path / "run", target, seed)
            print(f"{source} -> {target}: seed {seed}, {source.world_size} + {target.world_size} processes")  # noqa: T201
