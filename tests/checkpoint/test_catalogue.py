"""The catalogue of copies of a checkpoint's files: a reader reads the nearest copy, and knows no tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.catalogue import EVERY_RANK, Catalogue, FileCopy, Tier
from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError
from holdfast.format.manifest import file_name
from holdfast.format.records import Place
from holdfast.geometry import Int64s
from holdfast.plan.exchange import divide_job_reads
from holdfast.run.history import Run
from holdfast.store.memory import FilesInMemory, MemoryFile
from holdfast.store.posix import PosixStore
from holdfast.view import View
from tests.support import checkpoints

STEP = 7


@pytest.fixture
def sealed(tmp_path: Path) -> Sealed:
    """A committed checkpoint of two data files."""
    run = Run.create(PosixStore(str(tmp_path)))
    epoch = checkpoints.begin(run)
    return run.locate(checkpoints.save(run, Place(epoch, 1), STEP))


def moved_to_memory(sealed: Sealed, *names: str) -> Sealed:
    """The checkpoint with files in node memory, and no longer in storage."""
    memory, nearer = FilesInMemory("/memory"), {}
    for name in names:
        data = np.frombuffer(sealed.storage.read(sealed.key(name)), np.uint8)
        memory.add(name, MemoryFile(data, path=memory.path(name)))
        nearer[name] = (FileCopy(memory, name, Tier.NODE_MEMORY),)
        assert sealed.storage.delete(sealed.key(name))
    return replace(sealed, nearer=nearer)


@pytest.mark.parametrize("names", [(), (file_name(0),), (file_name(1),), (file_name(0), file_name(1))])
def test_one_checkpoint_is_read_from_several_tiers(sealed: Sealed, names: tuple[str, ...]) -> None:
    checkpoint = Checkpoint(moved_to_memory(sealed, *names))
    view = View(checkpoint, verify=True)
    assert view["w"].numpy().tolist() == np.full(checkpoints.SHAPE, STEP).tolist()
    assert view.value("step") == STEP
    assert checkpoint.is_prompt == (len(names) == checkpoints.NUM_FILES)


def test_a_damaged_copy_is_named_where_it_lies(sealed: Sealed) -> None:
    moved = moved_to_memory(sealed, file_name(1))
    memory = moved.nearer[file_name(1)][0].store
    damaged = np.frombuffer(memory.read(file_name(1)), np.uint8).copy()
    damaged[-1] ^= 1
    assert isinstance(memory, FilesInMemory)
    memory.add(file_name(1), MemoryFile(damaged, path=memory.path(file_name(1))))
    with pytest.raises(CorruptError, match=f"^.corrupt.file. /memory/{file_name(1)} is damaged") as raised:
        View(Checkpoint(moved), verify=True)["w"].numpy()
    assert raised.value.step == STEP


def test_the_nearest_copy_comes_first_and_storage_last() -> None:
    storage, memory = FilesInMemory("storage"), FilesInMemory("memory")
    own, peers = FileCopy(memory, "a", Tier.NODE_MEMORY), FileCopy(memory, "b", Tier.NODE_MEMORY, 3)
    catalogue = Catalogue({"file": (own, peers)}, storage, "folder/")
    assert catalogue.copies("file") == (own, peers, FileCopy(storage, "folder/file", Tier.STORAGE))
    assert catalogue.nearest("file") == own
    assert catalogue.nearest("other").path == "storage/folder/other"
    assert Catalogue({"file": (own,)}).copies("other") == ()


NAMES = [file_name(index) for index in range(3)]


def test_holders_are_named_only_where_a_rank_reads_alone() -> None:
    storage, memory = FilesInMemory("storage"), FilesInMemory("memory")
    shared = {file_name(0): (FileCopy(memory, "a", Tier.NODE_MEMORY),)}
    alone = {file_name(1): (FileCopy(memory, "b", Tier.NODE_MEMORY, 3),)}
    assert Catalogue({}, storage).holders(NAMES[:2]) is None
    assert Catalogue(shared, storage).holders(NAMES[:2]) is None
    assert Catalogue(shared | alone, storage).holders(NAMES) == (EVERY_RANK, 3, EVERY_RANK)


def test_files_that_one_rank_holds_and_files_that_all_can_read_are_read_in_one_plan() -> None:
    nodes: list[list[int]] = [[0, 1], [2, 3]]
    needs: Int64s = np.asarray([[file, 0, 100] for file in range(4)], np.int64)
    plans = [
        divide_job_reads(nodes, [[needs] * 2] * 2, node, chunk_nbytes=100, holders=[3, EVERY_RANK, 0, EVERY_RANK])
        for node in range(2)
    ]
    readers = {}
    for plan in plans:
        for file, leader, sender in zip(plan.files.tolist(), plan.leaders.tolist(), plan.senders.tolist(), strict=True):
            if sender < 0:
                assert file not in readers, "each byte is read once"
                readers[file] = plan.ranks[leader]
    assert readers.keys() == {0, 1, 2, 3}
    assert (readers[0], readers[2]) == (3, 0)
