"""`compact`: a checkpoint gets its own copies of the files that earlier checkpoints have for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_file
from holdfast.errors import CorruptError
from holdfast.format import container
from holdfast.format.records import Commit
from holdfast.io.buffers import writing_pool
from holdfast.io.jobs import DataFile
from holdfast.io.writer import write_file
from holdfast.run.by_path import checkpoint_at
from holdfast.run.history import Run
from holdfast.run.references import delete_references_of
from holdfast.store.base import Bytes, Location


def compact(path: str | os.PathLike[str] | Location) -> int:
    """Make a checkpoint self-contained: copy into its folder the files that it shares with earlier checkpoints.

    A run stands for its head. Blocks until the copies are durable, and returns their bytes. No record changes: readers
    look into the checkpoint's own folder first. Each copy is read again and compared with its digests. Repeat it to go
    on after an interruption.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptError: a file of an earlier checkpoint is missing or damaged, or a copy is.
    """
    run, commit = checkpoint_at(path)
    return compact_checkpoint(run, commit)


def compact_checkpoint(run: Run, commit: Commit, *, told: Callable[[int], None] = lambda _: None) -> int:
    """As `compact`, for the checkpoint of `commit`. `told` hears of the bytes of each copy."""
    sealed = run.locate(commit)
    copied = 0
    for index, file in enumerate(sealed.seal.files):
        if file.is_referenced and run.storage.nbytes(sealed.key(file.name)) is None:
            _copy(Checkpoint(sealed), index)
            copied += file.nbytes
            told(file.nbytes)
    # Read all copies, also those of an earlier call, before anybody may delete the files that they were made of.
    checkpoint = Checkpoint(sealed)
    for index, file in enumerate(sealed.seal.files):
        faults = verify_file(checkpoint, index) if file.is_referenced else []
        if faults:
            action = (
                f"Delete '{faults[0].path}', and repeat the command. Check the disk and the memory of this machine."
            )
            raise CorruptError(faults[0].message, code=faults[0].code, action=action, path=faults[0].path)
    delete_references_of(run, commit.checkpoint)
    return copied


class _StoredData(NamedTuple):
    """The data section of a stored file, as a source for another file."""

    file: DataFile

    @property
    def nbytes(self) -> int:
        """As `Source.nbytes`."""
        return self.file.data_nbytes

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`."""
        self.file.reader.read_at(self.file.data_start + start, out)


def _copy(checkpoint: Checkpoint, index: int) -> None:
    """Copy a data file that an earlier checkpoint has into the checkpoint's own folder, with a header of its own. The
    copy appears only if all that was read matches its digests."""
    layout, seal = checkpoint.files.layout(index), checkpoint.seal.files[index]
    file = checkpoint.open_file(index, data_start=layout.data_start, data_nbytes=layout.data_nbytes)

    def header(table: bytes) -> bytes:
        if table != file.table:
            raise CorruptError(
                f"{file.path} is damaged: its data does not match its digests.",
                code="corrupt.file",
                action="Restore this file from another copy of the run. `holdfast verify --deep` says what is damaged.",
                path=file.path,
            )
        return container.header(checkpoint.manifest, layout, table)

    try:
        writer = checkpoint.storage.writer(checkpoint.sealed.key(seal.name), nbytes=seal.nbytes)
        with writing_pool(writer) as pool:
            write_file(
                writer,
                [_StoredData(file)],
                data_start=layout.data_start,
                header=header,
                pool=pool,
            )
    finally:
        file.reader.close()
