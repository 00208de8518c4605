"""Deep verification: every byte of a checkpoint against its digests, every file against what the manifest demands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast.errors import CorruptError, NotFoundError
from holdfast.format import container
from holdfast.format.container import FileLayout
from holdfast.run.checkpoint import Checkpoint
from holdfast.storage.base import Bytes
from holdfast.transfer.buffers import BufferPool, pipeline_pool
from holdfast.transfer.reader import DataFile, Extent, ReadJob, read_files


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a stable code, the file, and what to know about it."""

    code: str
    path: str
    message: str


def verify_checkpoint(checkpoint: Checkpoint, *, progress: Callable[[int], None]) -> list[Finding]:
    """Read and check all data of `checkpoint`, in bounded memory; `progress` gets the bytes done since its last call.

    Checked are the size of each data file, its header byte for byte (it is a function of the manifest), its digest
    table against the seal, every block, and that the values can be decoded. A bad file does not stop the others.
    """
    findings = []
    with pipeline_pool() as pool:
        for index in range(checkpoint.manifest.body.num_files):
            layout = checkpoint.files.layout(index)
            finding = _finding(lambda layout=layout: _verify_file(checkpoint, layout, pool, progress))  # type: ignore[misc]
            if finding is not None:
                findings.append(finding)
    finding = _finding(lambda: dict(checkpoint.nodes))
    if finding is not None and finding not in findings:
        findings.append(finding)
    return findings


def _finding(check: Callable[[], object]) -> Finding | None:
    try:
        check()
    except (CorruptError, NotFoundError) as error:
        return Finding(error.code, error.path or "", error.message)
    return None


def _verify_file(checkpoint: Checkpoint, layout: FileLayout, pool: BufferPool, progress: Callable[[int], None]) -> None:
    def open_() -> DataFile:
        file = checkpoint.open_file(layout.index, data_start=layout.data_start, data_nbytes=layout.data_nbytes)
        _check_header(checkpoint, layout, file)
        return file

    def deliver(_: int, __: int, data: Bytes) -> None:
        progress(len(data))

    job = ReadJob(open_, [Extent(0, layout.data_nbytes)], deliver)
    read_files([job], pool=pool, on_corrupt=checkpoint.corrupt_block)


def _check_header(checkpoint: Checkpoint, layout: FileLayout, file: DataFile) -> None:
    assert file.table is not None
    found = np.empty(layout.data_start, np.uint8)
    file.reader.read_at(0, found)
    if found.tobytes() != container.header(checkpoint.manifest, layout, file.table):
        file.reader.close()
        raise CorruptError(
            f"{file.path} is damaged: its header is not the one that the manifest demands.",
            code="corrupt.header",
            action="Holdfast does not need the header to load; restore this file from another copy for other readers.",
            path=file.path,
        )
