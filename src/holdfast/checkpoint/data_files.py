"""The data files of a state: what lies where in them, where each can be had, and the reads of any part of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np

from holdfast.checkpoint.catalogue import Catalogue, FileCopy
from holdfast.checkpoint.delivery import Delivery, Targets
from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES, FilePlaces, Files, StoredCells
from holdfast.format.manifest import DecodedTable
from holdfast.format.names import shown
from holdfast.geometry import whole
from holdfast.io.buffers import pipeline_pool
from holdfast.io.jobs import DataFile, ReadJob
from holdfast.io.reader import ReadStats, read_files
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.store.base import Capabilities, FileReader, Store

#: Opens an object of a store by its key.
OpenReader = Callable[[Store, str], FileReader]


def open_reader(store: Store, key: str) -> FileReader:
    """Open an object as the store does."""
    return store.reader(key)


class DataFiles:
    """The data files that hold a state, with the table of what is in them. Reads change nothing. Safe for several
    threads.

    The bytes of a live state have no digests, so nothing is verified here; `Checkpoint` adds the seal. `folder` names
    the files' folder, or the state, in messages. `places` are the offsets in the files, by default those of our format.
    """

    manifest: DecodedTable
    #: Whether the files have digests, which reads can verify.
    has_digests = False

    def __init__(
        self, manifest: DecodedTable, catalogue: Catalogue, *, folder: str, places: FilePlaces | None = None
    ) -> None:
        self.manifest = manifest
        self.catalogue = catalogue
        self.folder = folder
        self.files: FilePlaces = places or Files(manifest)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor, by name."""
        return {name: number for number, name in enumerate(self.manifest.body.names)}

    @property
    def holders(self) -> tuple[int, ...] | None:
        """For each file, the only rank that can read it: see `Catalogue.holders`."""
        return self.catalogue.holders(self.manifest.file_names)

    @property
    def is_prompt(self) -> bool:
        """Whether reads of the files wait for nothing: see `Catalogue.is_prompt`."""
        return self.catalogue.is_prompt(self.manifest.file_names)

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store that they are read from: see `Catalogue.capabilities`."""
        return self.catalogue.capabilities(self.manifest.file_names)

    def nearest(self, file: int) -> FileCopy:
        """The copy of file number `file` that is read."""
        return self.catalogue.nearest(self.manifest.file_name(file))

    def key(self, file: int) -> str:
        """The key of the nearest copy of file number `file`, without its folder."""
        return self.nearest(file).key.rpartition("/")[2]

    def path(self, name: str) -> str:
        """Full path of the nearest copy of file `name`."""
        return self.catalogue.nearest(name).path

    def find_places(self, tensors: Iterable[int]) -> None:
        """Find the places of these tensors in the files now, file by file, if they are not known yet.

        Where the files themselves say what lies where, as those of some other systems do, this reads each page of them
        once for that. Reads in another order would find places one by one.
        """
        wants = [ReadRequest(number, whole(self.manifest.shape(number))) for number in tensors]
        for _ in plan_load(self.files, wants):
            pass

    def jobs(
        self,
        wants: Sequence[ReadRequest],
        targets: Targets,
        *,
        verify: bool = True,
        first_file: int = 0,
        open_reader: OpenReader = open_reader,
    ) -> Iterator[tuple[int, ReadJob]]:
        """The jobs that read all elements of `wants` into `targets`, one per file, each with the index of its file."""
        for reads in plan_load(self.files, wants, first_file=first_file):
            deliver = Delivery(self.files, reads, wants, targets).take
            extents = np.stack([reads.starts, reads.stops], axis=1)
            open_ = self._opening(reads.file, reads.data_start, reads.data_nbytes, verify, open_reader)
            exact = not self.has_digests and self.holders is not None
            yield reads.file, ReadJob(reads.data_nbytes, open_, extents, deliver, verify and self.has_digests, exact)

    def read(
        self, wants: Sequence[ReadRequest], targets: Targets, *, verify: bool = True, first_file: int = 0
    ) -> ReadStats:
        """Deliver every element of `wants` to `targets`, each once. Blocks until all are delivered.

        Memory is bounded: three buffers of 2 MiB. With `verify`, every block that is read and has a digest is checked
        against it before its elements are delivered.

        Raises:
            CorruptError: bytes are missing or altered; names the file and the tensors.
            StorageError: the store failed.
        """
        files = set[int]()

        def jobs() -> Iterator[ReadJob]:
            for file, job in self.jobs(wants, targets, verify=verify, first_file=first_file):
                files.add(file)
                yield job

        with pipeline_pool() as pool:
            stats = read_files(
                jobs(), pool=pool, on_corrupt=self.corrupt_block, request_nbytes=self.capabilities.request_nbytes
            )
        self.check_read(files)
        return stats

    def check_read(self, files: Collection[int]) -> None:
        """Look whether these files, which were read, are still those that were opened. Files with digests never change.

        Raises `CorruptError`, code ``corrupt.foreign``, where one is not: what was read of it may be of two contents.
        """

    def idle_job(self, file: int, *, verify: bool, open_reader: OpenReader = open_reader) -> ReadJob:
        """A job without extents, for a rank that reads a file only for others."""
        nothing = np.zeros(0, np.int64)
        cells = [StoredCells(nothing, nothing, nothing)]
        (placed,) = self.files.place(np.asarray([file], np.int64), cells)
        open_ = self._opening(file, placed.data_start, placed.data_nbytes, verify, open_reader)
        return ReadJob(placed.data_nbytes, open_, [], _wants_nothing, verify and self.has_digests)

    def open_file(
        self,
        index: int,
        *,
        data_start: int,
        data_nbytes: int,
        verify: bool = True,
        open_reader: OpenReader = open_reader,
    ) -> DataFile:
        """Open a data file. `verify` has no effect on files without a seal."""
        copy = self.nearest(index)
        return DataFile(open_reader(copy.store, copy.key), copy.path, data_start, data_nbytes, None)

    def corrupt_block(self, file: DataFile, block: int) -> CorruptError:
        """The error for a block that does not match its digest; names the tensors that lie in it."""
        name = file.path.rsplit("/", 1)[-1]
        index = self.manifest.file_names.index(name)
        low, high = block * BLOCK_NBYTES, (block + 1) * BLOCK_NBYTES
        hit = list(self._names_between(index, low, high))
        held = ", ".join(map(shown, hit[:5])) + (f" and {len(hit) - 5} more" if len(hit) > 5 else "")
        what = f"block {block} of its data does not match its digest; it holds {held}"
        return self._corrupt(name, what, *hit[:1])

    def _opening(
        self, file: int, data_start: int, data_nbytes: int, verify: bool, open_reader: OpenReader
    ) -> Callable[[], DataFile]:
        return partial(
            self.open_file,
            file,
            data_start=data_start,
            data_nbytes=data_nbytes,
            verify=verify,
            open_reader=open_reader,
        )

    def _names_between(self, index: int, low: int, high: int) -> Iterator[str]:
        layout = self.files.layout(index)
        for entry in layout.entries:
            if entry.offset < high and entry.offset + entry.nbytes > low:
                yield self.manifest.body.names[entry.tensor]
        if layout.values is not None and layout.values_offset < high:
            yield "the values"

    def _corrupt(self, name: str, what: str, tensor: str | None = None) -> CorruptError:
        return CorruptError(
            f"{self.path(name)} is damaged: {what}.",
            code="corrupt.file",
            action="Load another checkpoint of the run, or restore this file from another copy.",
            path=self.path(name),
            tensor=tensor,
            tier=self.catalogue.nearest(name).tier.value,
        )


def _wants_nothing(*_: object) -> None:
    raise AssertionError("a read that wants no bytes delivered some")
