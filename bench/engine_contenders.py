"""The contenders of ``bench engine``: ways to save a live training state, with or without a wait for the device."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from bench.async_peers import DcpAsync, TorchCheckpointingAsync, TorchSnapshotAsync
from bench.contenders import Contender, Dcp, Raw, TorchSave
from bench.errors import SetupError
from bench.live import Live
from bench.pending import Futures, Over, Pending, Staged
from bench.raw import RAW_WAYS, RawImage, takes_direct
from bench.results import RAW, NotPossible
from bench.saver import Saver
from bench.state import State
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
    """What a rank saves, and where: `run` is the folder of those that save everything into one run."""

    state: State
    live: Live
    run: Path
    node_dir: Path


class Whole(Saver):
    """A contender of `bench.contenders`, which returns when the save is over."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender

    def begin(self, folder: Path) -> Pending:
        """Save."""
        self._contender.save(folder)
        return Over()

    def load(self, folder: Path) -> None:
        """Load."""
        self._contender.load(folder)


class HoldfastSync(Saver):
    """`holdfast.save` of the live objects, all into one run."""

    def __init__(self, site: Site) -> None:
        self._run = str(site.run)
        self._objects = site.live.objects
        self._steps = itertools.count()

    def begin(self, folder: Path) -> Pending:
        """Save; returns when it is durable and committed."""
        holdfast.save(self._run, self._objects, next(self._steps))
        return Over()

    def load(self, folder: Path) -> None:
        """Load the head of the run."""
        holdfast.load(self._run, into=self._objects)


class RawBeside(Saver):
    """The raw limit beside a loop: what the device takes from the cores when as many bytes are written, and no more.

    Where it is a virtual one, its host may do that on the same cores.
    """

    def __init__(self, site: Site) -> None:
        image = RawImage(site.state.share(dist.get_rank(), dist.get_world_size()))
        self._raw = Raw(image, RAW_WAYS["1 x 16 MiB"], direct=takes_direct(site.run.parent.parent))
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


class Holdfast(Saver):
    """`holdfast.Checkpointer` of the live objects. Its guard is in the optimizer."""

    def __init__(self, site: Site) -> None:
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


_BUILDERS: dict[str, Callable[[Site], Saver]] = {
    RAW: RawBeside,
    "torch.save": lambda site: Whole(TorchSave(site.state)),
    SYNC: lambda site: Whole(Dcp(site.state)),
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


def able(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[NotPossible, ...]]:
    """Those of `names` that can take part here, in the order of the table, and why the others cannot. SetupError for a
    name that is not known."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SetupError(f"There is no contender {', '.join(unknown)}. Choose from {', '.join(NAMES)}.")
    missing = [name for name in names if name in PACKAGES and find_spec(PACKAGES[name]) is None]
    reasons = tuple(NotPossible(name, "it is not installed; `make bench` installs it") for name in missing)
    return tuple(name for name in NAMES if name in names and name not in missing), reasons


def build(name: str, site: Site) -> Saver:
    """The contender called `name`. Collective."""
    return _BUILDERS[name](site)


def folder_of(name: str, what: str, root: Path) -> Path:
    """Where `name` saves `what` below `root`: one folder of its own for each save, or the run that has all of them."""
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
