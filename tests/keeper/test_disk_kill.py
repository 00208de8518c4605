"""SIGKILL of the keeper at every point on the way from a staged slot over the disk of the node to the commit, with or
without the loss of memory. The next keeper commits what the disk has whole, bit for bit, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from holdfast.keeper.__main__ import serve
from holdfast.keeper.daemon import Keeper
from holdfast.node_disk.disk_folder import use_disk
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotRecord
from holdfast.run.history import Run
from holdfast.store.posix import PosixStore, PosixWriter
from tests.faults.crash_points import kind_of
from tests.keeper import test_keeper
from tests.keeper.test_disk_tier import file_bytes
from tests.keeper.test_keeper_promises import looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.support import nursery
from tests.support.nursery import until

run, folder = test_keeper.run, test_keeper.folder

#: The points, in their order: where a keeper writes, what, and how far it has come.
POINTS: Final = [
    *("disk manifest begins", "disk manifest is there", "disk generation begins", "disk generation is there"),
    *("disk data opened", "disk data written", "disk data is there", "ON_DISK begins", "ON_DISK is there"),
    *("run manifest begins", "run manifest is there", "run data opened", "run data written", "run data is there"),
    *("run seal begins", "run seal is there", "run commit begins", "run commit is there"),
    *("disk seal begins", "disk seal is there", "COMMITTED begins", "COMMITTED is there"),
]
SAMPLE: Final = ("disk data written", "ON_DISK begins", "run data written", "run commit begins")


def keep(run: str, node_dir: str, deadly: str) -> None:
    """The keeper's process, which kills itself when it gets to `deadly`."""

    def reach(point: str) -> None:
        if point == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def where(path: str) -> str:
        return "run" if path.startswith(run) else "disk"

    create, begin, write_at, publish, advance = (
        PosixStore.create,
        PosixStore.writer,
        PosixWriter.write_at,
        PosixWriter.publish,
        Slot.advance,
    )

    def traced_create(self: PosixStore, key: str, data: bytes) -> bool:
        kind = "generation" if key.startswith("generations/") else kind_of(key)
        reach(f"{where(self.location.url)} {kind} begins")
        created = create(self, key, data)
        reach(f"{where(self.location.url)} {kind} is there")
        return created

    def traced_writer(self: PosixStore, key: str, *, nbytes: int) -> PosixWriter:
        writer = begin(self, key, nbytes=nbytes)
        reach(f"{where(self.location.url)} data opened")
        return writer

    def traced_write_at(self: PosixWriter, offset: int, data: Any) -> None:
        write_at(self, offset, data)
        reach(f"{where(self._path)} data written")

    def traced_publish(self: PosixWriter, nbytes: int) -> None:
        publish(self, nbytes)
        reach(f"{where(self._path)} data is there")

    def traced_advance(self: Slot, record: SlotRecord) -> None:
        reach(f"{record.state.name} begins")
        advance(self, record)
        reach(f"{record.state.name} is there")

    with (
        patch.object(PosixStore, "create", traced_create),
        patch.object(PosixStore, "writer", traced_writer),
        patch.object(PosixWriter, "write_at", traced_write_at),
        patch.object(PosixWriter, "publish", traced_publish),
        patch.object(Slot, "advance", traced_advance),
        patch.object(os, "nice"),
    ):
        serve(run, node_dir=node_dir, idle_s=600.0, grace_s=5.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def killed_at(point: str, run: Run, folder: NodeFolder, stack: ExitStack, tmp_path: Path) -> Saved:
    """A checkpoint whose keeper was killed at `point`."""
    disk = tmp_path / "disk"
    use_disk(folder, disk, run.storage.location)
    saved = Saved(run, [folder, folder], stack, disk=str(disk))
    keeper = nursery.start(keep, run.storage.location.url, str(tmp_path / "node"), point, err=tmp_path / "err")
    assert keeper.wait() == -signal.SIGKILL, keeper.err
    return saved


def drained(run: Run, folder: NodeFolder, disk: Path, is_over: Callable[[Keeper], bool]) -> None:
    use_disk(folder, disk, run.storage.location)
    keeper = Keeper(folder)
    try:
        until(lambda: looked(keeper) and is_over(keeper))
    finally:
        keeper.close()


@pytest.mark.parametrize(
    "point", [point if point in SAMPLE else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
@pytest.mark.parametrize("loses_memory", [False, True], ids=["the keeper", "the node"])
def test_what_the_disk_has_whole_is_committed_whatever_died(
    run: Run, folder: NodeFolder, stack: ExitStack, tmp_path: Path, point: str, *, loses_memory: bool
) -> None:
    disk = tmp_path / "disk"
    saved = killed_at(point, run, folder, stack, tmp_path)
    is_whole = len(file_bytes(disk)) == 2
    assert is_whole or POINTS.index(point) <= POINTS.index("run commit begins")
    if not loses_memory:
        drained(run, folder, disk, lambda keeper: not keeper.owes)
    else:
        shutil.rmtree(folder.path)
        with NodeFolder(str(tmp_path / "run"), node_dir=tmp_path / "node") as again:
            is_known = list(disk.glob("*/generations/*")) != []
            drained(
                run,
                again,
                disk,
                lambda keeper: not keeper.owes if is_whole or not is_known else bool(keeper._waiting),
            )
    if is_whole or not loses_memory:
        assert_loads(run, saved)
        assert file_bytes(disk) == file_bytes(Path(run.storage.location.url))
    else:
        assert run.head() is None
