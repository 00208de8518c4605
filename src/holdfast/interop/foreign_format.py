"""The seam of foreign formats: a folder, how a format recognises and opens it, and the state that comes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import xxhash

from holdfast.checkpoint.catalogue import Catalogue, FileCopy, Tier
from holdfast.checkpoint.data_files import OpenReader, open_reader
from holdfast.checkpoint.stored_state import NO_STEP, StateRecord, StoredState
from holdfast.errors import CorruptError, IncompatibleError
from holdfast.format.manifest import file_name
from holdfast.format.values import Node, Open
from holdfast.interop.given_places import GivenPlaces
from holdfast.io.jobs import DataFile
from holdfast.store.base import Location, Store
from holdfast.store.timed import TimedStore, untimed

#: The bytes by which ranks compare what they see: so many samples, evenly spread over all files.
_NUM_SAMPLES: Final = 32
_SAMPLE_NBYTES: Final = 64

#: Numbers that differ when a file is written again; None for one that is missing.
Mark: TypeAlias = tuple[int, ...] | None


@dataclass(frozen=True)
class ForeignFolder:
    """A folder that may hold a foreign checkpoint: its store, and the `names` in it.

    `location` is what a user named: the folder, or one file in it, which is then the only name.
    """

    storage: Store
    names: tuple[str, ...]
    location: Location
    #: The marks of the files from before anything was read of them, by their names.
    marks: dict[str, Mark] = field(default_factory=dict, compare=False)

    def path(self, name: str) -> str:
        """The full path of a file, for messages."""
        return self.storage.path(name)

    def names_in(self, below: str) -> tuple[str, ...]:
        """The names in the folder `below`, whose files are marked."""
        names = tuple(self.storage.list(below))
        self.mark(f"{below}/{name}" for name in names)
        return names

    def mark(self, names: Iterable[str]) -> None:
        """Mark these files, before anything is read of them: other systems write again into files that are there.
        Objects of object stores are replaced as a whole, and each mark is a request."""
        if self.storage.location.folder is None:
            return
        for name in names:
            self.marks.setdefault(name, _mark(self.storage, name))


class ForeignFormat(Protocol):
    """A format of another system."""

    @property
    def kind(self) -> str:
        """The kind of a folder in this format, as text that follows "it is"."""

    def recognises(self, names: Collection[str]) -> bool:
        """Whether a folder that holds `names` is in this format."""

    def open(self, folder: ForeignFolder) -> ForeignState:
        """Open a folder in this format. Reads its metadata.

        Raises `CorruptError`, code ``corrupt.foreign``, where something is missing or malformed, and
        `IncompatibleError`, code ``incompatible.foreign``, for what holdfast cannot read.
        """


class ForeignState(StoredState):
    """The state in a foreign folder. Its bytes have no digests, so reads cannot verify them.

    `files` are the names of its data files, and `described_by` those of other files that say what is where in them.
    `identity` is a digest of its metadata. `step` is the one that the folder names. Raises `CorruptError` where a file
    is another one than before its metadata was read.
    """

    def __init__(
        self,
        folder: ForeignFolder,
        places: GivenPlaces,
        files: Sequence[str],
        *,
        kind: str,
        identity: str,
        nodes: Mapping[str, Node] | None = None,
        step: int = NO_STEP,
        described_by: Sequence[str] = (),
    ) -> None:
        copies = {file_name(index): (FileCopy(folder.storage, name, Tier.STORAGE),) for index, name in enumerate(files)}
        super().__init__(places.manifest, Catalogue(copies), folder=folder.location.url, places=places)
        self._storage = folder.storage
        self._names = tuple(files)
        self._record = StateRecord(location=folder.location, identity=identity, kind=kind, step=step)
        self._nodes = {"": Open("dict")} if nodes is None else nodes
        self._marks = [_mark(folder.storage, name) for name in files]
        self._descriptions = {name: folder.marks[name] for name in described_by if name in folder.marks}
        self._read = set[int]()
        for name, mark in zip(files, self._marks, strict=True):
            if folder.marks.get(name, mark) != mark:
                raise replaced(folder.path(name))

    @property
    def record(self) -> StateRecord:
        """As `StoredState.record`."""
        return self._record

    @property
    def fingerprint(self) -> str:
        """As `StoredState.fingerprint`: the metadata, and the marks of the files, which have no digests."""
        return xxhash.xxh3_128_hexdigest(f"{self._record.identity} {self._marks}".encode())

    @property
    def shared_fingerprint(self) -> str:
        """As `StoredState.shared_fingerprint`: some network file systems number their files on each machine anew."""
        marks = [mark and mark[:2] for mark in self._marks]
        return xxhash.xxh3_128_hexdigest(f"{self._record.identity} {marks}".encode())

    @property
    def seen_content(self) -> str:
        """As `StoredState.seen_content`: with some bytes of the files, since nodes may have copies of their own of a
        folder, of several saves. All nodes see one object store."""
        if self._storage.location.folder is None:
            return self._record.identity
        digest = xxhash.xxh3_128(self._record.identity.encode())
        sizes = [mark[0] if mark else 0 for mark in self._marks]
        ends = list(accumulate(sizes))
        for number in range(_NUM_SAMPLES if any(sizes) else 0):
            at = ends[-1] * number // _NUM_SAMPLES
            file = bisect_right(ends, at)
            start = at - ends[file] + sizes[file]
            nbytes = min(_SAMPLE_NBYTES, ends[file] - at)
            digest.update(self._storage.read(self._names[file], start=start, nbytes=nbytes))
        return digest.hexdigest()

    def check_unchanged(self, *, all_files: bool = True) -> None:
        """As `StoredState.check_unchanged`."""
        self.check_read(range(len(self._names)) if all_files else self._read)

    def check_read(self, files: Collection[int]) -> None:
        """As `DataFiles.check_read`. `open_file` has looked before; other systems write into files that are there."""
        for index in sorted(files):
            self._check_file(index)
        for name, mark in self._descriptions.items():
            self._check_mark(name, mark)

    def _check_file(self, index: int) -> None:
        self._check_mark(self._names[index], self._marks[index])

    def _check_mark(self, name: str, mark: Mark) -> None:
        if _mark(untimed(self._storage), name) != mark:
            raise replaced(self._storage.path(name))

    @property
    def storage(self) -> Store:
        """As `StoredState.storage`."""
        return self._storage

    @property
    def nodes(self) -> Mapping[str, Node]:
        """As `StoredState.nodes`."""
        return self._nodes

    def open_file(
        self,
        index: int,
        *,
        data_start: int,
        data_nbytes: int,
        verify: bool = True,
        open_reader: OpenReader = open_reader,
    ) -> DataFile:
        """As `DataFiles.open_file`. Raises `CorruptError` where the file is another one than when the state was opened:
        the places of tensors in it are no longer known."""
        file = super().open_file(
            index, data_start=data_start, data_nbytes=data_nbytes, verify=verify, open_reader=open_reader
        )
        self._read.add(index)
        try:
            self._check_file(index)
        except CorruptError:
            file.reader.close()
            raise
        return file

    def key(self, file: int) -> str:
        """As `DataFiles.key`, but with folders: other systems have files of one name in several."""
        return self._names[file]


def _mark(store: Store, name: str) -> Mark:
    """The mark of a file: its size alone where the store is no file system."""
    path = store.path(name)
    if isinstance(store, TimedStore):
        return store.limit.run("look at", path, partial(_mark, store.untimed, name))
    if store.location.folder is None:
        nbytes = store.nbytes(name)
        return None if nbytes is None else (nbytes,)
    try:
        status = Path(path).stat()
    except OSError:
        return None  # the reader of the file says what is wrong
    # Some writers set the old time of modification again. Nobody sets the time of the last change.
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def replaced(path: str) -> CorruptError:
    """The error for a checkpoint, or a file of it, that is another one than when it was opened."""
    action = "Open the checkpoint again when nothing writes to it: begin anew."
    return damaged(path, "was replaced or changed after it was opened", action=action)


def damaged(
    path: str, what: str, *, tensor: str | None = None, action: str = "", details: Sequence[str] = ()
) -> CorruptError:
    """The error for a foreign file whose content is wrong."""
    return CorruptError(
        f"{path} {what}.",
        code="corrupt.foreign",
        action=action or "Copy the checkpoint again from where it was written.",
        path=path,
        tensor=tensor,
        details=tuple(details),
    )


def unreadable(path: str, what: str, *, action: str = "") -> IncompatibleError:
    """The error for a foreign file that is sound, and holds what holdfast does not read."""
    return IncompatibleError(
        f"{path} {what}.",
        code="incompatible.foreign",
        action=action or "Load it with the library that wrote it, and save that state again.",
        path=path,
    )
