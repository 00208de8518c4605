"""The import of a foreign checkpoint: all of it is read once, and written as the first checkpoint of a run.

The plan is a pure function of the state: its manifest says which tensors each data file has. The id of the checkpoint
is a digest of the plan and of what it reads. So a call that repeats an interrupted one finds its folder, and goes on.
Nothing here imports torch, so a machine without an accelerator can do it, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import xxhash

from holdfast import signing
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.dtypes import DTYPES
from holdfast.format.records import Commit, Place
from holdfast.format.values import Node
from holdfast.geometry import Box
from holdfast.importing.data_file_task import WINDOW_NBYTES, DamagedFile, DataFileTask, ImportedFile
from holdfast.interop.given_places import ForeignTensor, StateTables
from holdfast.interop.stored_source import StoredSource
from holdfast.io.buffers import window_pools
from holdfast.phases import LOG
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate, RankValues
from holdfast.run.complete import StoredManifest, read_manifest, seal_and_commit
from holdfast.run.history import Run
from holdfast.run.paths import some
from holdfast.store.base import Store
from holdfast.store.only_writer import only_writer
from holdfast.workers import Workforce, on_executor, run_tasks, unfinished

#: Most bytes of tensors in one data file, unless it is one tensor. Files are what workers share the work by, and what
#: an interrupted import goes on with.
FILE_NBYTES: Final = 1 << 30


@dataclass(frozen=True)
class ImportedState:
    """The outcome of an import: its commit, the data files that an earlier call had written, and the bytes written."""

    commit: Commit
    kept: tuple[str, ...]
    written_nbytes: int


def import_state(
    state: StoredState,
    storage: Store,
    step: int,
    *,
    workforce: Workforce | None = None,
    advance: Callable[[int], None] = lambda _: None,
    read_back: bool = False,
) -> ImportedState:
    """Write `state` into the run at the root of `storage`, as its first checkpoint, of `step`. Blocks until it is
    committed and durable.

    Reads and writes every byte once; each worker has 200 MiB of buffers. If it fails, no checkpoint
    becomes visible. The same call goes on: it keeps the data files that match their digests.

    Raises:
        ConfigurationError: code ``config.unloaded_history``: the run has checkpoints; or the folder is no run; or
            another call imports into it now (``config.destination``).
        CorruptError, IncompatibleError: a part of `state` is damaged, or is no value; nothing is written.
        StorageError: a store failed, or a worker died (``storage.worker``).
    """
    nodes = dict(state.nodes)  # reads all values, before anything is written
    state.find_places(range(len(state.manifest.body.names)))
    packed = pack_values(nodes)
    template = _template(state, nodes, packed)
    run = Run.create(storage)
    with only_writer(storage.location.folder, "imports into"):
        epoch, stored = _begin(run, template, _digest(state, step, packed), step)
        for leftover in storage.leftovers(f"{records.CHECKPOINTS}/{stored.folder}"):
            storage.delete(f"{records.CHECKPOINTS}/{stored.folder}/{leftover}")
        tasks = _tasks(StoredSource.of(state), storage, stored, packed, read_back)
        done = _run(tasks, storage, state, stored, workforce=workforce or on_executor(None), advance=advance)
        done.sort(key=lambda file: file.index)
        _check_whole(storage, stored, done)
        state.check_unchanged()
        run.check_fence(epoch)
        commit = seal_and_commit(run, stored, [file.seal for file in done])
        kept = tuple(file.seal.name for file in done if file.kept)
        return ImportedState(commit, kept, sum(file.seal.nbytes for file in done if not file.kept))


def _digest(state: StoredState, step: int, packed: bytes) -> str:
    """A digest of what an import reads, and of the step that it is given."""
    return xxhash.xxh3_128_hexdigest(packed) + f" {state.fingerprint} {step}"


def _begin(run: Run, template: ManifestTemplate, digest: str, step: int) -> tuple[int, StoredManifest]:
    """The epoch and the manifest of the import: those of an interrupted one, or new ones."""
    places, newest = run.places(), run.newest_epoch() or 0
    found = _stored(run, template, digest, step, newest)
    if places and (found is None or places != [found.manifest.place]):
        raise ConfigurationError(
            f"run '{run.storage.location}' has checkpoints, so nothing is imported into it.",
            code="config.unloaded_history",
            action="Name a new run.",
            path=run.storage.location.url,
        )
    if found is not None:
        return newest, found
    _warn_of_others(run)
    writers = template.table.world_size
    epoch = run.open_epoch(after=newest, opened_from=None, why="start", world_size=writers).epoch
    identity = CheckpointIdentity(
        checkpoint_id=_checkpoint_id(run, template, digest, epoch),
        run_id=run.run_id,
        place=Place(epoch, 1),
        step=step,
        created=records.now(),
        metrics={},
    )
    data = template.encode(identity)
    folder = records.folder_name(step, identity.checkpoint_id)
    stored = StoredManifest(folder, data, fmt.decode(data, path=folder))
    run.storage.create(stored.key(fmt.NAME), data)
    return epoch, stored


def _warn_of_others(run: Run) -> None:
    """Tell the log what interrupted imports of another step or source have left."""
    found = run.storage.list(records.CHECKPOINTS)
    others = [folder for folder in found if run.storage.list(f"{records.CHECKPOINTS}/{folder}")]
    if others:
        LOG.warning(
            "'%s' has the files of an interrupted import of another step or source, which this one does not use: %s. "
            "`holdfast doctor %s --remove` deletes them",
            run.storage.location,
            some(others),
            run.storage.location,
        )


def _stored(run: Run, template: ManifestTemplate, digest: str, step: int, epoch: int) -> StoredManifest | None:
    """The manifest that an interrupted import of the same state has written in `epoch`."""
    if not epoch:
        return None
    folder = records.folder_name(step, _checkpoint_id(run, template, digest, epoch))
    try:
        return read_manifest(run, folder)
    except NotFoundError:
        return None


def _checkpoint_id(run: Run, template: ManifestTemplate, digest: str, epoch: int) -> str:
    whole = xxhash.xxh3_64(f"{run.run_id} {epoch} {digest}".encode())
    whole.update(template.encode_table())
    return whole.hexdigest()


def _template(state: StoredState, nodes: Mapping[str, Node], packed: bytes) -> ManifestTemplate:
    """The manifest of a checkpoint that holds each tensor in one piece, and the values in its first file."""
    tables, manifest = StateTables(), state.manifest
    files = _files_of(state)
    num_files = max(files, default=0) + 1
    for number, name in enumerate(manifest.body.names):
        sizes = np.asarray([manifest.shape(number)], np.int64)
        owner = np.asarray([files[number]], np.int64)
        whole = ForeignTensor(name, manifest.dtype(number), manifest.shape(number), np.zeros_like(sizes), sizes, owner)
        tables.add(whole)
    block = RankValues(0, len(packed), tuple(sorted(nodes)))
    values = (fmt.ValueBlock(0, block.capacity, block.paths),)
    features = fmt.SMALL_LAST, *signing.features()
    aliases = manifest.body.aliases
    body, blobs = tables.finish(num_files=num_files, aliases=aliases, values=values, features=features)
    return ManifestTemplate(msgspec.structs.replace(body, world_size=num_files), blobs)


def _files_of(state: StoredState) -> list[int]:
    """For each tensor the data file that gets it: one after another as they lie in the files of `state`, so that each
    of these is read by few workers."""
    sizes = [_nbytes(state, number) for number in range(len(state.manifest.body.names))]
    order = _stored_order(state)
    files = [0] * len(sizes)
    begun, held = 0, 0
    for number in order:
        if held and held + sizes[number] > FILE_NBYTES:
            begun, held = begun + 1, 0
        files[number] = begun
        held += sizes[number]
    return files


def _nbytes(state: StoredState, number: int) -> int:
    return int(np.prod(state.manifest.shape(number), dtype=object)) * DTYPES[state.manifest.dtype(number)].itemsize


def _stored_order(state: StoredState) -> Sequence[int]:
    """The numbers of the tensors, in the order in which their first elements are stored; empty ones come last."""
    shapes = map(state.manifest.shape, range(len(state.manifest.body.names)))
    wants = [ReadRequest(n, Box((0,) * len(s), (1,) * len(s))) for n, s in enumerate(shapes) if all(s)]
    places: dict[int, tuple[int, int]] = {}
    for reads in plan_load(state.files, wants):
        for want, start in zip(reads.wants.tolist(), reads.starts.tolist(), strict=True):
            places[wants[want].tensor] = reads.file, start
    last = state.manifest.body.num_files, 0
    return sorted(range(len(state.manifest.body.names)), key=lambda number: (places.get(number, last), number))


def _tasks(
    source: StoredSource, storage: Store, stored: StoredManifest, packed: bytes, read_back: bool
) -> list[DataFileTask]:
    files, body = Files(stored.manifest), stored.manifest.body
    sizes = files.columns(np.arange(body.num_files)).data_nbytes.tolist()
    return [
        DataFileTask(
            source=source,
            run_location=storage.location,
            folder=stored.folder,
            manifest=stored.data,
            index=index,
            nbytes=nbytes,
            values=packed if any(block.file == index for block in body.values) else b"",
            read_back=read_back,
        )
        for index, nbytes in enumerate(sizes)
    ]


def _run(
    tasks: Sequence[DataFileTask],
    storage: Store,
    state: StoredState,
    stored: StoredManifest,
    *,
    workforce: Workforce,
    advance: Callable[[int], None],
) -> list[ImportedFile]:
    """Run all tasks. A file that one finds damaged is deleted here, and the task runs again."""
    done: list[ImportedFile] = []
    damaged: list[int] = []

    def finished(file: ImportedFile | DamagedFile) -> None:
        if isinstance(file, DamagedFile):
            damaged.append(file.index)
            return
        done.append(file)
        if executor is not None:
            advance(file.tensor_nbytes)

    def run_here(tasks: Sequence[DataFileTask]) -> None:
        with window_pools(WINDOW_NBYTES) as pools:
            for task in tasks:
                finished(task.write(storage, state, pools, advance))

    with workforce([task.nbytes for task in tasks]) as executor:
        try:
            while tasks:
                if executor is None:
                    run_here(tasks)
                else:
                    run_tasks(tasks, executor, finished=finished)
                for index in damaged:
                    storage.delete(stored.key(fmt.file_name(index)))
                tasks = [task for task in tasks if task.index in damaged]
                damaged.clear()
        except Exception:
            for leftover in storage.leftovers(f"{records.CHECKPOINTS}/{stored.folder}"):  # of workers that died
                storage.delete(f"{records.CHECKPOINTS}/{stored.folder}/{leftover}")
            raise
    return done


def _check_whole(storage: Store, stored: StoredManifest, done: Sequence[ImportedFile]) -> None:
    """Refuse to commit where a result is missing or came twice, or a file is not there any more."""
    there = [file.seal for file in done if storage.nbytes(stored.key(file.seal.name)) == file.seal.nbytes]
    if [file.index for file in done] != list(range(stored.manifest.body.num_files)) or len(there) != len(done):
        raise unfinished(storage.path(f"{records.CHECKPOINTS}/{stored.folder}"))
