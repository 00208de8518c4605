"""`export`: a checkpoint, written as other systems read it, without a model, a GPU or a process group."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from holdfast.exporting.folder_writer import check_no_export, write_folder
from holdfast.exporting.planned_export import SHARD_NBYTES, PlannedExport, export_settings, planned
from holdfast.interop.megatron_iterations import check_tracker, iteration_name, write_tracker
from holdfast.mapping import Rule
from holdfast.phases import LOG
from holdfast.progress import counted
from holdfast.reports import ExportReport
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import location_of, open_store
from holdfast.workers import Workforce, on_executor

__all__ = ["export"]


def export(
    path: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str],
    to: str = "hf",
    *,
    select: str | Sequence[str] | None = None,
    mapping: Sequence[Rule] | None = None,
    dtype: str | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    config: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
    executor: Executor | None = None,
    read_back: bool = False,
) -> ExportReport:
    """Write a checkpoint into the new folder `dst` in the format of another system: ``"hf"``, safetensors files as
    Hugging Face's loaders read them, ``"peft"``, the weights of one adapter as `PeftModel.from_pretrained` reads them,
    ``"dcp"``, a folder for ``torch.distributed.checkpoint.load``, ``"deepspeed-universal"``, a universal folder for
    `DeepSpeedEngine.load_checkpoint`, or ``"megatron"``, a folder with the tracker file and one iteration for
    ``megatron.core.dist_checkpointing.load``.

    Blocking. Call it in one process. Needs no model and no GPU; only the last three need torch. Reads each stored
    block once and verifies it, whatever the layout it was saved in, with at most 400 MiB of buffers. All files are
    durable on return, and the index (``.metadata``) is written last. After an interruption the same call continues: it
    reads the files that are finished, compares them with the digests that were recorded, and keeps them.

    Workers of `executor`, any of `concurrent.futures` and its like, write the files at the same time, each with so much
    memory. They must see `path` and `dst` under the same names. Without it, threads of this process do. With
    `read_back`, each new file is read again when it is written, and compared.

    `select` has globs of the names to write, as `mapping` made them. Without it, ``"hf"`` writes the tensors of the
    state's only module, ``"peft"`` those of them that an adapter has, ``"dcp"`` and ``"deepspeed-universal"``
    everything, values too, and ``"megatron"`` everything but random numbers. ``"hf"`` leaves out the containers that
    all names lie in, so that ``model/layers.0.weight`` becomes ``layers.0.weight``, and writes a tied tensor once.
    `dtype` converts all floating tensors that no rule of `mapping` casts. No new file has more than `shard_nbytes`
    bytes of tensors, unless it is one tensor or an adapter; ``"deepspeed-universal"`` has a file for each tensor of the
    parameters of its only optimizer.

    `config` is a folder whose ``config.json``, generation settings and tokenizer are copied, for ``"hf"``; the copied
    ``config.json`` names `dtype`, where that is given. ``"peft"`` needs it: a folder whose ``adapter_config.json`` is
    copied, and says which names the weights get. `adapter` says which adapter is written, where the model has several.

    Raises:
        NotFoundError: there is no such checkpoint.
        ConfigurationError: `dst` holds something else, another call writes to it now, or the options do not fit
            together; nothing is written.
        IncompatibleError: a rule or a glob fits nothing, two tensors would get one name, or the format has no such
            dtype or no place for a part of the state; nothing is written.
        CorruptError: stored bytes are damaged, or those read back are not those that were written.
        StorageError: the disk is full, a store failed, or a worker died (``storage.worker``).
    """
    return export_by(
        on_executor(executor),
        path,
        dst,
        to,
        select=select,
        mapping=mapping,
        dtype=dtype,
        shard_nbytes=shard_nbytes,
        config=config,
        adapter=adapter,
        read_back=read_back,
    )


def export_by(
    workforce: Workforce,
    path: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str],
    to: str,
    *,
    select: str | Sequence[str] | None,
    mapping: Sequence[Rule] | None,
    dtype: str | None,
    shard_nbytes: int,
    config: str | os.PathLike[str] | None,
    adapter: str | None,
    read_back: bool,
    shown: bool = True,
) -> ExportReport:
    """As `export`, with workers that are chosen when the work is known. `shown` allows a bar."""
    settings = export_settings(
        to, select=select, mapping=mapping, dtype=dtype, shard_nbytes=shard_nbytes, config=config, adapter=adapter
    )
    began = time.monotonic()
    with planned(parse(path), settings) as plan:
        report = write_export(
            plan, os.fspath(dst), to, workforce=workforce, read_back=read_back, began_s=began, shown=shown
        )
    LOG.info("exported %s, to %s", report.summary, report.path)
    return report


def write_export(
    plan: PlannedExport,
    dst: str,
    to: str,
    *,
    workforce: Workforce,
    began_s: float,
    read_back: bool = False,
    shown: bool = False,
) -> ExportReport:
    """Write a planned export into the folder `dst`. A bar shows its progress at a terminal if `shown`."""
    state, folder = plan.state, plan.folder
    name = iteration_name(state.record.step) if to == "megatron" else ""
    place = location_of(dst)
    storage = open_store(place.below(name) if name else place)
    nbytes = sum(file.data_nbytes for file in folder.files)
    finish = None
    if name:
        above = open_store(place)
        check_tracker(above)
        check_no_export(above)
        finish = partial(write_tracker, above, name)
    with counted(f"exporting to {storage.location}", nbytes, shown=shown) as advance:
        written = write_folder(
            storage, folder, state, workforce=workforce, advance=advance, read_back=read_back, finish=finish
        )
    return ExportReport(
        step=state.record.step,
        place=str(state.record.place or ""),
        path=storage.location.url,
        to=to,
        num_tensors=folder.num_tensors,
        num_values=plan.num_values,
        files=tuple(file.name for file in folder.files),
        kept=written.kept,
        written_nbytes=written.nbytes,
        read_nbytes=written.bytes_read,
        verified=state.has_digests,
        seconds=time.monotonic() - began_s,
    )
