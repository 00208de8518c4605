"""A way to save and load a state, which every contender is to the runner; and those of torch and of holdfast."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.raw import RAW_WAYS, RawImage
from bench.schema import RAW, BenchError, Contender
from bench.state import Live, Recipe, State
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Location
from holdfast.store.urls import open_store

#: Snapshots that holdfast keeps in the memory of the node, per rank.
GENERATIONS = 2
SYNCED = "fsync of each file"


class Pending(NamedTuple):
    """A save that may still be under way on this rank when its call returns; by default, one that is over.

    `wait` returns when it is durable, as far as the contender makes it so, and raises why it failed. The state may
    change when it `is_copied`; `persist_s` are the seconds from there until it was durable, where the contender tells.
    """

    wait: Callable[[], object] = lambda: None
    is_over: Callable[[], bool] = lambda: True
    is_copied: Callable[[], bool] = lambda: True
    wait_copied: Callable[[], object] = lambda: None
    persist_s: Callable[[], float | None] = lambda: None

    @staticmethod
    def of(ended: Future[Any], copied: Future[Any] | None = None) -> Pending:
        """A save with a future for its end, and one for a copy in the background."""
        return Pending(ended.result, ended.done, *(() if copied is None else (copied.done, copied.result)))


@dataclass
class Site:
    """What a rank saves, and where: a folder on the device, and one in memory."""

    recipe: Recipe
    folder: Path
    node_dir: Path

    @cached_property
    def state(self) -> State:
        return self.recipe.build(dist.get_world_size())

    @cached_property
    def live(self) -> Live:
        return Live(self.state)

    @cached_property
    def image(self) -> RawImage:
        """The bytes that the raw limit writes for this rank."""
        return RawImage(self.state.share(dist.get_rank(), dist.get_world_size()))


class Way:
    """What a contender does with a state. All methods are collective; each way has `load`, and `save` or `begin`, whose
    first call sets up what it needs. The first line of its docstring describes it in result files.
    """

    name = ""
    durable, verified, io = "no", "no", "buffered"
    #: The optional package that it needs.
    package = ""
    #: All its saves go into one run; of another way, each goes into a folder of its own.
    one_run = False

    def __init__(self, site: Site, entrant: str) -> None:
        self.site = site
        self.state = site.state
        self.entrant = entrant

    @classmethod
    def about(cls) -> Contender:
        description = (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")
        return Contender(cls.name, description, cls.durable, cls.verified, cls.io)

    def place(self, what: object) -> Path:
        """The folder that it saves `what` into, and loads it from."""
        return self.site.folder / self.entrant.replace(" ", "-") / ("run" if self.one_run else str(what))

    def discard(self, folder: Path) -> None:
        """Delete what is in `folder`, of a run all but its head. For one rank to call."""
        if self.one_run:
            run = opened(folder)
            for commit in list(run.lineage())[1:]:
                remove_checkpoint(run, commit)
        else:
            shutil.rmtree(folder)

    @property
    def memory(self) -> State | RawImage:
        return self.state

    def save(self, folder: Path) -> None:
        """Save into `folder`. Returns when this rank's part is durable."""
        self.begin(folder).wait()

    def begin(self, folder: Path) -> Pending:
        """Save into `folder`, or begin to; what training waits for is the time of this call."""
        self.save(folder)
        return Pending()

    def load(self, folder: Path) -> None:
        """Load the last save, which went into `folder`, into the same memory."""
        raise NotImplementedError

    def unlocked(self) -> AbstractContextManager[None]:
        """A ``with`` block in which the state may change, entered when it has been copied."""
        return nullcontext()

    def ready(self) -> None:
        """Have what a save needs before the clock starts, as if there had been no `rest`."""

    def rest(self) -> None:
        """Give up memory that others need, until `ready`."""

    def close(self) -> None:
        """Let go of everything, when all that was begun is over."""


class Raw(Way):
    """pwritev/preadv loops, one file per rank.

    In the way that its name says, or in the first one. Beside a loop it shows what writing alone takes from the cores:
    the host of a virtual device may do that on the same ones.
    """

    name, durable, io = RAW, "fdatasync", "direct where the filesystem takes it"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self._way = RAW_WAYS[entrant.removeprefix(RAW).strip() or next(iter(RAW_WAYS))]
        self._pool = ThreadPoolExecutor(1)

    @property
    def memory(self) -> RawImage:
        return self.site.image

    def save(self, folder: Path) -> None:
        self.memory.write(rank_file(folder), self._way)

    def begin(self, folder: Path) -> Pending:
        return Pending.of(self._pool.submit(self.save, folder))

    def load(self, folder: Path) -> None:
        self.memory.read(rank_file(folder), self._way)

    def ready(self) -> None:
        _ = self.memory

    def rest(self) -> None:
        with suppress(AttributeError):
            del self.site.image

    def close(self) -> None:
        self._pool.shutdown()


class TorchSave(Way):
    """torch.save/torch.load, one file per rank, or one for all ranks where all hold the same."""

    name, durable = "torch.save", SYNCED

    def save(self, folder: Path) -> None:
        if self.state.is_sharded() or dist.get_rank() == 0:
            with self._file(folder).open("wb") as file:
                torch.save(self.state.tensors() | self.state.values, file)
                file.flush()
                os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        loaded = torch.load(self._file(folder), map_location="cpu", weights_only=True)
        self.state.values.update({name: loaded[name] for name in self.state.values})
        for path, tensor in self.state.tensors().items():
            tensor.copy_(loaded[path])

    def _file(self, folder: Path) -> Path:
        return rank_file(folder) if self.state.is_sharded() else folder / "all-ranks"


class Dcp(Way):
    """torch.distributed.checkpoint.save/load, defaults."""

    name, durable = "dcp", SYNCED

    def save(self, folder: Path) -> None:
        dcp_save(self.state.tree, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp_load(self.state.tree, checkpoint_id=folder)


class Holdfast(Way):
    """holdfast.save/load, defaults, each save into a new run."""

    name, verified = "holdfast", "digest of every block read"
    durable, io = "fsync of files and folders, sealed and committed", "direct where the filesystem takes it"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self.steps = itertools.count()

    @property
    def _saved(self) -> dict[str, Any]:
        return self.state.tree

    def save(self, folder: Path) -> None:
        holdfast.save(folder, self._saved, next(self.steps))

    def load(self, folder: Path) -> None:
        holdfast.load(folder, into=self._saved)


class HoldfastLater(Holdfast):
    """holdfast.save/load, defaults, all saves into one run: after the warm-up each of them is a later save."""

    name, one_run = "holdfast-later", True


class HoldfastLive(HoldfastLater):
    """holdfast.save of the live objects, defaults, all saves into one run."""

    name, verified = "holdfast-sync", "no"  # only saves are timed

    @property
    def _saved(self) -> dict[str, Any]:
        return self.site.live.objects


class HoldfastBackground(HoldfastLive):
    """holdfast.Checkpointer of the live objects, defaults, all saves into one run. Its guard is in the optimizer."""

    name = "holdfast"
    save = Way.save

    @cached_property
    def checkpointer(self) -> holdfast.Checkpointer:
        memory = holdfast.Memory(generations=GENERATIONS, node_dir=self.site.node_dir)
        return holdfast.Checkpointer(self.place(""), self._saved, memory=memory)

    def begin(self, folder: Path) -> Pending:
        handle = self.checkpointer.save(next(self.steps))
        staged, durable = handle.staged, handle.durable

        def wait() -> None:
            durable.wait()
            if handle.place is None:
                raise BenchError("holdfast did not save into memory: there is too little of it.")

        def persist_s() -> float:
            assert staged.seconds is not None
            assert durable.seconds is not None
            return durable.seconds - staged.seconds

        return Pending(wait, lambda: durable.is_over, lambda: staged.is_over, staged.wait, persist_s)

    def close(self) -> None:
        """End the background threads; keeper and memory stay."""
        self.checkpointer.close()


def rank_file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"


def opened(folder: Path) -> Run:
    return Run.open(open_store(Location(str(folder))))
