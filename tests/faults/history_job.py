"""The ranks and keepers of `tests.faults.node_histories`. A rank does what the test tells it by a socket.

The state of each save is a function of its job, its step, the name of a tensor and the number of an element. So a rank
that has restored something can tell which save that is of, and whether all of its elements are of that save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast import Checkpointer, HoldfastError, Memory, PerRank
from holdfast.checkpointer.handle import Handle, Stage
from holdfast.keeper.__main__ import serve
from tests.faults.node_histories import Policy, Sizes
from tests.support.nodes import MEMORY

PORT: Final = 29500
#: Limit of a save or restore, on a machine that others use too.
TIMEOUT_S: Final = 60.0
_COLUMNS: Final = 4
#: Values are whole numbers that float32 has, and so are their differences.
_MODULUS: Final = 1_000_003


@dataclass(frozen=True)
class RankPlan:
    """A rank of a job: what it saves where, and the socket of the test."""

    run: str
    policy: Policy
    sizes: Sizes
    job: int
    rank: int
    world_size: int
    store: str
    prefix: str
    socket: str


@dataclass(frozen=True)
class Found:
    """The outcome of a restore: the job and the step of the save that the state is of, -1 for none; its place; the
    tiers that its bytes came from; and names of entries that are of another save."""

    job: int
    step: int
    place: str | None
    tier: str | None
    tiers: frozenset[str]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class SaveStatus:
    """The progress of a save: of each stage, whether it is done."""

    place: str | None
    is_skipped: bool
    staged: bool
    protected: bool
    durable: bool
    trouble: str


@dataclass(frozen=True)
class Failed:
    """The error of what a rank was told to do."""

    code: str
    text: str


class HistoryState:
    """The state of a rank, one of `world_size`. The tensors are divided by rows, as evenly as torch does."""

    def __init__(self, sizes: Sizes, *, rank: int = 0, world_size: int = 1) -> None:
        self._mesh = init_device_mesh("cpu", (world_size,)) if dist.is_initialized() else None
        self._rank, self._world_size = rank, world_size
        self._rows = {"weight": sizes.weight, "table": sizes.table}
        self.weight = nn.Parameter(self._part("weight", torch.zeros(len(self._range("weight")), _COLUMNS)))
        self.table = self._part("table", torch.zeros(len(self._range("table")), _COLUMNS, dtype=torch.int64))
        self.shared = torch.zeros(10_001, dtype=torch.int64)
        self.own = PerRank(torch.zeros(16, dtype=torch.int64), on_resize="first")
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        module = nn.Module()
        module.weight = self.weight
        self.progress: dict[str, Any] = {"job": -1, "step": -1, "writers": 0, "note": ""}
        self.state: dict[str, Any] = {
            "model": module,
            "optimizer": self.optimizer,
            "table": self.table,
            "shared": self.shared,
            "own": self.own,
            "progress": self.progress,
        }

    def fill(self, job: int, step: int, *, note_nbytes: int) -> None:
        """Train: make the state that of a step of a job."""
        weight = _local(self.weight.detach())
        self.weight.grad = self._part("weight", weight - self._values("weight", job, step).float())
        self.optimizer.step()
        _local(self.table).copy_(self._values("table", job, step))
        self.shared.copy_(_mixed(torch.arange(len(self.shared)), job, step, "shared"))
        self.own.value.copy_(self._own(job, step, self._rank))
        self.progress.update(job=job, step=step, writers=self._world_size, note=_note(job, step, note_nbytes))

    def wrong(self) -> tuple[str, ...]:
        """The names of the entries that are not of the step that the state says."""
        job, step, writers = (self.progress[name] for name in ("job", "step", "writers"))
        note = self.progress["note"]
        owner = self._rank if writers == self._world_size else 0
        sound = {
            "weight": torch.equal(_local(self.weight.detach()), self._values("weight", job, step).float()),
            "table": torch.equal(_local(self.table), self._values("table", job, step)),
            "shared": torch.equal(self.shared, _mixed(torch.arange(len(self.shared)), job, step, "shared")),
            "own": torch.equal(self.own.value, self._own(job, step, owner)),
            "note": note == _note(job, step, len(note)),
        }
        return tuple(name for name, is_sound in sound.items() if not is_sound)

    def _range(self, name: str) -> range:
        """The rows of this rank."""
        rows = self._rows[name]
        most = -(-rows // self._world_size)
        return range(min(most * self._rank, rows), min(most * (self._rank + 1), rows))

    def _part(self, name: str, local: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return local
        shape, stride = torch.Size((self._rows[name], _COLUMNS)), (_COLUMNS, 1)
        part: torch.Tensor = DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        return part

    def _values(self, name: str, job: int, step: int) -> torch.Tensor:
        rows = self._range(name)
        numbers = torch.arange(rows.start * _COLUMNS, rows.stop * _COLUMNS).reshape(-1, _COLUMNS)
        return _mixed(numbers, job, step, name)

    @staticmethod
    def _own(job: int, step: int, rank: int) -> torch.Tensor:
        return _mixed(torch.arange(16), job, step, f"own {rank}")


def _mixed(numbers: torch.Tensor, job: int, step: int, name: str) -> torch.Tensor:
    """The values of the elements with these global numbers."""
    salt = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % _MODULUS
    mixed: torch.Tensor = (numbers * 7919 + (job + 2) * 104_729 + (step + 2) * 15_485_863 + salt) % _MODULUS
    return mixed


def _note(job: int, step: int, nbytes: int) -> str:
    return (f"job {job}, step {step}; " * (nbytes // 8 + 1))[:nbytes]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


class _Rank:
    """A rank that does what it is told."""

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self._state = HistoryState(plan.sizes, rank=plan.rank, world_size=plan.world_size)
        memory = Memory(node_dir=MEMORY, protect=plan.policy)
        self._checkpointer = Checkpointer(plan.run, self._state.state, memory=memory, timeout_s=TIMEOUT_S)
        self._handles: dict[int, Handle] = {}

    def restore(self) -> Found:
        """Restore, and look at what that is."""
        report = self._checkpointer.restore()
        tiers = frozenset(each.tier for each in report.sources)
        if report.step is None:
            return Found(-1, -1, None, None, tiers, ())
        job, step = self._state.progress["job"], self._state.progress["step"]
        wrong = self._state.wrong() if step == report.step else ("step",)
        return Found(job, step, report.place, report.tier, tiers, wrong)

    def save(self, step: int, memory_only: bool, note_nbytes: int) -> SaveStatus:
        """Train a step, and save it."""
        self._state.fill(self._plan.job, step, note_nbytes=note_nbytes)
        self._handles[step] = self._checkpointer.save(step, memory_only=memory_only)
        return self.status(step)

    def wait(self, step: int, stage: str, timeout_s: float) -> SaveStatus:
        """Wait until a save has got to a stage, or will not, for some time at most."""
        waited: Stage = getattr(self._handles[step], stage)
        end = time.monotonic() + timeout_s
        while not waited.is_over and time.monotonic() < end:
            time.sleep(0.005)
        return self.status(step)

    def status(self, step: int) -> SaveStatus:
        """The progress of the save of a step."""
        handle = self._handles[step]
        return SaveStatus(
            None if handle.place is None else str(handle.place),
            handle.skipped,
            handle.staged.is_done,
            handle.protected.is_done,
            handle.durable.is_done,
            handle.trouble or str(handle.protected.error or ""),
        )

    def close(self) -> bool:
        """Close the checkpointer, which waits until all is durable that is to be."""
        self._checkpointer.close()
        return True


def work(plan: RankPlan) -> None:
    """The function of a rank's process."""
    connection = Client(plan.socket)
    connection.send((plan.job, plan.rank))
    store = dist.PrefixStore(plan.prefix, dist.TCPStore(plan.store, PORT, is_master=False))
    dist.init_process_group(
        "gloo", store=store, rank=plan.rank, world_size=plan.world_size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    rank = _Rank(plan)
    _obey(connection, rank)


def _obey(connection: Connection, rank: _Rank) -> None:
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # the test has ended
            return
        todo: Callable[..., object] = getattr(rank, name)
        try:
            connection.send(todo(*arguments))
        except HoldfastError as error:
            connection.send(Failed(error.code, str(error)))


def keep(run: str) -> None:
    """The function of a keeper's process."""
    with patch.object(os, "nice"):  # beside other work of the machine, one that gives way takes long
        serve(run, node_dir=str(MEMORY), idle_s=600.0, grace_s=5.0)


_served: list[dist.TCPStore] = []


def serve_store(name: str, ready: Path) -> None:
    """The function of a process that serves the store of the process groups, until it is killed."""
    _served.append(dist.TCPStore(name, PORT, is_master=True, wait_for_workers=False))
    ready.touch()
    time.sleep(36_000)
