"""Named points of a save, and processes that kill themselves there with SIGKILL.

The points lie where a save calls storage (it creates objects, writes, and makes the `os` calls that give a name and
make it durable) and where it exchanges messages with other ranks. Each point has a name such as
``seal.linked``. `COORDINATOR` and `OTHER` list the points of the two roles in the order in which a save passes them;
`Trace` records the points that a process really passes, or kills the process at one of them.

===============  ========================================================================================
``X.asked``      record X is about to be written
``X.opened``     the data file has its space and nothing of its content
``data.write-N`` write number N (from 0 on) of its data section was made
``data.header``  its header is written too
``X.written``    all of X is durable under a temporary name
``X.linked``     X has its name
``X.durable``    so has the folder: X is published
``after P``      the exchange of phase P is over (``write``: this rank wrote its share and has not said so yet)
===============  ========================================================================================
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final
from unittest.mock import patch

from holdfast.control.channel import Channel
from holdfast.io.buffers import BufferPool
from holdfast.saving import shares
from holdfast.store import posix
from holdfast.store.posix import PosixStore, PosixWriter

BUFFER_NBYTES: Final = 2**20
#: Each rank's data section is made so large that it takes so many buffers.
NUM_WRITES: Final = 4


def _record(kind: str) -> list[str]:
    return [f"{kind}.{moment}" for moment in ("asked", "written", "linked", "durable")]


_DATA = [
    "data.opened",
    *(f"data.write-{number}" for number in range(NUM_WRITES)),
    "data.header",
    *(f"data.{moment}" for moment in ("written", "linked", "durable")),
]
_PUBLISHED = [*_record("manifest"), "after plan", *_DATA, "after write", *_record("seal"), *_record("commit")]
#: The points that rank 0 passes in a save that opens an epoch and makes a plan, and those in the first save of a run.
COORDINATOR: Final = ["after describe", *_record("epoch"), *_PUBLISHED, "after commit"]
FIRST_COORDINATOR: Final = ["after describe", *_record("marker"), *COORDINATOR[1:]]
#: The points that any other rank passes.
OTHER: Final = ["after describe", "after plan", *_DATA, "after write", "after commit"]

_KINDS = {"holdfast.json": "marker", "epochs": "epoch", "history": "commit"}


def kind_of(key: str) -> str:
    """The kind of the record with that key; files in a checkpoint's folder have kinds of their own."""
    folder, _, rest = key.partition("/")
    return rest.rpartition("/")[2].partition(".")[0] if folder == "checkpoints" else _KINDS[folder]


class Trace:
    """The points that this process has passed, in order; it dies at `deadly`."""

    def __init__(self, deadly: str | None = None) -> None:
        self.passed: list[str] = []
        self._deadly = deadly
        self._lock = Lock()
        self._object: str | None = None
        self._linked = False
        self._num_writes = 0

    def reach(self, point: str) -> None:
        """Pass a point, or die there."""
        with self._lock:
            self.passed.append(point)
            if point == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def building(self, kind: str) -> Iterator[None]:
        """In this block, every fsync and link belongs to an object of that kind."""
        self._object = kind
        try:
            yield
        finally:
            self._object = None

    def wrote(self, offset: int) -> None:
        """A write of a data file was made; the one at its beginning is the header, which comes last."""
        with self._lock:
            number = self._num_writes
            self._num_writes += offset > 0
        self.reach(f"data.write-{number}" if offset else "data.header")

    def synced(self, descriptor: int) -> None:
        """A file or folder was made durable. Folders are of interest once the object has its name in them."""
        if self._object is None:
            return
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.reach(f"{self._object}.written")
        elif self._linked:
            self._linked = False
            self.reach(f"{self._object}.durable")

    def linked(self) -> None:
        """The object has its name."""
        assert self._object is not None
        self._linked = True
        self.reach(f"{self._object}.linked")


class _TracedOs:
    """The `os` module, whose calls that publish are told to a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self._trace.synced(descriptor)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)
        self._trace.linked()


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Within the block this process passes the points of `trace`; data files are written in small buffers."""
    create, publish, write_at, exchange = (
        PosixStore.create,
        PosixWriter.publish,
        PosixWriter.write_at,
        Channel.exchange,
    )
    begin = PosixStore.writer

    def traced_create(self: PosixStore, key: str, data: bytes) -> bool:
        kind = kind_of(key)
        trace.reach(f"{kind}.asked")
        with trace.building(kind):
            return create(self, key, data)

    def traced_writer(self: PosixStore, key: str, *, nbytes: int) -> PosixWriter:
        writer = begin(self, key, nbytes=nbytes)
        trace.reach("data.opened")
        return writer

    def traced_write_at(self: PosixWriter, offset: int, *data: Any) -> None:
        write_at(self, offset, *data)
        trace.wrote(offset)

    def traced_publish(self: PosixWriter, nbytes: int) -> None:
        with trace.building("data"):
            publish(self, nbytes)

    def traced_exchange(self: Channel, phase: str, *rest: Any, **kinds: Any) -> Any:
        if phase == "commit":
            trace.reach("after write")
        verdict = exchange(self, phase, *rest, **kinds)
        trace.reach(f"after {phase}")
        return verdict

    with (
        patch.object(PosixStore, "create", traced_create),
        patch.object(PosixStore, "writer", traced_writer),
        patch.object(PosixWriter, "write_at", traced_write_at),
        patch.object(PosixWriter, "publish", traced_publish),
        patch.object(Channel, "exchange", traced_exchange),
        patch.object(posix, "os", _TracedOs(trace)),
        patch.object(shares, "writing_pool", lambda _: BufferPool(2 * BUFFER_NBYTES, buffer_nbytes=BUFFER_NBYTES)),
    ):
        yield
