"""The keeper's steps from staged slots to a committed checkpoint: seal, persist, commit.

Each step can be repeated after a death in the middle of it. Sealing reads only the staged bytes of a slot. A file
appears in storage whole or not at all. A commit has the same content whichever process writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from holdfast.errors import CorruptError, StorageError
from holdfast.format import container
from holdfast.format import manifest as fmt
from holdfast.format.container import TABLE_OFFSET, FileLayout, Files
from holdfast.format.records import Commit, FileSeal
from holdfast.io.buffers import pipeline_pool
from holdfast.io.digest import digest_blocks, table_nbytes
from holdfast.io.sources import OpenFileSource
from holdfast.io.writer import write_file, write_memory
from holdfast.node_disk.disk_folder import NODE_DISK, DiskPart
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotRecord, SlotState
from holdfast.run.complete import StoredManifest, check_file, finish, missing_files, sealed_file
from holdfast.run.history import Run
from holdfast.run.still_files import StoredFile
from holdfast.store.base import Bytes
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

    def layout(self, number: int) -> FileLayout:
        """The layout of data file `number`."""
        return self._files.layout(number)

    def seal(self, slot: Slot) -> None:
        """Hash the staged bytes of `slot`, write the headers before them, and make the slot SEALED: from then on its
        contents are data files like any other. One of a save to memory alone becomes HELD. Raises `CorruptError` if
        the node has booted since the copy: then nobody knows whether all of it had reached the disk."""
        contents = slot.record.contents
        assert contents is not None
        if contents.is_of_earlier_boot:
            raise _lost(slot, contents, "was not hashed before this node went down", "No action needed.")
        digests = []
        for part in contents.files:
            layout = self.layout(part.file)
            assert (part.data_start, part.nbytes) == (layout.data_start, layout.nbytes), "filled by another manifest"
            table = digest_blocks(slot.data[part.start + part.data_start : part.stop])
            header = np.frombuffer(container.header(self.stored.manifest, layout, table), np.uint8)
            slot.data[part.start : part.start + part.data_start] = header
            digests.append(xxhash.xxh3_128_hexdigest(table))
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
        table = slot.data[part.start + TABLE_OFFSET :][: 2 * table_nbytes(layout.data_nbytes)].tobytes()
        seal = sealed_file(self.stored.manifest, layout, container.parse_table(table))
        assert contents is not None
        if seal.digest != dict(zip(contents.files, slot.record.digests, strict=False))[part]:
            raise _changed(slot, contents)
        return seal

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
        for part, digest in zip(contents.files, slot.record.digests, strict=False):
            table = digest_blocks(slot.data[part.start + part.data_start : part.stop])
            if xxhash.xxh3_128_hexdigest(table) != digest:
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
    storage: TimedStore, sealing: Sealing, slot: Slot, *, await_seal: Callable[[], None] = lambda: None
) -> tuple[FileSeal, ...]:
    """Write the data files in a slot to storage; they are durable on return. A still file that equals its candidate
    gets a mark instead. Returns the entries of the checkpoint's seal for the files that this call stored: those that
    storage has already are left alone.

    The slot need not be sealed yet: this writes its data while another thread hashes it, and the header after
    `await_seal` has returned; where the store writes in order, all of it after that. Raises `StorageError` when the
    store fails.
    """
    contents = slot.record.contents
    assert contents is not None
    parts = [part for part in contents.files if _store_file(storage, sealing, slot, part, await_seal)]
    return tuple(sealing.file_seal(slot, part) for part in parts)


def _store_file(
    storage: TimedStore, sealing: Sealing, slot: Slot, part: SlotFile, await_seal: Callable[[], None]
) -> bool:
    """Store one data file. Returns whether this call stored it."""
    stored = sealing.stored
    target = StoredFile(storage, stored.manifest, stored.folder, sealing.layout(part.file))
    key = target.key
    if storage.nbytes(key) is not None:
        return False
    if target.candidate is not None:
        if target.is_marked:
            return False
        await_seal()
        if target.marked(sealing.file_seal(slot, part)):
            return True

    def write(key: str) -> None:
        write_memory(
            storage.limit.direct_writer(storage, key, nbytes=part.nbytes),
            slot.data[part.start :],
            nbytes=part.nbytes,
            head_nbytes=part.data_start,
            await_head=await_seal,
        )

    return _create(storage, key, write)


def copy_from_disk(storage: TimedStore, sealing: Sealing, part: DiskPart, number: int) -> FileSeal | None:
    """Copy data file `number` from the disk of the node to storage; it is durable on return. Returns its entry in the
    checkpoint's seal; None where storage has the file already, and nothing is done.

    The bytes may have lain on the disk for days, so the whole file is verified before it appears in storage. Raises
    `CorruptError` where it is not what was sealed, and `StorageError` when a store fails.
    """
    layout = sealing.layout(number)
    found: list[FileSeal] = []

    def write(key: str) -> None:
        seal = check_file(part.store, sealing.stored, layout)
        reader = storage.limit.direct_reader(part.store, part.key(seal.name))
        try:
            head = np.empty(layout.data_start, np.uint8)
            reader.read_at(0, head)

            def verified(table: bytes) -> bytes:
                if xxhash.xxh3_128_hexdigest(table) != seal.digest:
                    raise _damaged(part, seal.name)
                return head.tobytes()

            with pipeline_pool() as pool:
                write_file(
                    storage.limit.direct_writer(storage, key, nbytes=seal.nbytes),
                    [OpenFileSource(reader, layout.data_start)],
                    data_start=layout.data_start,
                    header=verified,
                    pool=pool,
                )
        finally:
            reader.close()
        found.append(seal)

    return found[0] if _create(storage, sealing.stored.key(sealing.stored.manifest.file_names[number]), write) else None


def _create(storage: TimedStore, key: str, write: Callable[[str], None]) -> bool:
    """Let `write` create the file at `key` in storage, unless it is there. Returns whether it did."""
    if storage.nbytes(key) is not None:
        return False
    try:
        storage.limit.run("write", storage.path(key), lambda: storage.limit.repeated(lambda: write(key)))
    except StorageError as error:
        if error.code != "storage.exists":  # another keeper of the same file was there first
            raise
        return False
    return True


def _damaged(part: DiskPart, name: str) -> CorruptError:
    path = part.store.path(part.key(name))
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
        FencedError: another job opened a newer epoch of the run, or the checkpoint was given up.
        CorruptError: a file does not fit the manifest.
    """
    run.check_fence(sealing.generation.place.epoch)
    if missing_files(run.storage, sealing.stored):
        return None
    known = {seal.name: seal for seal in written}
    names = sealing.stored.manifest.file_names
    by_number = {number: known[name] for number, name in enumerate(names) if name in known}
    return finish(run, sealing.stored, deep=False, known=by_number)
