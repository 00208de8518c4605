"""`export`: a checkpoint, written as other systems read it, without a model, a GPU or a process group."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError
from holdfast.exporting.chosen_tensors import ChosenContent, choose
from holdfast.exporting.element_source import check_equal
from holdfast.exporting.folder_writer import WrittenFolder, write_folder
from holdfast.exporting.hugging_face_folder import hugging_face_folder
from holdfast.exporting.new_folder import NewFolder
from holdfast.exporting.peft_folder import peft_folder
from holdfast.format.patterns import Globs
from holdfast.interop.formats import find_state
from holdfast.interop.megatron_iterations import iteration_name, write_tracker
from holdfast.mapping import Cast, Rule
from holdfast.mapping.parts import is_floating
from holdfast.mapping.rules import checked_rules
from holdfast.options import checked_number
from holdfast.phases import LOG
from holdfast.progress import counted
from holdfast.reports import ExportReport
from holdfast.run.leases import leased
from holdfast.run.paths import parse
from holdfast.store.base import Location, Store
from holdfast.store.urls import location_of, open_store
from holdfast.workers import Workforce, on_executor

__all__ = ["export"]

#: Most bytes of tensors in one new file, as Hugging Face has it.
SHARD_NBYTES: Final = 5_000_000_000
_FORMATS: Final = ("hf", "peft", "dcp", "megatron", "deepspeed-universal")
#: Those that have optimizers and values, too; they need torch's own classes.
_WITH_VALUES: Final = ("dcp", "megatron", "deepspeed-universal")


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
        ConfigurationError: `dst` holds something else, or the options do not fit together; nothing is written.
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
    _check_format(to, config, adapter)
    rules = _rules(mapping, dtype)
    globs = None if select is None else Globs(select)
    least = "files without room for tensors are none"
    limit = checked_number("shard_nbytes", shard_nbytes, least=1, reason=least)
    found, began = find_state(parse(path)), time.monotonic()
    lease = None if found.located is None else leased(found.located)
    try:
        state = found.state
        choice = choose(state, select=globs, rules=rules, model_only=to not in _WITH_VALUES, is_mapped=bool(mapping))
        _find_places(state, choice)
        check_equal(state, choice.equal)
        folder = _folder(choice, to, state, limit, config, dtype=dtype, adapter=adapter)
        name, above = iteration_name(state.record.step) if to == "megatron" else "", os.fspath(dst)
        storage = open_store(location_of(f"{above.rstrip('/')}/{name}" if name else above))
        nbytes = sum(file.data_nbytes for file in folder.files)
        with counted(f"exporting to {storage.location}", nbytes, shown=shown) as advance:
            finish = partial(write_tracker, open_store(location_of(above)), name) if name else None
            written = write_folder(
                storage, folder, state, workforce=workforce, advance=advance, read_back=read_back, finish=finish
            )
        return _report(state, folder, storage, written, to, len(choice.values), seconds=time.monotonic() - began)
    finally:
        if lease is not None:
            lease.end()


def _find_places(state: StoredState, choice: ChosenContent) -> None:
    """Find the stored parts of all that was chosen; what was left out may be unreadable."""
    parts = (part for one in choice.tensors for part in one.tensor.parts)
    state.find_places({state.numbers[part.source] for part in parts if part.source is not None})


def _check_format(to: str, config: object, adapter: object) -> None:
    if to not in _FORMATS:
        raise ConfigurationError(
            f"{to!r} is no format that holdfast writes.",
            code="config.export",
            action=f"Choose one of {', '.join(_FORMATS)}.",
        )
    if to in _WITH_VALUES and config is not None:
        raise ConfigurationError(
            f"a folder of {to} has no configuration of a model.",
            code="config.export",
            action="Leave out config (--config), or export to hf.",
        )
    if to == "peft" and config is None:
        raise ConfigurationError(
            "an adapter needs its configuration.",
            code="config.export",
            action="Name a folder that has adapter_config.json: config (--config).",
        )
    if to != "peft" and adapter is not None:
        raise ConfigurationError(
            f"a folder of {to} is not that of an adapter.",
            code="config.export",
            action="Leave out adapter (--adapter), or export to peft.",
        )


def _rules(mapping: Sequence[Rule] | None, dtype: str | None) -> tuple[Rule, ...]:
    """The rules to apply. The cast to `dtype` comes first, so that casts of the mapping are exceptions from it."""
    rules = checked_rules(() if mapping is None else mapping)
    if dtype is None:
        return rules
    cast = Cast("**", dtype)
    if not is_floating(dtype):
        raise ValueError(f"dtype must be a floating dtype, such as 'bfloat16', not {dtype!r}")
    return (cast, *rules)


def _folder(
    choice: ChosenContent,
    to: str,
    state: StoredState,
    shard_nbytes: int,
    config: str | os.PathLike[str] | None,
    *,
    dtype: str | None,
    adapter: str | None,
) -> NewFolder:
    identity = state.record.identity
    if to == "megatron":
        from holdfast.exporting.megatron_folder import megatron_folder  # as below

        return megatron_folder(choice, state, shard_nbytes=shard_nbytes)
    if to == "deepspeed-universal":
        from holdfast.exporting.universal_folder import universal_folder  # as the next one, it imports torch

        return universal_folder(choice, state)
    if to == "dcp":
        from holdfast.exporting.dcp_folder import dcp_folder

        return dcp_folder(choice, identity=identity, shard_nbytes=shard_nbytes)
    source = None if config is None else Path(config)
    if to == "peft":
        assert source is not None
        return peft_folder(choice, identity=identity, config=source, adapter=adapter)
    return hugging_face_folder(choice, identity=identity, shard_nbytes=shard_nbytes, config=source, dtype=dtype)


def _report(
    state: StoredState,
    folder: NewFolder,
    storage: Store,
    written: WrittenFolder,
    to: str,
    num_values: int,
    *,
    seconds: float,
) -> ExportReport:
    report = ExportReport(
        step=state.record.step,
        place=str(state.record.place or ""),
        path=storage.location.url,
        to=to,
        num_tensors=folder.num_tensors,
        num_values=num_values,
        files=tuple(file.name for file in folder.files),
        kept=written.kept,
        written_nbytes=written.nbytes,
        read_nbytes=written.bytes_read,
        verified=state.has_digests,
        seconds=seconds,
    )
    LOG.info("exported %s, to %s", report.summary, report.path)
    return report
