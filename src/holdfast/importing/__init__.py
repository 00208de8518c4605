"""`import_checkpoint`: a checkpoint of another system, brought into a new run by this process or by many workers."""

from __future__ import annotations

import os
import time
from concurrent.futures import Executor

from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.format.manifest import data_nbytes
from holdfast.importing.first_checkpoint import import_state
from holdfast.interop.formats import FoundState, find_state
from holdfast.options import checked_number
from holdfast.phases import LOG
from holdfast.progress import counted
from holdfast.reports import ImportReport
from holdfast.run.by_path import parse_run
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from holdfast.workers import Workforce, on_executor

__all__ = ["import_checkpoint"]


def import_checkpoint(
    src: str | os.PathLike[str] | Location,
    run: str | os.PathLike[str] | Location,
    step: int,
    *,
    executor: Executor | None = None,
    read_back: bool = False,
) -> ImportReport:
    """Write the checkpoint of another system at `src` into the new run `run`, as the checkpoint of `step`.

    Blocking. Call it in one process. Needs no model, no GPU and no torch. Reads and writes each byte once, in
    data files of 1 GiB or of one tensor. The checkpoint is durable and committed on return; before, none is visible.
    After an interruption the same call continues: it keeps the data files that match their digests, which it reads.

    Workers of `executor`, any of `concurrent.futures` and its like, write the files at the same time, each with 200 MiB
    of buffers. They must see `src` and `run` under the same names. Without it, threads of this process do. With
    `read_back`, each new file is read again when it is written, and compared.

    Raises:
        NotFoundError: there is no such checkpoint.
        ConfigurationError: `src` is a checkpoint of holdfast (``config.path``), the run has checkpoints
            (``config.unloaded_history``), or `executor` forks (``config.executor``).
        CorruptError, IncompatibleError: a part of it is damaged, or cannot be read.
        StorageError: a store failed, or a worker died (``storage.worker``).
    """
    return import_by(on_executor(executor), src, run, step, read_back=read_back)


def import_by(
    workforce: Workforce,
    src: str | os.PathLike[str] | Location,
    run: str | os.PathLike[str] | Location,
    step: int,
    *,
    read_back: bool,
    shown: bool = True,
) -> ImportReport:
    """As `import_checkpoint`, with workers that are chosen when the work is known. `shown` allows a bar."""
    step = checked_number("step", step, least=0, reason="steps count from 0")
    began = time.monotonic()
    found = _found(src)
    if found.located is not None:
        raise ConfigurationError(
            f"'{src}' is a checkpoint of holdfast already.",
            code="config.path",
            action="Copy it (holdfast cp, holdfast.copy_run), or load it into a state and save that.",
            path=str(src),
        )
    state, storage = found.state, open_store(parse_run(run).location)
    with counted(f"importing {src}", data_nbytes(state.manifest.body), shown=shown, after_s=0.0) as advance:
        done = import_state(state, storage, step, workforce=workforce, advance=advance, read_back=read_back)
    report = ImportReport(
        step=done.commit.step,
        place=str(done.commit.place),
        path=storage.location.url,
        kind=state.record.kind,
        num_tensors=len(state.manifest.body.names),
        num_values=len(state.nodes),
        nbytes=done.commit.nbytes,
        kept=done.kept,
        written_nbytes=done.written_nbytes,
        seconds=time.monotonic() - began,
    )
    LOG.info("imported %s, into %s", report.summary, report.path)
    return report


def _found(src: str | os.PathLike[str] | Location) -> FoundState:
    """The checkpoint at `src`. Where there is none, the error says of which systems one may be."""
    try:
        return find_state(parse(src))
    except NotFoundError as error:
        if error.code != "not_found.run":
            raise
        error.action += (
            " An import takes what safetensors, Hugging Face, peft, DCP, DeepSpeed, Megatron-core, ByteCheckpoint, "
            "torchsnapshot, torch_checkpointing or torch.save wrote: name its folder, or its file."
        )
        raise
