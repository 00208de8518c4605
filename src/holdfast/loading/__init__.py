"""`load`: find the checkpoint, match names, read, put values in place. The mirror image of `save`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from holdfast.calls import CHECKPOINTER_RESTORE, LOAD, PLAIN, outer, refuse_nested
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.cooperative.reading import MEMORY_NBYTES
from holdfast.loading.load_options import LoadOptions
from holdfast.loading.one_load import Loading
from holdfast.mapping import Rule
from holdfast.phases import LOG
from holdfast.plan.exchange import Bandwidths
from holdfast.reports import LoadReport
from holdfast.run.paths import Selection, parse
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store


@outer(LOAD)
def load(
    path: str | os.PathLike[str] | Location,
    into: Mapping[str, object],
    *,
    select: str | Sequence[str] | None = None,
    mapping: Sequence[Rule] | None = None,
    cast: bool | str | Sequence[str] | None = None,
    strict: bool = True,
    allow_empty: bool = False,
    fallback: bool = False,
    continues: bool | None = None,
    verify: bool = True,
    device: str | torch.device | None = None,
    memory_budget: int = MEMORY_NBYTES,
    bandwidths: Bandwidths | None = None,
    group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Fill `into` from a checkpoint, whatever layout it was saved from, and return when everything is in place.

    Blocking and collective over `group` (default: the job); one plain process may call it too. `path` is a run (its
    head), ``RUN@step=700``, ``RUN@3.12``, or a checkpoint folder; or a checkpoint of another system, which is
    recognised by what it contains: a Hugging Face folder or one of its safetensors files, a folder of
    ``torch.distributed.checkpoint``, or a folder of DeepSpeed. Such bytes have no digests, so they cannot be verified
    (``report.verified``).
    Tensors are filled in place and keep their identity.
    Entries of dicts and lists are replaced in place, tuples are rebuilt (``report.state`` is the whole tree), and an
    empty dict takes all values of the stored one. Optimizer state is built from the checkpoint in its saved dtype, for
    an optimizer of the class that was saved; without ``strict`` also for one with the same slots and hyper-parameters
    (Adam and AdamW). With ``strict``, both sides must have every name. Without it, `load` loads the names that both
    sides have, and the report lists the others; it is an error if that loads nothing, or no tensor into a state with
    tensors, unless ``allow_empty=True``. ``verify=False`` skips the digests of tensor data.

    `select` are globs of live names: only the names that they match are loaded, and the rest of `into` does not change.
    ``*`` stands for any text without ``/``, ``**`` for any text, and a glob that matches a container matches all names
    in it: ``"model"``, ``"model/layers.0.*"``. A glob after ``!`` excludes the names that it matches. Optimizers,
    objects with a ``load_state_dict`` and lists of plain values are loaded as a whole, so select them by their own
    name.

    `mapping` has rules of `holdfast.mapping` that change stored tensors on their way, in order; everything else here
    concerns the names, shapes and dtypes after them. It copies nothing. Without rules, a checkpoint of another system
    that stores numbers in names as text, as DCP does, fills dicts with these numbers as keys.

    `cast` says which live tensors may have another dtype than the stored ones: all (``True``), or those that globs
    match. Elements are cast as they arrive, as ``tensor.to`` does: floating ones to floating, complex ones to complex
    and integers to wider integers; ``report.cast`` lists the tensors. State of torch optimizers keeps its stored dtype.

    Tensors on the meta device get their memory here, in place, once it is certain that all of it will be filled: on
    `device`, or by default on the device of the mesh (DTensors, and all other tensors of a state with DTensors), else
    where torch makes new tensors. With ``strict``, no selected tensor stays on the meta device: buffers that are not
    persistent, and tensors that are plain attributes of modules, are not part of a checkpoint, so make them before.
    ``report.on_meta`` lists the tensors that stay there.

    With ``fallback``, all ranks together skip a checkpoint that proves damaged or incomplete, and load the next older
    one on its lineage instead; each is logged as a warning, and ``report.skipped`` says why. Without it, the error says
    which older one to load. Where tensors may keep their contents (``strict=False``, or a rule that keeps elements),
    all data is read and checked before any of it goes into them, so it is read twice.

    A job continues a run from the checkpoint that it loaded if the load filled completely the same objects that it
    saves later, without `select`, `mapping` or cast. Then the next save opens an epoch that descends from that
    checkpoint, and a load of an older checkpoint is a rollback. Any other load only reads, for example that of a
    teacher from the same run. ``continues=True`` makes the next save into this run continue from here in any case, and
    ``continues=False`` prevents it. If only a part of the saved objects was loaded, the save is refused until you pass
    one of the two.

    Each byte is read once per node: bytes that several of its ranks need go through memory that they share, with at
    most `memory_budget` bytes per rank (6 MiB where a rank has no neighbours). If `bandwidths` of storage and network
    favour it (`Bandwidths.favour_exchange`), each byte is read once per job, and sent to the other nodes over TCP.

    Names, dtypes and shapes are compared before anything is changed. An error after that leaves `into` partly filled,
    on every rank: load again, from this or another checkpoint, before using it.

    Raises:
        NotFoundError: there is no such run or checkpoint; the error lists similar ones.
        IncompatibleError: names, dtypes or shapes differ; the error lists them. Or globs match nothing
            (``incompatible.select``, ``incompatible.cast``), rules do not fit (``incompatible.mapping``), or tensors
            would stay on the meta device (``incompatible.meta``).
        StateError: tensors of `into` share memory, or could not be saved; the error names them.
        ConfigurationError: `path` is a checkpoint's folder, outside any history, and ``continues=True``. Code
            ``config.nested``: this thread is inside a save of a `Checkpointer`.
        CorruptError: stored bytes are damaged; the error names the file and the tensors. With ``fallback``: no older
            checkpoint is left either.
        StorageError, DeadlineError: as in `save`.
    """
    refuse_nested(LOAD, allowed={*PLAIN, CHECKPOINTER_RESTORE})
    target = parse(path)
    options = LoadOptions(
        select,
        mapping,
        cast,
        strict,
        fallback,
        verify,
        allow_empty=allow_empty,
        continues=continues,
        device=device,
        memory=memory_budget,
        bandwidths=bandwidths,
    )
    return load_from_storage(target, into, options, group=group, timeout_s=timeout_s)


def load_from_storage(
    target: Selection, into: Mapping[str, object], options: LoadOptions, *, group: ProcessGroup | None, timeout_s: float
) -> LoadReport:
    """As `load`, with checked arguments, for a call that may be inside another one of the library."""
    deadline = Deadline(timeout_s)
    channel = default_channel("load", group, deadline=deadline)
    return load_over(channel, deadline, target, into, options, ranks=group_ranks(group))


def load_over(
    channel: Channel,
    deadline: Deadline,
    target: Selection,
    into: Mapping[str, object],
    options: LoadOptions,
    *,
    ranks: Sequence[int],
) -> LoadReport:
    """As `load_from_storage`, over a channel between the global `ranks`."""
    with TimedStore(open_store(target.location), timeout_s=deadline.for_storage_s) as storage:
        loading = Loading(channel, deadline, storage, ranks, options)
        try:
            report = loading.run(target, into)
        finally:
            loading.end_lease()
    channel.await_readers(deadline)
    if channel.rank == 0:
        no_digests = options.verify and not report.verified
        unverified = "; it has no digests, so its bytes were not verified" if no_digests else ""
        LOG.info("loaded %s, from %s%s", report.summary, report.path, unverified)
    return report
