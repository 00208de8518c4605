"""The writing of a planned folder: by this process or by workers, resumable, and never mixed with anything else.

Each file gets its name when it is whole and durable. A small record says which export is under way. It is created
first; when all files are there, it is deleted before the records of finished files are. So a folder that has only those
is whole. Each call leaves its mark, and removes those of earlier calls, whose tasks may still run: without its mark, a
task publishes nothing. Only the call itself deletes files. Files without which other systems do not recognise the
folder come after all others, so that a folder that is not whole shows it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.checkpoint.stored_state import StoredState
from holdfast.decoding import decode_json
from holdfast.errors import ConfigurationError, NotFoundError, StorageError
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.exporting.file_tasks import (
    RECORD_NAME,
    WINDOW_NBYTES,
    ExportCall,
    FilesRecord,
    FilesTask,
    WrittenFiles,
    file_groups,
    is_files_record,
    task_groups,
)
from holdfast.exporting.new_folder import NewFolder
from holdfast.interop.stored_source import StoredSource
from holdfast.io.buffers import window_pools
from holdfast.io.side_by_side import write_side_by_side
from holdfast.reports import size
from holdfast.run.paths import some
from holdfast.store.base import Store
from holdfast.store.only_writer import only_writer
from holdfast.workers import Workforce, run_tasks, unfinished


class _ExportRecord(msgspec.Struct, frozen=True):
    """The content of the record: the digest of the planned folder, and of the state that its tensors come from."""

    digest: str
    source: str


@dataclass(frozen=True)
class WrittenFolder:
    """The outcome: the files that earlier calls had written, and the bytes that this one wrote and read."""

    kept: tuple[str, ...]
    nbytes: int
    bytes_read: int


@dataclass(frozen=True)
class ExportedFiles:
    """The files of an earlier call: for each its recorded digest, or None; and the records. `is_whole` says that all
    files had been written."""

    digests: Mapping[str, str | None]
    records: tuple[str, ...]
    is_whole: bool


def finished_files(storage: Store, folder: NewFolder, state: StoredState) -> ExportedFiles:
    """The files of `folder` that an earlier, interrupted export has written into the place `storage`.

    Raises `ConfigurationError`, code ``config.destination``, where the place holds anything else.
    """
    found = list(_files_in(storage, folder))
    records = [name for name in found if name == RECORD_NAME or is_files_record(name)]
    where = storage.location.url
    if found and not records:
        raise ConfigurationError(
            f"{where} is not empty: it holds {some(found)}.",
            code="config.destination",
            action="Name a new or an empty folder.",
            path=where,
        )
    sizes = {file.name: file.nbytes for file in folder.files}
    sizes |= {name: len(data) for name, data in (*folder.first.items(), *folder.last.items())}
    files = [name for name in found if name not in records]
    wrong = [name for name in files if sizes.get(name) != storage.nbytes(name)]
    held = {name: _record_at(storage, name) for name in records}
    is_ours = all(_is_record_of(name, data, folder, state) for name, data in held.items())
    if wrong or not is_ours:
        raise _of_another_export(where, f", such as {wrong[0]}" if wrong else "")
    digests: dict[str, str | None] = dict.fromkeys(files)
    for name in records:
        if name != RECORD_NAME:
            known = decode_json(held[name], FilesRecord).files
            digests |= {file: digest for file, digest in known.items() if file in digests}
    return ExportedFiles(digests, tuple(records), bool(records) and RECORD_NAME not in records)


def check_no_export(above: Store) -> None:
    """Raise `ConfigurationError`, code ``config.destination``, where the place `above` a new folder is itself the
    folder of an export that has not ended: that one would end in an error, because it finds the new folder."""
    if any(name == RECORD_NAME or is_files_record(name) for name in above.list("")):
        raise _of_another_export(above.location.url)


def _of_another_export(where: str, example: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"{where} holds a part of another export{example}.",
        code="config.destination",
        action="Repeat that export as it was begun, or name another folder, or remove this one.",
        path=where,
    )


def _files_in(storage: Store, folder: NewFolder) -> Iterator[str]:
    """The names in the root of `storage` and in the folders that `folder` has there, but not these themselves."""
    folders = folder.folders
    for above in folders:
        for name in storage.list(above):
            path = f"{above}/{name}" if above else name
            if path not in folders:
                yield path


def _record_at(storage: Store, name: str) -> bytes:
    """The record `name`, which was there a moment ago."""
    try:
        return storage.read(name)
    except NotFoundError:
        where = storage.location.url
        raise ConfigurationError(
            f"another call writes an export to {where} now: it has removed its record {name}.",
            code="config.destination",
            action="Wait for that one, or name another folder.",
            path=where,
        ) from None


def _is_record_of(name: str, data: bytes, folder: NewFolder, state: StoredState) -> bool:
    try:
        if name == RECORD_NAME:
            return decode_json(data, _ExportRecord) == _record(folder, state)
        return decode_json(data, FilesRecord).digest == folder.digest
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _record(folder: NewFolder, state: StoredState) -> _ExportRecord:
    return _ExportRecord(folder.digest, state.fingerprint)


def write_folder(
    storage: Store,
    folder: NewFolder,
    state: StoredState,
    *,
    workforce: Workforce,
    advance: Callable[[int], None],
    read_back: bool = False,
    finish: Callable[[], None] | None = None,
) -> WrittenFolder:
    """Write `folder` into the place `storage`, with the tensors of `state`. Blocks until all of it is durable.

    Files that an interrupted call has finished stay, after they were read and compared with the recorded digests.
    Memory of each worker is bounded: a window for each thread of the writer, and the edge blocks. `advance` gets the
    bytes done since its last call, of such files too. `finish` is the last step, for what lies outside of the folder: a
    call that continues an interrupted one makes it again.

    Raises as `finished_files`, also where another call writes to the folder now (``config.destination``), and
    `StorageError`, code ``storage.full``, where the disk lacks the space: all before anything is written. Later errors
    leave a folder that the same call continues.
    """
    _check_order(storage, folder)
    found = finished_files(storage, folder, state)
    _check_space(storage, sum(file.nbytes for file in folder.files if file.name not in found.digests))
    place = storage.location.folder
    if place is not None and not place.exists():
        _make(storage, place, msgspec.json.encode(_record(folder, state)))
    with only_writer(place, "writes an export to"):
        return _write(storage, folder, state, workforce, advance, read_back=read_back, finish=finish)


def _make(storage: Store, place: Path, record: bytes) -> None:
    """Make the new folder `place`, durably, with the record in it.

    Another call may make it meanwhile, and delete the temporary file of this record as that of a dead call. Then the
    lock of the folder says which one goes on.
    """
    try:
        storage.create(RECORD_NAME, record)
    except StorageError:
        if not place.is_dir():
            raise


def _write(
    storage: Store,
    folder: NewFolder,
    state: StoredState,
    workforce: Workforce,
    advance: Callable[[int], None],
    *,
    read_back: bool,
    finish: Callable[[], None] | None,
) -> WrittenFolder:
    """As `write_folder`, where no other call of this machine writes to the folder."""
    found = finished_files(storage, folder, state)
    small_kept, small_nbytes = list[str](), 0
    call = ExportCall.new(folder.digest)
    found = _begin(storage, folder, state, found, call)
    for name, data in folder.first.items():
        small_nbytes += _create(storage, name, data, found, small_kept)
    tasks = _tasks(storage, folder, state, found, call, read_back)
    done = _run(tasks, storage, folder, state, workforce=workforce, advance=advance)
    state.check_unchanged()
    _check_whole(storage, folder, found, call)
    for name, data in folder.last.items():
        small_nbytes += _create(storage, name, data, found, small_kept)
    if finish is not None:
        finish()
    call.check(storage)
    storage.delete(RECORD_NAME)
    for name in storage.list(""):
        if is_files_record(name):
            storage.delete(name)
    kept = sorted((*small_kept, *(name for each in done for name in each.kept)))
    nbytes = small_nbytes + sum(each.nbytes for each in done)
    return WrittenFolder(tuple(kept), nbytes, sum(each.bytes_read for each in done))


def _begin(
    storage: Store, folder: NewFolder, state: StoredState, found: ExportedFiles, call: ExportCall
) -> ExportedFiles:
    """Make the folder that of `call`, from which on tasks of earlier calls do nothing. Returns the files that stay.

    These tasks lose their mark before their temporary files. So what they publish is found here, or never published.
    """
    storage.create(RECORD_NAME, msgspec.json.encode(_record(folder, state)))
    known = {name: digest for name, digest in found.digests.items() if digest is not None}
    if known:
        storage.create(call.earlier, msgspec.json.encode(FilesRecord(folder.digest, known)))
    storage.create(call.mark, call.data)
    for name in found.records:
        if name != RECORD_NAME:
            storage.delete(name)
    _remove_leftovers(storage, folder)
    now = finished_files(storage, folder, state)
    digests = dict(now.digests)
    for name in {file.name for file in folder.files} & digests.keys():
        if digests[name] is None and not (found.is_whole and name in found.digests):
            storage.delete(name)
            del digests[name]
    return ExportedFiles(digests, now.records, found.is_whole)


def _check_whole(storage: Store, folder: NewFolder, found: ExportedFiles, call: ExportCall) -> None:
    """Look whether the place holds the files with tensors, each with its size and a record of this call, and nothing
    else. Raises `StorageError`, code ``storage.worker``, and `ConfigurationError`, code ``config.destination``."""
    call.check(storage)
    names = list(_files_in(storage, folder))
    recorded = set[str]()
    for name in names:
        if is_files_record(name) and name.endswith(f"-{call.token}.json") and name not in (call.mark, call.earlier):
            recorded.update(decode_json(storage.read(name), FilesRecord).files)
    for file in folder.files:
        is_known = file.name in recorded or found.digests.get(file.name, "") is None
        if not is_known or storage.nbytes(file.name) != file.nbytes:
            raise unfinished(storage.location.url)
    ours = {*folder.names, RECORD_NAME}
    others = [name for name in names if name not in ours and not is_files_record(name) and "/." not in f"/{name}"]
    if others:
        raise ConfigurationError(
            f"{storage.location.url} got {some(others)} while the export wrote to it.",
            code="config.destination",
            action="Remove that, and repeat the call: it keeps the files that are finished.",
            path=storage.location.url,
        )


def _tasks(
    storage: Store, folder: NewFolder, state: StoredState, found: ExportedFiles, call: ExportCall, read_back: bool
) -> list[FilesTask]:
    """The work on the files with tensors."""
    source = StoredSource.of(state)
    return [
        FilesTask(
            source=source,
            folder=storage.location,
            call=call,
            digest=folder.digest,
            groups=groups,
            present={
                file.name: found.digests[file.name]
                for group in groups
                for file in group.files
                if file.name in found.digests
            },
            read_back=read_back,
        )
        for groups in task_groups(file_groups(folder.files))
    ]


def _run(
    tasks: Sequence[FilesTask],
    storage: Store,
    folder: NewFolder,
    state: StoredState,
    *,
    workforce: Workforce,
    advance: Callable[[int], None],
) -> list[WrittenFiles]:
    """Run all tasks. Files that they find damaged are deleted here, and their groups are written by new tasks."""
    done: list[WrittenFiles] = []

    def finished(files: WrittenFiles) -> None:
        done.append(files)
        if executor is not None:
            advance(files.data_nbytes)

    def run_here(tasks: Sequence[FilesTask]) -> None:
        blocks = EdgeBlocks(state.manifest.body.num_files)
        with window_pools(WINDOW_NBYTES) as pools:
            write_side_by_side(
                [part for task in tasks for part in task.by_group()],
                lambda task, tell: task.write(storage, state, blocks, pools, tell),
                finished=finished,
                advance=advance,
            )

    with workforce([task.nbytes for task in tasks]) as executor:
        while tasks:
            begun = len(done)
            try:
                if executor is None:
                    run_here(tasks)
                else:
                    run_tasks(tasks, executor, finished=finished)
            except Exception:
                if executor is not None and tasks[0].call.holds(storage):
                    _remove_leftovers(storage, folder)  # of workers that died
                raise
            damaged = {name for files in done[begun:] for name in files.damaged}
            for name in damaged:
                storage.delete(name)
            tasks = [again for task in tasks for again in task.without(damaged)]
    return done


def _remove_leftovers(storage: Store, folder: NewFolder) -> None:
    for above in folder.folders:
        for leftover in storage.leftovers(above):
            storage.delete(f"{above}/{leftover}" if above else leftover)


def _create(storage: Store, name: str, data: bytes, found: ExportedFiles, kept: list[str]) -> int:
    """Create a small file; one with the same bytes is `kept`. Returns the bytes written."""
    if name in found.digests:
        if storage.read(name) == data:
            kept.append(name)
            return 0
        storage.delete(name)
    storage.create(name, data)
    return len(data)


def _check_order(storage: Store, folder: NewFolder) -> None:
    """Refuse files that cannot be written from the first byte to the last, where the store needs that."""
    unordered = next((file.name for file in folder.files if file.trailers), None)
    if unordered is not None and storage.capabilities.in_order:
        raise ConfigurationError(
            f"{storage.path(unordered)} cannot be written: files of this format have checksums before the data, and an "
            "object store takes bytes in order.",
            code="config.destination",
            action="Export into a folder, and copy that to the object store.",
            path=storage.location.url,
        )


def _check_space(storage: Store, nbytes: int) -> None:
    """Refuse a folder that its disk has no room for. Other processes may fill the disk meanwhile."""
    folder = storage.location.folder
    if folder is None:
        return
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise StorageError(
            f"{folder} needs {size(nbytes)}, but its disk has only {size(free)} free.",
            code="storage.full",
            action="Free space, or name a folder on another disk.",
            path=str(folder),
        )
