"""The keeper's steps from staged slots to a committed checkpoint: seal, persist, commit.

Each step can be repeated after a death in the middle of it. Sealing reads only the staged bytes of a slot. A file
appears in storage whole or not at all. A commit has the same content whichever process writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.format import container
from holdfast.format import manifest as fmt
from holdfast.format.container import TABLE_OFFSET, FileLayout, Files
from holdfast.format.records import Commit, FileSeal
from holdfast.io.buffers import pipeline_pool
from holdfast.io.digest import digest_blocks, table_nbytes
from holdfast.io.sources import OpenFileSource
from holdfast.io.writer import write_file, write_memory
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_disk.disk_store import NODE_DISK
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotRecord, SlotState
from holdfast.run.complete import StoredManifest, check_file, committed_before_fence, finish, missing_files, sealed_file
from holdfast.run.history import Run
from holdfast.run.still_files import StoredFile
from holdfast.store.base import Bytes, FileReader, FileWriter
from holdfast.store.timed import TimedStore


class Sealing:
    """The sealing of one generation's slots, by its manifest, which is decoded once."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.stored = StoredManifest(
            generation.folder, generation.manifest, fmt.decode(generation.manifest, path=generation.folder)
        )
        self._files = Files(self.stored.manifest)
        self._layouts: dict[int, FileLayout] = {}

    def seal(self, slot: Slot) -> None:
        """Hash the staged bytes of `slot`, write the headers before them, and make the slot SEALED: from then on its
        contents are data files like any other. One of a save to memory alone becomes HELD. Raises `CorruptError` if
        the node has booted since the copy: then nobody knows whether all of it had reached the disk."""
        contents = slot.record.contents
        assert contents is not None
        if contents.is_of_earlier_boot:
            raise _lost(slot, contents, "was not hashed before this node went down", "No action needed.")
        kind, digests = self.stored.manifest.digests, []
        for part in contents.files:
            layout = self.layout(part.file)
            assert (part.data_start, part.nbytes) == (layout.data_start, layout.nbytes), "filled by another manifest"
            table = digest_blocks(slot.data[part.start + part.data_start : part.stop], kind)
            header = np.frombuffer(container.header(self.stored.manifest, layout, table), np.uint8)
            slot.data[part.start : part.start + part.data_start] = header
            digests.append(kind.hex(table))
        state = SlotState.HELD if contents.memory_only else SlotState.SEALED
        slot.advance(SlotRecord(state, contents, digests[0], second_digest="".join(digests[1:])))

    def layout(self, file: int) -> FileLayout:
        """The layout of data file number `file`."""
        known = self._layouts.get(file)
        return known or self._layouts.setdefault(file, self._files.layout(file))

    def file_seal(self, slot: Slot, part: SlotFile) -> FileSeal:
        """The entry of the checkpoint's seal for a data file in a sealed slot. Raises `CorruptError` if its header has
        changed since."""
        layout, contents = self.layout(part.file), slot.record.contents
        nbytes = 2 * table_nbytes(layout.data_nbytes, self.stored.manifest.digests)
        table = slot.data[part.start + TABLE_OFFSET :][:nbytes].tobytes()
        seal = sealed_file(self.stored.manifest, layout, container.parse_table(table))
        assert contents is not None
        if seal.digest != dict(zip(contents.files, slot.record.digests, strict=False))[part]:
            raise _changed(slot, contents)
        return seal

    def file_seals(self, slot: Slot) -> tuple[FileSeal, ...]:
        """As `file_seal`, for all data files in a sealed slot."""
        assert slot.record.contents is not None
        return tuple(self.file_seal(slot, part) for part in slot.record.contents.files)

    def promote(self, slot: Slot) -> None:
        """Make a HELD slot SEALED, unless a trainer has taken it. Its bytes may have lain in memory for hours, so this
        hashes them again. Raises `CorruptError` if they have changed: then it stays HELD."""
        contents = slot.record.contents
        assert contents is not None
        try:
            self.check(slot)
        except CorruptError:
            if slot.refresh().state == SlotState.HELD and slot.record.contents == contents:
                raise
        else:
            slot.promote(contents.checkpoint_id)

    def check(self, slot: Slot) -> None:
        """Hash the bytes of a hashed slot again. Raises `CorruptError` if they have changed."""
        contents = slot.record.contents
        assert contents is not None
        kind = self.stored.manifest.digests
        for part, digest in zip(contents.files, slot.record.digests, strict=False):
            table = digest_blocks(slot.data[part.start + part.data_start : part.stop], kind)
            if kind.hex(table) != digest:
                raise _changed(slot, contents)


def _changed(slot: Slot, contents: Contents) -> CorruptError:
    what = "has changed in the memory of this node since it was saved there"
    return _lost(slot, contents, what, "Check the memory of this machine.")


def _lost(slot: Slot, contents: Contents, what: str, action: str) -> CorruptError:
    return CorruptError(
        f"step {contents.step} {what}.",
        code="corrupt.slot",
        action=f"{action} Holdfast uses an older checkpoint.",
        path=str(slot.path),
        step=contents.step,
        tier="node memory",
    )


def data_file(slot: Slot, part: SlotFile) -> Bytes:
    """The bytes of a data file in a sealed slot."""
    return slot.data[part.start : part.stop]


def publish_manifest(storage: TimedStore, sealing: Sealing) -> None:
    """Create the manifest in storage, before any data file. Raises `StorageError` when the store fails."""
    storage.create(sealing.stored.key(fmt.NAME), sealing.stored.data)


def persist(
    storage: TimedStore,
    sealing: Sealing,
    slot: Slot,
    *,
    await_seal: Callable[[], None] = lambda: None,
    refers: bool = True,
) -> tuple[FileSeal, ...]:
    """Write the data files in a slot to storage; they are durable on return. A still file that equals its candidate
    gets a mark instead, unless `refers` is false. Returns the entries of the checkpoint's seal for the files that this
    call stored: those that storage has already are left alone.

    The slot need not be sealed yet: this writes its data while another thread hashes it, and the header after
    `await_seal` has returned; where the store writes in order, all of it after that. Raises `StorageError` when the
    store fails.
    """
    contents = slot.record.contents
    assert contents is not None
    store = partial(_store_file, storage, sealing, slot, await_seal=await_seal, refers=refers)
    parts = [part for part in contents.files if store(part)]
    return tuple(sealing.file_seal(slot, part) for part in parts)


def _store_file(
    storage: TimedStore, sealing: Sealing, slot: Slot, part: SlotFile, *, await_seal: Callable[[], None], refers: bool
) -> bool:
    """Store one data file. Returns whether this call stored it."""
    stored = sealing.stored
    target = StoredFile(storage, stored.manifest, stored.folder, sealing.layout(part.file))
    if storage.nbytes(target.key) is not None:
        return False
    if refers and target.candidate is not None:
        if _is_trusted_mark(target, sealing):
            return False
        await_seal()
        if target.marked(sealing.file_seal(slot, part)):
            return True

    def write() -> None:
        write_memory(
            storage.limit.direct_writer(storage, target.key, nbytes=part.nbytes),
            slot.data[part.start :],
            nbytes=part.nbytes,
            head_nbytes=part.data_start,
            await_head=await_seal,
        )

    return _create(storage, target.path, write)


def copy_from_disk(storage: TimedStore, sealing: Sealing, part: DiskPart, number: int) -> FileSeal | None:
    """Copy data file `number` from the disk of the node to storage; it is durable on return. A still file that equals
    its candidate gets a mark instead. Returns its entry in the checkpoint's seal; None where storage has the file
    already, and nothing is done.

    The bytes may have lain on the disk for days, so the whole file is verified before it appears in storage. Raises
    `CorruptError`, tier ``node disk``, where it is not what was sealed, and `StorageError` when a store fails.
    """
    stored, layout = sealing.stored, sealing.layout(number)
    target = StoredFile(storage, stored.manifest, stored.folder, layout)
    if storage.nbytes(target.key) is not None or _is_trusted_mark(target, sealing):
        return None
    seal = seal_on_disk(sealing, part, number)
    if target.candidate is not None and target.marked(seal):
        return seal

    def write() -> None:
        reader = storage.limit.direct_reader(part.store, part.key(seal.name))
        try:
            _copy(reader, storage.limit.direct_writer(storage, target.key, nbytes=seal.nbytes), sealing, layout, check)
        finally:
            reader.close()

    def check(table: bytes) -> None:
        if stored.manifest.digests.hex(table) != seal.digest:
            raise _changed_on_disk(part, number)

    return seal if _create(storage, target.path, write) else None


def _copy(
    reader: FileReader, writer: FileWriter, sealing: Sealing, layout: FileLayout, check: Callable[[bytes], None]
) -> None:
    """Copy a data file, and publish it if `check` accepts the digest table of its data."""
    head = np.empty(layout.data_start, np.uint8)
    try:
        reader.read_at(0, head)
    except BaseException:
        writer.abort()
        raise
    data = OpenFileSource(reader, layout.data_start)
    with pipeline_pool() as pool:
        write_file(
            writer,
            [data],
            data_start=layout.data_start,
            header=head.tobytes(),
            pool=pool,
            check=check,
            kind=sealing.stored.manifest.digests,
        )


def seal_on_disk(sealing: Sealing, part: DiskPart, number: int) -> FileSeal:
    """The entry of the checkpoint's seal for data file `number` on the disk of the node, by its header. Raises
    `CorruptError`, tier ``node disk``, where it is not there or is not the file that the manifest describes."""
    try:
        return check_file(part.store, sealing.stored, sealing.layout(number))
    except (CorruptError, NotFoundError) as error:
        raise _changed_on_disk(part, number) from error


def _is_trusted_mark(target: StoredFile, sealing: Sealing) -> bool:
    """Whether storage has the mark of a still file. Somebody without the key may have made the mark of a signed
    checkpoint: only the bytes on this node tell."""
    return target.candidate is not None and target.is_marked and not sealing.stored.is_signed


def _create(storage: TimedStore, path: str, write: Callable[[], None]) -> bool:
    """Let `write` create the file at `path` in storage. Returns whether it did: another keeper that has the same file
    may have been there first."""
    try:
        storage.limit.run("write", path, lambda: storage.limit.repeated(write))
    except StorageError as error:
        if error.code != "storage.exists":
            raise
        return False
    return True


def _changed_on_disk(part: DiskPart, number: int) -> CorruptError:
    path = part.path(number)
    return CorruptError(
        f"{path} has changed on the disk of this node since it was written there.",
        code="corrupt.file",
        action="Check that disk. Holdfast uses another copy, or an older checkpoint.",
        path=path,
        step=part.generation.step,
        tier=NODE_DISK,
    )


def commit(run: Run, sealing: Sealing, written: Iterable[FileSeal]) -> Commit | None:
    """Commit the checkpoint, and return its commit, if all its data files are in storage, whichever nodes wrote them;
    else return None. Files that this process has `written` are not read again.

    Raises:
        FencedError: another job opened a newer epoch of the run before anybody committed the checkpoint, or it was
            given up.
        CorruptError: a file does not fit the manifest.
    """
    if (done := committed_before_fence(run, sealing.stored)) is not None:
        return done
    if missing_files(run.storage, sealing.stored):
        return None
    known = {seal.name: seal for seal in written}
    names = sealing.stored.manifest.file_names
    by_number = {number: known[name] for number, name in enumerate(names) if name in known}
    return finish(run, sealing.stored, deep=False, known=by_number)
