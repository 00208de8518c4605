"""The copy of one checkpoint's files into a folder of its own, several at a time.

Each file comes from where the source has it, in the checkpoint's folder or in that of an earlier one, and is written
whole. So the copy of a checkpoint needs no other one, and its records have the bytes of the source all the same: a
seal names the holders of files, but readers look into the checkpoint's own folder first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.file_copy import write_copy
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.format import records
from holdfast.format.container import BLOCK_NBYTES, FileLayout
from holdfast.format.records import SEAL_NAME, Commit
from holdfast.io.buffers import BUFFER_NBYTES, BufferPool, run_threads
from holdfast.io.create_only import CreateOnlyWriter
from holdfast.run.complete import StoredManifest, check_data, check_file
from holdfast.run.history import Run
from holdfast.store.base import Store

#: Buffers of a copy, and so the requests that are under way at a time.
_NUM_BUFFERS: Final = 8
#: Files that are written at a time.
_FILES_AT_ONCE: Final = 4
#: The size of a buffer where bytes come from a network or go to one: that of a part of an object.
_REMOTE_NBYTES: Final = 16 * BLOCK_NBYTES


def copy_pool(source: Store, target: Store) -> BufferPool:
    """The memory of a copy: 16 MiB between folders, 128 MiB where bytes come from a network or go to one."""
    is_local = source.capabilities.is_mappable and target.capabilities.is_mappable
    nbytes = BUFFER_NBYTES if is_local else _REMOTE_NBYTES
    return BufferPool(_NUM_BUFFERS * nbytes, buffer_nbytes=nbytes)


@dataclass(frozen=True)
class SourceCheckpoint:
    """A committed checkpoint to copy, with the bytes of its records, which agree with each other."""

    checkpoint: Checkpoint
    stored: StoredManifest
    seal: bytes
    commit: bytes

    @staticmethod
    def read(run: Run, commit: Commit) -> SourceCheckpoint:
        """Read the records of the checkpoint of `commit`. Raises `CorruptError` where one is damaged or missing."""
        sealed = run.locate(commit)
        checkpoint = Checkpoint(sealed)
        manifest = sealed.seal.manifest
        copy = checkpoint.catalogue.nearest(manifest.name)
        data = _read_again(copy.store, copy.key, manifest.digest)
        seal = _read_again(sealed.storage, sealed.key(SEAL_NAME), commit.seal.digest)
        key = records.commit_key(commit.place)
        published = sealed.storage.read(key, limit=records.MAX_RECORD_NBYTES)
        return SourceCheckpoint(
            checkpoint, StoredManifest(commit.checkpoint, data, checkpoint.manifest), seal, published
        )


def _read_again(store: Store, key: str, digest: str) -> bytes:
    """The bytes of a file whose content was read before, for their digest."""
    data = store.read(key)
    if records.digest(data) != digest:
        path = store.path(key)
        message = f"'{path}' changed while it was read."
        raise CorruptError(message, code="corrupt.changed", action="Repeat the copy.", path=path)
    return data


@dataclass(frozen=True)
class CopiedFiles:
    """The data files of one checkpoint that were `kept`, because the copy had them, and the bytes of the others."""

    num_kept: int
    written_nbytes: int


class CheckpointCopy:
    """The copy of the data files of a checkpoint, whose manifest the copy in `target` has already.

    With `read_back`, each file is read again in the copy, and compared with its digests.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        target: Store,
        *,
        read_back: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint = source.checkpoint
        self._stored = source.stored
        self._target = target
        self._read_back = read_back
        self._advance = advance

    def write(self, pool: BufferPool, present: frozenset[str]) -> CopiedFiles:
        """Write all data files. Blocks until they are durable. `present` are the names in the copy's folder; a file
        among them is kept if it is sound, and else written again.

        Several files at a time, with the buffers of `pool`. Raises `CorruptError` for a damaged file of the source,
        which does not appear in the copy.
        """
        files = range(self._checkpoint.manifest.body.num_files)
        num_workers = min(_FILES_AT_ONCE, len(files))
        num_threads = _NUM_BUFFERS // max(num_workers, 1)
        waiting, stopped, lock = iter(files), threading.Event(), threading.Lock()
        kept, written = 0, 0

        def take_turns() -> None:
            nonlocal kept, written
            while not stopped.is_set():
                with lock:
                    index = next(waiting, None)
                if index is None:
                    return
                layout = self._checkpoint.files.layout(index)
                is_kept = self._name(index) in present and self._keeps(layout)
                if not is_kept:
                    self._write(layout, pool, num_threads, stopped)
                with lock:
                    kept += is_kept
                    written += 0 if is_kept else layout.nbytes

        if files:
            run_threads(num_workers, take_turns, stop=stopped.set)
        return CopiedFiles(kept, written)

    def _keeps(self, layout: FileLayout) -> bool:
        """Whether the copy's file is the sealed one. Deletes it if it is not."""
        if self._is_sound(layout):
            self._advance(layout.data_nbytes)
            return True
        self._target.delete(self._stored.key(self._name(layout.index)))
        return False

    def _is_sound(self, layout: FileLayout) -> bool:
        """Whether the copy's file has the size and the header that were sealed. A store shows a file when it is whole,
        and only verified bytes are published, so its data needs another look only where `read_back` asks for it."""
        check = check_data if self._read_back else check_file
        try:
            return check(self._target, self._stored, layout) == self._checkpoint.seal.files[layout.index]
        except (CorruptError, NotFoundError):
            return False

    def _write(self, layout: FileLayout, pool: BufferPool, num_threads: int, stopped: threading.Event) -> None:
        """Copy one data file; durable on return."""
        key = self._stored.key(self._name(layout.index))
        writer = CreateOnlyWriter(self._target.writer(key, nbytes=layout.nbytes), lambda: None)

        def advance(nbytes: int) -> None:
            if stopped.is_set():
                raise _CopyStoppedError
            self._advance(nbytes)

        write_copy(self._checkpoint, layout, writer, pool=pool, num_threads=num_threads, advance=advance)
        if (writer.existed or self._read_back) and not self._is_sound(layout):
            raise _bad_copy(self._target.path(key))

    def _name(self, index: int) -> str:
        return self._checkpoint.seal.files[index].name


class _CopyStoppedError(Exception):
    """Another file's copy failed."""


def _bad_copy(path: str) -> StorageError:
    return StorageError(
        f"'{path}' does not have the bytes that were written.",
        code="storage.read_back",
        action="Check the disk and the memory of this machine, and repeat the copy.",
        path=path,
    )
