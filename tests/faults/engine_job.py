"""A small training job of real processes. Each step changes its state, which is a function of the step alone.

All numbers are such that every machine computes them alike, in any order: the gradient is made of whole numbers, and
momentum and rate are powers of 2. So the state of every step is known without asking the job, see `Truth`.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast import Checkpointer, Copies, HoldfastError, Memory, NotFoundError, Parity, PerRank
from holdfast.checkpointer.handle import Handle, Stage
from holdfast.errors import CorruptError
from holdfast.keeper.__main__ import serve
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.faults.engine_points import Deed, Log, Role, traced
from tests.support import nursery
from tests.support.keepers import end_keepers
from tests.support.nursery import until
from tests.support.rank_worker import HOST

WORLD_SIZE: Final = 2
#: Elements of the weight: a data file of each rank, with its momentum, has three blocks that are hashed.
NUMEL: Final = WORLD_SIZE * 5 * 2**16
SMALL_NUMEL: Final = WORLD_SIZE * 2**12

PauseAt = Literal["staged", "durable", "over", "protected"]

_WHOLE: Final = (SlotState.STAGED, SlotState.SEALED, SlotState.HELD, SlotState.COMMITTED, SlotState.FENCED)


class Training:
    """The state of this rank, one of `world_size` ranks, which divide the weight among them. It also has entries that a
    save copies at once: a buffer, a tensor that each rank has for itself, and a value."""

    def __init__(self, numel: int, *, rank: int = 0, world_size: int = 1) -> None:
        size = numel // world_size
        self._grid = torch.arange(size * rank, size * (rank + 1), dtype=torch.float32)
        self._mesh = init_device_mesh("cpu", (world_size,)) if dist.is_initialized() else None
        self.weight = nn.Parameter(self._part(torch.zeros(size)))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.125, momentum=0.5)
        self.module = nn.Module()
        self.module.weight = self.weight
        self.module.register_buffer("seen", torch.zeros(8, dtype=torch.int64))
        self.own = PerRank(torch.zeros(16, dtype=torch.int64), on_resize="first")
        self.state: dict[str, Any] = {
            "model": self.module,
            "optimizer": self.optimizer,
            "own": self.own,
            "progress": {"step": -1},
        }

    def _part(self, local: torch.Tensor) -> torch.Tensor:
        return local if self._mesh is None else DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False)

    def step(self, number: int) -> None:
        """Do step `number`, from the state of the step before."""
        self.weight.grad = self._part((self._grid * 7 + number * 13) % 64 - 31)
        self.optimizer.step()
        self.module.seen.fill_(number)  # type: ignore[operator]
        self.own.value.fill_(-number)
        self.state["progress"]["step"] = number

    def digest(self) -> str:
        """The digest of this rank's whole state, bit for bit."""
        momentum = self.optimizer.state[self.weight].get("momentum_buffer") if self.optimizer.state else None
        found = xxhash.xxh3_128(str(self.state["progress"]["step"]).encode())
        for tensor in (self.weight, momentum, self.module.seen, self.own.value):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                found.update(local.detach().numpy().tobytes())
        return found.hexdigest()


class Truth:
    """The digests of every rank's state at every step."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._parts: dict[tuple[int, int], Training] = {}
        self._digests = defaultdict[tuple[int, int], list[str]](list)

    def digest(self, step: int, *, rank: int = 0, world_size: int = 1) -> str:
        """The digest of the state of `rank` at `step`."""
        key = rank, world_size
        digests = self._digests[key]
        if key not in self._parts:
            self._parts[key] = Training(self.numel, rank=rank, world_size=world_size)
        while len(digests) <= step:
            self._parts[key].step(len(digests))
            digests.append(self._parts[key].digest())
        return digests[step]

    def loaded(self, run: str) -> int:
        """Load the checkpoint at `run` in one process, and check it bit for bit. Returns its step; -1 for none."""
        training = Training(self.numel)
        try:
            step = holdfast.load(run, into=training.state).step
        except NotFoundError as error:
            assert error.code in ("not_found.run", "not_found.head")  # noqa: PT017 - another error is raised as it is
            return -1
        assert training.digest() == self.digest(step), f"what was loaded of {run} is not what step {step} was"
        return step


@dataclass(frozen=True)
class Spec:
    """A job: it `begins` with a restore, and saves every step until `stop`.

    Before the save of a step in `pauses` it stands still until it is let on, once all it has saved is staged, is
    durable, is over, that is, held in memory if it is not for storage, or is over and the last one is protected as
    `protect` says. `deeds` are done by its processes at points. Storage gets every `durable_every`-th step; the others
    are saved to memory alone.
    """

    run: str
    node_dirs: tuple[Path, ...]
    log: Path
    port: int = 0
    host: str = HOST
    world_size: int = WORLD_SIZE
    numel: int = NUMEL
    stop: int = 10**9
    pauses: Mapping[int, PauseAt] = field(default_factory=dict)
    deeds: Sequence[Deed] = ()
    generations: int = 2
    durable_every: int = 1
    protect: Copies | Parity | None = None
    when_full: Literal["wait", "skip"] = "wait"
    timeout_s: float = 60.0
    begins: Literal["restoring", "anew", "taking over"] = "restoring"

    def node_dir(self, rank: int) -> Path:
        """The folder of the memory of the rank's node."""
        return self.node_dirs[rank % len(self.node_dirs)]

    def folder(self, node_dir: Path) -> NodeFolder:
        """The memory of the run on a node."""
        return NodeFolder(open_store(Location(self.run)).location.url, node_dir=node_dir)


def train(spec: Spec, rank: int) -> None:
    """The function of a rank's process: train and save."""
    store = dist.TCPStore(spec.host, spec.port, is_master=False)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.world_size, timeout=timeout)
    train_in_group(spec)


def train_in_group(spec: Spec) -> None:
    """Train and save as a rank of the default process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log, who = Log(spec.log), f"rank-{rank}"
    log.enter(who)
    training = Training(spec.numel, rank=rank, world_size=world_size)
    memory = Memory(node_dir=spec.node_dir(rank), generations=spec.generations, protect=spec.protect)
    with traced(log, who, spec.deeds):
        told = _Told(log, who, is_protected=spec.protect is not None)
        try:
            with Checkpointer(
                spec.run,
                training.state,
                memory=memory,
                takeover=spec.begins == "taking over",
                when_full=spec.when_full,
                timeout_s=spec.timeout_s,
            ) as checkpointer:
                begin = 0
                if spec.begins == "restoring":
                    report = checkpointer.restore()
                    begin = report.next_step
                    digest = training.digest()
                    rejected = [each.reason for each in report.rejected]
                    about = {"tier": report.tier, "digest": digest, "world_size": world_size, "rejected": rejected}
                    log.tell(who, "restored", step=report.step, **about)
                for step in range(begin, spec.stop):
                    training.step(step)
                    told.look()
                    if step in spec.pauses:
                        told.pause(step, spec.pauses[step])
                    told.expect(checkpointer.save(step, memory_only=step % spec.durable_every != 0))
            told.look()
        except HoldfastError as error:
            told.look()
            log.tell(who, "failed", code=error.code, text=str(error))
            raise
    log.tell(who, "ended")


class _Told:
    """Writes the events of saves to the log."""

    def __init__(self, log: Log, who: str, *, is_protected: bool) -> None:
        self._log = log
        self._who = who
        self._stages = ("staged", "protected", "durable") if is_protected else ("staged", "durable")
        self._open: list[tuple[str, Handle]] = []
        self._trouble: dict[int, str] = {}

    def expect(self, handle: Handle) -> None:
        """Watch this save too, from now on."""
        self._log.tell(self._who, "saved", step=handle.step, skipped=handle.skipped)
        self._open += [] if handle.skipped else [(name, handle) for name in self._stages]

    def look(self) -> None:
        """Write new events to the log."""
        for name, handle in list(self._open):
            stage: Stage = getattr(handle, name)
            if stage.is_over:
                self._open.remove((name, handle))
                self._log.tell(self._who, name if stage.is_done else "lost", step=handle.step, stage=name)
            elif handle.trouble and handle.trouble != self._trouble.get(handle.step):
                self._trouble[handle.step] = handle.trouble
                self._log.tell(self._who, "trouble", step=handle.step, text=handle.trouble)

    def pause(self, step: int, what: PauseAt) -> None:
        """Pause before the save of a step, after all earlier saves have come so far."""
        for _, handle in self._open:
            if what in ("over", "protected"):
                until(lambda handle=handle: handle.durable.is_over, timeout_s=60)  # type: ignore[misc]
            else:
                (handle.staged if what == "staged" else handle.durable).wait(60)
        if what == "protected" and self._open:  # an older one may have been replaced before it was
            self._open[-1][1].protected.wait(60)
        self.look()
        self._log.tell(self._who, "paused", step=step)
        self._log.wait_for(f"pass-{step}")


def keep(spec: Spec, node_dir: Path, who: str = "keeper") -> None:
    """The function of a keeper's process: as a keeper that trainers start, but with deeds to do."""
    log = Log(spec.log)
    log.enter(who)
    # Beside other work of the machine, one that gives way takes long.
    with traced(log, who, spec.deeds), patch.object(os, "nice"):
        serve(spec.run, node_dir=str(node_dir), idle_s=600.0, grace_s=5.0)


class Restored(NamedTuple):
    """The result of a job's restore."""

    step: int
    tier: str | None


class Job:
    """The processes of a job. The end of the ``with`` block kills those that still run."""

    def __init__(self, spec: Spec) -> None:
        spec.log.mkdir()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.spec = replace(spec, port=self._store.port)
        self.log = Log(spec.log)
        self.keeper: nursery.Process | None = None
        self.ranks: list[nursery.Process] = []

    def start_keeper(self) -> None:
        """Start a keeper that does the deeds, on the only node."""
        (node_dir,) = self.spec.node_dirs
        self.keeper = nursery.start(keep, self.spec, node_dir, err=self.spec.log / "keeper.err")
        with self.spec.folder(node_dir) as folder:
            until(lambda: is_kept(folder))

    def start_ranks(self) -> None:
        """Start the processes of all ranks."""
        self.ranks = [
            nursery.start(train, self.spec, rank, err=self.spec.log / f"rank-{rank}.err") for rank in range(WORLD_SIZE)
        ]

    def arm(self, *roles: Role) -> None:
        """Arm the deeds of these roles: they are done from now on."""
        for role in roles:
            self.log.let(f"armed-{role}")

    def until_told(self, event: str, *, step: int | None = None, ranks: Sequence[int] = range(WORLD_SIZE)) -> None:
        """Wait until all `ranks` have logged an event (of that step)."""
        for rank in ranks:
            until(lambda rank=rank: self._has_told(rank, event, step) or self._lives(rank, event, step))  # type: ignore[misc]

    def _has_told(self, rank: int, event: str, step: int | None) -> bool:
        return any(step in (None, each.get("step")) for each in self.log.told(f"rank-{rank}", event))

    def _lives(self, rank: int, event: str, step: int | None) -> bool:
        """Returns False as long as the rank may still log that event."""
        if not self.ranks[rank].is_running:
            assert self._has_told(rank, event, step), f"rank {rank} did not tell '{event}': {self.ranks[rank].err}"
        return False

    def durable(self) -> int:
        """The last step that a handle reported as durable; -1 for none."""
        events = [each for rank in range(WORLD_SIZE) for each in self.log.told(f"rank-{rank}", "durable")]
        return max([each["step"] for each in events], default=-1)

    def durable_steps(self) -> set[int]:
        """All steps that handles reported as durable."""
        return {each["step"] for rank in range(WORLD_SIZE) for each in self.log.told(f"rank-{rank}", "durable")}

    def kill_ranks(self) -> None:
        """Kill the ranks that still live."""
        for process in self.ranks:
            process.send(signal.SIGKILL)
        for process in self.ranks:
            process.wait()

    def restored(self, truth: Truth) -> Restored:
        """The step that all ranks have restored, checked bit for bit; -1 for nothing."""
        self.until_told("restored")
        (first, *_), (second, *_) = (self.log.told(f"rank-{rank}", "restored") for rank in range(WORLD_SIZE))
        assert (first["step"], first["tier"]) == (second["step"], second["tier"])
        step = first["step"]
        if step is not None:
            for rank, each in enumerate((first, second)):
                assert each["digest"] == truth.digest(step, rank=rank, world_size=WORLD_SIZE), f"step {step} differs"
        return Restored(-1 if step is None else step, first["tier"])

    def ended_well(self) -> None:
        """Wait until all ranks have ended without an error."""
        for process in self.ranks:
            assert process.wait() == 0, process.err

    def ended_killed(self) -> None:
        """Wait until all ranks have been killed."""
        for process in self.ranks:
            assert process.wait() == -signal.SIGKILL, process.err

    def close(self) -> None:
        """Kill all processes that still run."""
        for process in (*self.ranks, *([self.keeper] if self.keeper else [])):
            process.kill()
        del self._store


@contextmanager
def job(spec: Spec, *, keeper: bool = False, armed: Sequence[Role] = ()) -> Iterator[Job]:
    """Start a job: with its own `keeper`, or with the keeper that its ranks find or start. Deeds of `armed` roles are
    armed from the start."""
    made = Job(spec)
    try:
        made.arm(*armed)
        if keeper:
            made.start_keeper()
        made.start_ranks()
        yield made
    finally:
        made.close()


def whole_in_memory(spec: Spec) -> dict[int, set[str]]:
    """The steps that all nodes together hold whole in memory, at least staged, with the states of their slots."""
    found: dict[str, tuple[int, set[int], set[str]]] = {}
    for node_dir in spec.node_dirs:
        with spec.folder(node_dir) as folder, ExitStack() as stack:
            known = set(folder.names())
            for name in slot_names(folder):
                with suppress(FileNotFoundError, CorruptError):
                    record = stack.enter_context(Slot(folder, name)).record
                    contents = record.contents
                    if contents and record.state in _WHOLE and f"generation-{contents.checkpoint_id}" in known:
                        _, files, states = found.setdefault(contents.checkpoint_id, (contents.step, set(), set()))
                        files.add(contents.file)
                        states.add(record.state.name)
    return {step: states for step, files, states in found.values() if files == set(range(WORLD_SIZE))}


@contextmanager
def node_memory(parent: Path, *, count: int = 1) -> Iterator[tuple[Path, ...]]:
    """The memory of some nodes: folders in memory, or else in `parent`. Their keepers are killed at the end."""
    in_memory = Path("/dev/shm")
    free = shutil.disk_usage(in_memory).free if in_memory.is_dir() else 0
    with tempfile.TemporaryDirectory(dir=in_memory if free > 2**30 else parent, prefix="holdfast-test-") as name:
        paths = tuple(Path(name) / f"node{number}" for number in range(count))
        for path in paths:
            path.mkdir()
        try:
            yield paths
        finally:
            for path in paths:
                end_keepers(path)
