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
from holdfast.format.container import FileLayout, Files
from holdfast.format.records import Commit, FileSeal
from holdfast.io.buffers import pipeline_pool
from holdfast.io.digest import digest_blocks
from holdfast.io.sources import OpenFileSource
from holdfast.io.writer import write_file, write_memory
from holdfast.node_disk.disk_folder import NODE_DISK, DiskPart
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState
from holdfast.run.complete import StoredManifest, check_file, finish, missing_files
from holdfast.run.history import Run
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

    def layout(self, number: int) -> FileLayout:
        """The layout of data file `number`."""
        return self._files.layout(number)

    def seal(self, slot: Slot) -> None:
        """Hash the staged bytes of `slot`, write the header before them, and make the slot SEALED: from then on its
        contents are a data file like any other. One of a save to memory alone becomes HELD. Raises `CorruptError` if
        the node has booted since the copy: then nobody knows whether all of it had reached the disk."""
        contents = slot.record.contents
        assert contents is not None
        if contents.is_of_earlier_boot:
            raise _lost(slot, contents, "was not hashed before this node went down", "No action needed.")
        layout = self._files.layout(contents.file)
        start, stop = layout.data_start, layout.data_start + layout.data_nbytes
        assert (contents.data_start, contents.nbytes) == (start, stop), "the slot was filled by another manifest"
        table = digest_blocks(slot.data[start:stop])
        slot.data[:start] = np.frombuffer(container.header(self.stored.manifest, layout, table), np.uint8)
        state = SlotState.HELD if contents.memory_only else SlotState.SEALED
        slot.advance(SlotRecord(state, contents, xxhash.xxh3_128_hexdigest(table)))

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
        contents, digest = slot.record.contents, slot.record.digest
        assert contents is not None
        table = digest_blocks(slot.data[contents.data_start : contents.nbytes])
        if xxhash.xxh3_128_hexdigest(table) != digest:
            what = "has changed in the memory of this node since it was saved there"
            raise _lost(slot, contents, what, "Check the memory of this machine.")


def _lost(slot: Slot, contents: Contents, what: str, action: str) -> CorruptError:
    return CorruptError(
        f"step {contents.step} {what}.",
        code="corrupt.slot",
        action=f"{action} Holdfast uses an older checkpoint.",
        path=str(slot.path),
        step=contents.step,
        tier="node memory",
    )


def data_file(slot: Slot) -> Bytes:
    """The bytes of the data file in a sealed slot."""
    assert slot.record.contents is not None
    return slot.data[: slot.record.contents.nbytes]


def publish_manifest(storage: TimedStore, sealing: Sealing) -> None:
    """Create the manifest in storage, before any data file. Raises `StorageError` when the store fails."""
    storage.create(sealing.stored.key(fmt.NAME), sealing.stored.data)


def persist(
    storage: TimedStore, sealing: Sealing, slot: Slot, *, await_seal: Callable[[], None] = lambda: None
) -> bool:
    """Write the data file in a slot to storage; it is durable on return. Returns whether this call wrote it: where
    storage has the file already, nothing is done.

    The slot need not be sealed yet: this writes its data while another thread hashes it, and the header after
    `await_seal` has returned; where the store writes in order, all of it after that. Raises `StorageError` when the
    store fails.
    """
    contents = slot.record.contents
    assert contents is not None

    def write(key: str) -> None:
        write_memory(
            storage.limit.direct_writer(storage, key, nbytes=contents.nbytes),
            slot.data,
            nbytes=contents.nbytes,
            head_nbytes=contents.data_start,
            await_head=await_seal,
        )

    return _create(storage, sealing, fmt.file_name(contents.file), write)


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

    return found[0] if _create(storage, sealing, fmt.file_name(number), write) else None


def _create(storage: TimedStore, sealing: Sealing, name: str, write: Callable[[str], None]) -> bool:
    """Let `write` create file `name` of the checkpoint in storage, unless it is there. Returns whether it did."""
    key = sealing.stored.key(name)
    if storage.nbytes(key) is not None:
        return False
    try:
        storage.limit.run("write", storage.path(key), lambda: write(key))
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


def file_seal(slot: Slot) -> FileSeal:
    """The entry of the checkpoint's seal for the data file in a sealed slot."""
    contents = slot.record.contents
    assert contents is not None
    return FileSeal(fmt.file_name(contents.file), contents.nbytes, slot.record.digest)


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
    numbers = range(sealing.stored.manifest.body.num_files)
    by_number = {number: known[name] for number in numbers if (name := fmt.file_name(number)) in known}
    return finish(run, sealing.stored, deep=False, known=by_number)
