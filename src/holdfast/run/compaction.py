"""`compact`: a checkpoint gets its own copies of the files that earlier checkpoints have for it."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.checkpoint.file_copy import write_copy
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_file
from holdfast.errors import CorruptError
from holdfast.format.records import Commit
from holdfast.io.buffers import writing_pool
from holdfast.run.by_path import checkpoint_at
from holdfast.run.history import Run
from holdfast.run.references import delete_references_of
from holdfast.store.base import Location


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


def _copy(checkpoint: Checkpoint, index: int) -> None:
    """Copy a data file that an earlier checkpoint has into the checkpoint's own folder."""
    seal = checkpoint.seal.files[index]
    writer = checkpoint.storage.writer(checkpoint.sealed.key(seal.name), nbytes=seal.nbytes)
    with writing_pool(writer) as pool:
        write_copy(checkpoint, checkpoint.files.layout(index), writer, pool=pool)
