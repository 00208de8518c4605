"""The task of an import: one data file of the new checkpoint, which a worker writes, or takes over after it checked it.

The manifest is in the run before any task begins. It says all about the file, and the file's header has its digests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Final

from holdfast.checkpoint.delivery import ArrayTargets
from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import CorruptError
from holdfast.format import container
from holdfast.format import manifest as fmt
from holdfast.format.container import Entry, FileLayout, Files
from holdfast.format.dtypes import CARRIERS
from holdfast.format.records import FileSeal
from holdfast.geometry import flat_boxes
from holdfast.interop.stored_source import StoredSource, shared_store
from holdfast.io.buffers import BufferPool, WindowPools, window_pools
from holdfast.io.create_only import CreateOnlyWriter
from holdfast.io.reader import read_files
from holdfast.io.sources import BytesSource, Source
from holdfast.io.writer import write_file
from holdfast.phases import LOG
from holdfast.plan.load import ReadRequest
from holdfast.run.complete import StoredManifest, check_data
from holdfast.store.base import Bytes, Location, Store

#: Bytes of the new file that are put together at once, by each of the writer's threads. All their parts are read
#: together: in larger windows, each foreign file is opened and planned less often, and more parts lie side by side.
WINDOW_NBYTES: Final = 64 * container.BLOCK_NBYTES


@dataclass(frozen=True)
class ImportedFile:
    """The outcome of a task. `kept` says that the file was there, sound. `tensor_nbytes` counts its tensors."""

    index: int
    seal: FileSeal
    tensor_nbytes: int
    kept: bool


@dataclass(frozen=True)
class DamagedFile:
    """The outcome of a task that found its file there, with other bytes than its digests say. The caller deletes it:
    a task of a call that was interrupted may still run, and must not take a file away from a later call."""

    index: int


@dataclass(frozen=True)
class DataFileTask:
    """Data file number `index` of the checkpoint in `folder` of the run at `run`, whose manifest has the bytes
    `manifest`. `values` are the packed values in this file. With `read_back`, the new file is read again and compared.
    """

    source: StoredSource
    run_location: Location
    folder: str
    manifest: bytes
    index: int
    nbytes: int
    values: bytes
    read_back: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """As `Task.paths`."""
        return (f"{self.run_location.url}/{self._stored.key(fmt.file_name(self.index))}",)

    @property
    def _stored(self) -> StoredManifest:
        return StoredManifest(self.folder, self.manifest, _decoded(self.manifest))

    def run(self) -> ImportedFile | DamagedFile:
        """As `Task.run`: in a worker, which opens the state and the run by itself."""
        storage = shared_store(self.run_location, self._stored.key(fmt.NAME), self.manifest)
        state = self.source.open()
        with window_pools(WINDOW_NBYTES) as pools:
            return self.write(storage, state, pools, lambda _: None)

    def write(
        self, storage: Store, state: StoredState, pools: WindowPools, advance: Callable[[int], None]
    ) -> ImportedFile | DamagedFile:
        """Write the file if it is not there. Blocks until it is durable.

        Deletes nothing, and publishes nothing where the source was replaced, or the manifest is gone.
        """
        stored = self._stored
        layout = _files(self.manifest).layout(self.index)
        key = stored.key(fmt.file_name(self.index))
        kept = storage.nbytes(key) is not None
        seal = self._sound(storage, stored, layout) if kept else None
        if kept and seal is None:
            return DamagedFile(self.index)
        if seal is None:
            state.find_places({state.numbers[stored.manifest.body.names[entry.tensor]] for entry in layout.entries})
            seal, existed = self._write(storage, state, stored, layout, pools, advance)
            if (self.read_back or existed) and self._sound(storage, stored, layout) != seal:
                raise CorruptError(
                    f"{storage.path(key)} does not have the bytes that were written.",
                    code="corrupt.file",
                    action="Check the disk and the memory of this machine, and repeat the import.",
                    path=storage.path(key),
                )
        else:
            advance(layout.values_offset)
        return ImportedFile(self.index, seal, layout.values_offset, kept)

    def _sound(self, storage: Store, stored: StoredManifest, layout: FileLayout) -> FileSeal | None:
        """The seal of the file that is there; None where its bytes do not match its digests."""
        try:
            return check_data(storage, stored, layout)
        except CorruptError as error:
            LOG.warning("%s It is written again.", error.message)
            return None

    def _write(
        self,
        storage: Store,
        state: StoredState,
        stored: StoredManifest,
        layout: FileLayout,
        pools: WindowPools,
        advance: Callable[[int], None],
    ) -> tuple[FileSeal, bool]:
        """Write the file. Returns its seal, and whether another task had published it meanwhile."""

        def check() -> None:
            state.check_unchanged(all_files=False)
            shared_store(self.run_location, stored.key(fmt.NAME), self.manifest)

        check()
        name = fmt.file_name(self.index)
        writer = CreateOnlyWriter(storage.writer(stored.key(name), nbytes=layout.nbytes), check)
        # A writer that needs its bytes in order reads the state twice: the second time counts as progress.
        counted = _after(layout.values_offset, advance) if writer.in_order else advance
        sources: list[Source] = [_StateSource(state, layout, pools.reads, counted)]
        if layout.values is not None:
            sources.append(BytesSource(self.values.ljust(layout.values.capacity, b"\0")))
        table = write_file(
            writer,
            sources,
            data_start=layout.data_start,
            header=lambda digests: container.header(stored.manifest, layout, digests),
            pool=pools.windows,
            kind=stored.manifest.digests,
        )
        return FileSeal(name, layout.nbytes, stored.manifest.digests.hex(table)), writer.existed


def _after(nbytes: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """A function that passes to `advance` what comes after the first `nbytes`."""
    lock = Lock()
    left = nbytes

    def counted(number: int) -> None:
        nonlocal left
        with lock:
            spared = min(left, number)
            left -= spared
        advance(number - spared)

    return counted


@lru_cache(maxsize=2)
def _decoded(manifest: bytes) -> fmt.DecodedManifest:
    return fmt.decode(manifest, path=fmt.NAME)


@lru_cache(maxsize=2)
def _files(manifest: bytes) -> Files:
    return Files(_decoded(manifest))


class _StateSource:
    """The tensors of a state as the bytes of a data file. Reads what it is asked for, and keeps nothing. Each call has
    threads that read, and takes a buffer of `pool` for each."""

    def __init__(
        self, state: StoredState, layout: FileLayout, pool: BufferPool, advance: Callable[[int], None]
    ) -> None:
        self._state = state
        self._pool = pool
        self._advance = advance
        #: The numbers of the file's tensors in the state: both have all of them, sorted by name.
        self._entries: Sequence[Entry] = [entry for entry in layout.entries if entry.nbytes]
        #: The end of each entry; they follow each other without gaps.
        self._ends = list(accumulate(entry.nbytes for entry in self._entries))

    @property
    def nbytes(self) -> int:
        """As `Source.nbytes`."""
        return self._ends[-1] if self._ends else 0

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`; reads must be of whole elements."""
        wants: list[ReadRequest] = []
        arrays = []
        at, behind = start, start + len(out)
        while at < behind:
            entry = self._entries[bisect_right(self._ends, at)]
            stop = min(behind, entry.offset + entry.nbytes)
            itemsize = int(self._state.files.itemsizes[entry.tensor])
            held = out[at - start : stop - start].view(CARRIERS[itemsize])
            first = (at - entry.offset) // itemsize
            shape = self._state.manifest.shape(entry.tensor)
            for offset, box in flat_boxes(shape, first, first + len(held)):
                wants.append(ReadRequest(entry.tensor, box))
                arrays.append(held[offset : offset + box.numel].reshape(box.size))
            at = stop
        jobs = (job for _, job in self._state.jobs(wants, ArrayTargets(arrays)))
        request_nbytes = self._state.capabilities.request_nbytes
        read_files(jobs, pool=self._pool, on_corrupt=self._state.corrupt_block, request_nbytes=request_nbytes)
        self._advance(len(out))
