"""Verification that a checkpoint is as it was sealed: its structure, or every byte of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import UNSET

from holdfast.checkpoint.fault import MAX_NAMED, Fault
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import BLOCK_NBYTES, FileLayout
from holdfast.io.buffers import BufferPool, pipeline_pool
from holdfast.io.digest import bad_blocks
from holdfast.io.jobs import DataFile, Extent, ReadJob
from holdfast.io.reader import read_files
from holdfast.store.base import Bytes
from holdfast.wording import count


def verify_checkpoint(
    checkpoint: Checkpoint, *, deep: bool, progress: Callable[[int], None] = lambda _: None
) -> list[Fault]:
    """Find all faults in the files of `checkpoint`. Blocking, in bounded memory; a bad file does not stop the others.

    Each data file must exist with the sealed size and the sealed digest table, its header must be the one that the
    manifest demands, byte for byte, and its values must be sound. With `deep`, all data is read, too, and compared
    with the digests, and `progress` gets the bytes done since its last call. Files that the seal does not list are
    faults, too (code ``extra.file``), although nothing reads them.
    """
    faults: list[Fault] = []
    with pipeline_pool() as pool:
        for index in range(checkpoint.manifest.body.num_files):
            faults += _verify_file(checkpoint, index, pool if deep else None, progress)
    return faults + _extra_files(checkpoint)


def verify_file(checkpoint: Checkpoint, index: int) -> list[Fault]:
    """Find the faults in one data file, of which every byte is read. Blocking, in bounded memory."""
    with pipeline_pool() as pool:
        return _verify_file(checkpoint, index, pool, lambda _: None)


def _verify_file(
    checkpoint: Checkpoint, index: int, pool: BufferPool | None, progress: Callable[[int], None]
) -> list[Fault]:
    """The faults of one data file. Reads its blocks only where a `pool` is given."""
    layout = checkpoint.files.layout(index)
    try:
        file = checkpoint.open_file(index, data_start=layout.data_start, data_nbytes=layout.data_nbytes)
        try:
            faults = _header_faults(checkpoint, layout, file)
        finally:
            file.reader.close()
        bad = [] if pool is None else _bad_blocks(checkpoint, layout, pool, progress)
        if bad:
            faults.append(_block_fault(checkpoint, layout, file.path, bad))
        elif layout.values is not None and layout.values.paths:
            checkpoint.nodes[layout.values.paths[0]]  # looking up one value reads and checks all values of its file
    except (CorruptError, NotFoundError, StorageError) as error:
        return [Fault.of(error, _tensors_in(checkpoint, layout, range(container.num_blocks(layout.data_nbytes))))]
    return faults


def _header_faults(checkpoint: Checkpoint, layout: FileLayout, file: DataFile) -> list[Fault]:
    assert file.table is not None
    found = np.empty(layout.data_start, np.uint8)
    file.reader.read_at(0, found)
    # A file of an earlier checkpoint has the id of that one, also where `compact` has copied it.
    holder, own = checkpoint.seal.files[layout.index].checkpoint, checkpoint.seal.checkpoint_id
    ids = [own] if holder is UNSET else [records.id_of(holder), own]
    if any(found.tobytes() == container.header_in(each, layout, file.table, file.digests) for each in ids):
        return []
    message = (
        f"{file.path} is damaged: its header is not the one that the manifest requires. Holdfast loads "
        "without the header, but other readers of safetensors files need it."
    )
    return [Fault("corrupt.header", file.path, message)]


def _bad_blocks(
    checkpoint: Checkpoint, layout: FileLayout, pool: BufferPool, progress: Callable[[int], None]
) -> list[int]:
    """The numbers of a file's blocks that do not match their digests, ascending."""
    bad: list[int] = []
    file = checkpoint.open_file(layout.index, data_start=layout.data_start, data_nbytes=layout.data_nbytes)
    table = file.table
    assert table is not None

    def take(_: int, offset: int, data: Bytes) -> None:
        # Requests for one extent begin at multiples of the buffer's size, so they hold whole blocks.
        assert offset % BLOCK_NBYTES == 0
        bad.extend(bad_blocks(data, table, first=offset // BLOCK_NBYTES, kind=file.digests))
        progress(len(data))

    # Passed on without its table: the reader would stop at the first bad block, and we want all of them.
    unchecked = DataFile(file.reader, file.path, file.data_start, file.data_nbytes, None)
    job = ReadJob(layout.data_nbytes, lambda: unchecked, [Extent(0, layout.data_nbytes)], take)
    request_nbytes = checkpoint.capabilities.request_nbytes
    read_files([job], pool=pool, on_corrupt=checkpoint.corrupt_block, request_nbytes=request_nbytes)
    return sorted(bad)


def _block_fault(checkpoint: Checkpoint, layout: FileLayout, path: str, bad: list[int]) -> Fault:
    listed = ", ".join(map(str, bad[:MAX_NAMED])) + (", ..." if len(bad) > MAX_NAMED else "")
    total = container.num_blocks(layout.data_nbytes)
    verb = "does not match its digest" if len(bad) == 1 else "do not match their digests"
    what = f"{len(bad):,} of {count(total, 'block')} of 1 MiB {verb} (number {listed})"
    error = CorruptError(f"{path} is damaged: {what}.", code="corrupt.file", action="", path=path)
    return Fault.of(error, _tensors_in(checkpoint, layout, bad))


def _tensors_in(checkpoint: Checkpoint, layout: FileLayout, blocks: Sequence[int]) -> Iterator[str]:
    """The names of the tensors that lie in some blocks (ascending) of a file; the values count as a tensor here."""

    def hit(start: int, stop: int) -> bool:
        at = bisect_left(blocks, start // BLOCK_NBYTES)
        return start < stop and at < len(blocks) and blocks[at] * BLOCK_NBYTES < stop

    for entry in layout.entries:
        if hit(entry.offset, entry.offset + entry.nbytes):
            yield checkpoint.manifest.body.names[entry.tensor]
    if layout.values is not None and hit(layout.values_offset, layout.data_nbytes):
        yield container.VALUES_NAME


def _extra_files(checkpoint: Checkpoint) -> list[Fault]:
    sealed = {checkpoint.seal.manifest.name, records.SEAL_NAME, *(file.name for file in checkpoint.seal.files)}
    found = checkpoint.storage.list(checkpoint.sealed.prefix.rstrip("/"))
    return [
        Fault(
            "extra.file",
            checkpoint.path(name),
            f"{checkpoint.path(name)} is not part of the checkpoint: the seal does not list it, and nothing reads it.",
        )
        for name in found
        if name not in sealed and not fmt.is_mark_name(name)
    ]
