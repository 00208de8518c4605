"""The contenders of ``bench engine``: ways to save a live training state, with or without a wait for the device."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from bench.async_peers import DcpAsync, TorchCheckpointingAsync, TorchSnapshotAsync
from bench.contenders import DIRECT, SEALED, SYNCED, Dcp, Raw, TorchSave, not_installed
from bench.live import Live
from bench.raw import RAW_WAYS, RawImage
from bench.schema import RAW, Contender, chosen
from bench.state import State
from bench.way import Futures, Pending, Staged, Way
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Location
from holdfast.store.urls import open_store

#: Snapshots that holdfast keeps in the memory of the node, per rank.
GENERATIONS = 2

SYNC, OURS, OURS_SYNC = "dcp", "holdfast", "holdfast-sync"
THREAD, PROCESS = "dcp-async-thread", "dcp-async-process"
#: The packages of contenders that not every environment has.
PACKAGES = {"torchsnapshot-async": "torchsnapshot", "torch_checkpointing-async": "torch_checkpointing"}


class Site(NamedTuple):
    """The state that a rank saves, and its folders: contenders that save everything into one run use `run`."""

    state: State
    live: Live
    run: Path
    node_dir: Path
    direct: bool


class HoldfastSync(Way):
    """`holdfast.save` of the live objects, all into one run."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.state)
        self._run = str(site.run)
        self._objects = site.live.objects
        self._steps = itertools.count()

    def save(self, folder: Path) -> None:
        """Save; returns when it is durable and committed."""
        holdfast.save(self._run, self._objects, next(self._steps))

    def load(self, folder: Path) -> None:
        """Load the head of the run."""
        holdfast.load(self._run, into=self._objects)


class RawBeside(Way):
    """The raw limit beside a loop: what the device takes from the cores when as many bytes are written, and no more.

    Where it is a virtual one, its host may do that on the same cores.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site.state)
        image = RawImage(site.state.share(dist.get_rank(), dist.get_world_size()))
        self._raw = Raw(site.state, image, RAW_WAYS["1 x 16 MiB"], direct=site.direct)
        self._pool = ThreadPoolExecutor(1)

    def begin(self, folder: Path) -> Pending:
        """Begin to write what was in the state at first."""
        return Futures(self._pool.submit(self._raw.save, folder))

    def load(self, folder: Path) -> None:
        """Read it."""
        self._raw.load(folder)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


class Holdfast(Way):
    """`holdfast.Checkpointer` of the live objects. Its guard is in the optimizer."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.state)
        self._run = str(site.run)
        self._objects = site.live.objects
        memory = holdfast.Memory(generations=GENERATIONS, node_dir=site.node_dir)
        self._checkpointer = holdfast.Checkpointer(self._run, self._objects, memory=memory)
        self._steps = itertools.count()

    def begin(self, folder: Path) -> Pending:
        """Begin to save."""
        return Staged(self._checkpointer.save(next(self._steps)))

    def load(self, folder: Path) -> None:
        """Load the head of the run, from storage."""
        holdfast.load(self._run, into=self._objects)

    def close(self) -> None:
        """End the background threads; keeper and memory stay."""
        self._checkpointer.close()


_BUILDERS: dict[str, Callable[[Site], Way]] = {
    RAW: RawBeside,
    "torch.save": lambda site: TorchSave(site.state),
    SYNC: lambda site: Dcp(site.state),
    THREAD: lambda site: DcpAsync(site.state, AsyncCheckpointerType.THREAD),
    PROCESS: lambda site: DcpAsync(site.state, AsyncCheckpointerType.PROCESS),
    "torchsnapshot-async": lambda site: TorchSnapshotAsync(site.state),
    "torch_checkpointing-async": lambda site: TorchCheckpointingAsync(site.state),
    OURS_SYNC: HoldfastSync,
    OURS: Holdfast,
}

#: Every contender of the saves, in the order of the table; and those that are measured beside a loop.
NAMES = tuple(_BUILDERS)
BACKGROUND = (OURS, THREAD, PROCESS)
#: Those that save everything into one run.
_RUNS = (OURS_SYNC, OURS)


_DCP = "torch.distributed.checkpoint.async_save, its stager kept and copying in the background"
#: What the figures of those include that are not as in `bench.contenders`.
OWN = (
    Contender(THREAD, f"{_DCP}, written by a thread", SYNCED),
    Contender(PROCESS, f"{_DCP} into shared memory, written by a process", SYNCED),
    Contender(
        "torchsnapshot-async",
        "Snapshot.async_take, defaults, ShardedTensors in place of DTensors, all else replicated",
    ),
    Contender(
        "torch_checkpointing-async",
        "CheckpointManager with its saver for the background, DefaultResharder for every item",
    ),
    Contender(OURS_SYNC, "holdfast.save, defaults, all saves into one run", SEALED, io=DIRECT),
    Contender(OURS, "holdfast.Checkpointer, defaults, all saves into one run", SEALED, io=DIRECT),
)


def able(names: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The contenders in `names` that can run here, in the order of the table, and the reasons why others cannot.
    Raises SetupError for an unknown name."""
    absent: dict[str, str] = {}
    for name in chosen(names, NAMES, kind="contender"):
        absent |= not_installed(name, PACKAGES.get(name))
    return tuple(name for name in NAMES if name in names and name not in absent), absent


def build(name: str, site: Site) -> Way:
    """The contender called `name`. Collective."""
    return _BUILDERS[name](site)


def folder_of(name: str, what: str, root: Path) -> Path:
    """The folder below `root` where `name` saves `what`: one for each save, or the run that has all of them."""
    return root / name / "run" if name in _RUNS else root / name / what


def discard(name: str, folder: Path) -> None:
    """Delete what `name` saved into `folder`; of a run all checkpoints but its head, which later saves follow."""
    if name not in _RUNS:
        shutil.rmtree(folder)
        return
    run = Run.open(open_store(Location(str(folder))))
    _head, *older = run.lineage()
    for commit in older:
        remove_checkpoint(run, commit)
