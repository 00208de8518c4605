"""`compact`: a checkpoint gets its own copies of the files that earlier checkpoints have for it."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.checkpoint.file_copy import write_copy
from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_file
from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.format.records import Commit, FileSeal
from holdfast.io.buffers import writing_pool
from holdfast.run.by_path import checkpoint_at
from holdfast.run.history import Run
from holdfast.run.leases import lease_on
from holdfast.run.references import delete_references_of
from holdfast.store.base import Location


def compact(path: str | os.PathLike[str] | Location) -> int:
    """Make a checkpoint self-contained: copy into its folder the files that it shares with earlier checkpoints.

    A run stands for its head. Blocks until the copies are durable, and returns their bytes. No record changes: readers
    look into the checkpoint's own folder first. Each copy is read again and compared with its digests. Repeat it to go
    on after an interruption. The checkpoint is leased meanwhile, as by every reader, so no policy deletes it.

    Raises:
        NotFoundError: there is no such checkpoint, or it was deleted meanwhile.
        CorruptError: a file of an earlier checkpoint is missing or damaged, or a copy is.
    """
    run, commit = checkpoint_at(path)
    return compact_checkpoint(run, commit)


def compact_checkpoint(run: Run, commit: Commit, *, told: Callable[[int], None] = lambda _: None) -> int:
    """As `compact`, for the checkpoint of `commit`. `told` hears of the bytes of each copy."""
    sealed, copied = run.locate(commit), list[FileSeal]()
    lease = lease_on(run.storage, commit.place)
    try:
        for index, file in enumerate(sealed.seal.files):
            if file.is_referenced and run.storage.nbytes(sealed.key(file.name)) is None:
                _copy(Checkpoint(sealed), index)
                copied.append(file)
                told(file.nbytes)
        _verify(sealed)
    except (CorruptError, NotFoundError, StorageError) as error:
        if not run.is_removed(commit.place):
            raise
        for file in copied:  # the deletion may have looked for files before they were there
            run.storage.delete(sealed.key(file.name))
        raise _removed(run, commit) from error
    finally:
        if lease is not None:
            lease.end()
    delete_references_of(run, commit.checkpoint)
    return sum(file.nbytes for file in copied)


def _verify(sealed: Sealed) -> None:
    """Read all copies, also those of an earlier call, before anybody may delete the files that they were made of."""
    checkpoint = Checkpoint(sealed)
    for index, file in enumerate(sealed.seal.files):
        faults = verify_file(checkpoint, index) if file.is_referenced else []
        if faults:
            action = (
                f"Delete '{faults[0].path}', and repeat the command. Check the disk and the memory of this machine."
            )
            raise CorruptError(faults[0].message, code=faults[0].code, action=action, path=faults[0].path)


def _removed(run: Run, commit: Commit) -> NotFoundError:
    url = run.storage.location.url
    return NotFoundError(
        f"checkpoint {commit.place} of '{url}' was deleted while its files were copied: by a keep policy, `holdfast "
        "prune` or `rm`.",
        code="not_found.commit",
        action="Choose another one. Pin it, and no policy deletes it: `holdfast pin`.",
        path=url,
        step=commit.step,
    )


def _copy(checkpoint: Checkpoint, index: int) -> None:
    """Copy a data file that an earlier checkpoint has into the checkpoint's own folder."""
    seal = checkpoint.seal.files[index]
    writer = checkpoint.storage.writer(checkpoint.sealed.key(seal.name), nbytes=seal.nbytes)
    with writing_pool(writer) as pool:
        write_copy(checkpoint, checkpoint.files.layout(index), writer, pool=pool)
