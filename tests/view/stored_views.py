"""Views of checkpoints of simulated ranks, on a store that records the bytes read from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format.container import Files
from holdfast.format.records import Place
from holdfast.format.values import Node, Open
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from holdfast.store.base import Bytes, Store
from holdfast.testing.memory_store import MemoryReader, MemoryStore
from holdfast.view import View
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish
from tests.support.worlds import World

IDENTITY = CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {})


def published(world: World, nodes: Mapping[str, Node] | None = None) -> MemoryStore:
    """A run whose one checkpoint is what `world` holds."""
    table = {"": Open("dict"), **(nodes or {})}
    storage = begin(RUN_ID, EPOCHS[0])
    publish(storage, plan(world.layouts, table, IDENTITY), world.full, table)
    return storage


def view_of(storage: Store, *, verify: bool = True) -> View:
    """The head of the run on `storage`."""
    return View(Checkpoint(resolve(parse("run"), storage).sealed), verify=verify)


class DataRead(NamedTuple):
    """Bytes that were read of a data file."""

    key: str
    start: int
    stop: int


class Remembering(MemoryStore):
    """Remembers what is read of open files, and which are open. Safe for threads as far as tests need it."""

    def __init__(self, other: MemoryStore) -> None:
        super().__init__()
        self.objects = other.objects
        self.reads: list[DataRead] = []
        self.num_open = 0

    def reader(self, key: str) -> MemoryReader:
        self.num_open += 1
        return _RememberingReader(self, key)

    def data_reads(self, view: View) -> list[DataRead]:
        """The reads of data sections since the last call, relative to the start of each section."""
        files = Files(view._checkpoint.manifest)
        columns = files.columns(np.arange(files.manifest.body.num_files))
        starts = dict(enumerate(columns.data_starts.tolist()))
        found = []
        for key, start, stop in self.reads:
            begin = starts[int(key.rpartition("-")[2].partition(".")[0])]
            if start >= begin:
                found.append(DataRead(key, start - begin, stop - begin))
        self.reads = []
        return found


class _RememberingReader(MemoryReader):
    def __init__(self, storage: Remembering, key: str) -> None:
        super().__init__(storage.objects[key], path=storage.path(key))
        self._storage, self._key = storage, key

    def read_at(self, offset: int, out: Bytes) -> None:
        self._storage.reads.append(DataRead(self._key, offset, offset + len(out)))
        super().read_at(offset, out)

    def close(self) -> None:
        self._storage.num_open -= 1
        super().close()
