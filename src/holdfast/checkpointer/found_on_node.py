"""The contents of one node that a restore may read: slots and copies in memory, parts of checkpoints on disks."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

import numpy as np

from holdfast.checkpoint.catalogue import EVERY_RANK, FileCopy
from holdfast.checkpoint.catalogue import Tier as NodeTier
from holdfast.checkpointer.choosing import Chosen, is_bad
from holdfast.checkpointer.inventories import Inventory, generation_of
from holdfast.errors import CorruptError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import Seal
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.persist import data_file
from holdfast.node_disk.disk_folder import DiskPart, parts_on_disks
from holdfast.node_memory.generations import give_up_generation, read_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import HeldRow, record_of
from holdfast.node_memory.slots import OWED, WHOLE, Slot, SlotState, copy_names, parity_names, slot_names
from holdfast.store.base import Location
from holdfast.store.memory import FilesInMemory, MemoryFile
from holdfast.store.urls import text_of

_LOOK_S: Final = 0.02

_log = logging.getLogger(__name__)


class FoundOnNode(NamedTuple):
    """The memory and the disks of a rank's node: the folder of the run in memory, its slots, and the parts of
    checkpoints on disks, by id."""

    folder: NodeFolder
    slots: list[Slot]
    parts: Mapping[str, DiskPart]
    inventory: Inventory


def drained_parts(folder: NodeFolder, run: Location) -> Mapping[str, DiskPart]:
    """The parts of checkpoints on the disks of this node. Makes sure that a keeper brings to the run what it lacks."""
    parts = parts_on_disks(folder)
    if not all(part.is_drained for part in parts.values()):
        ensure_keeper(folder, text_of(run))
    return parts


@contextmanager
def sealed_slots(folder: NodeFolder, run: Location, *, timeout_s: float) -> Iterator[list[Slot]]:
    """The slots of the node. Waits up to `timeout_s` until the keeper has sealed those that are staged."""
    with ExitStack() as stack:
        slots: list[Slot] = []
        for name in (*slot_names(folder), *copy_names(folder)):
            with suppress(FileNotFoundError, CorruptError):
                slots.append(stack.enter_context(Slot(folder, name)))
        if any(slot.state in (*OWED, SlotState.HELD) for slot in slots):
            ensure_keeper(folder, text_of(run))
        end = time.monotonic() + timeout_s
        while staged := [slot for slot in slots if slot.refresh().state == SlotState.STAGED]:
            ensure_keeper(folder, text_of(run))
            if time.monotonic() > end:
                for slot in staged:
                    _log.warning("restore skips '%s': its keeper did not seal it within %.0f s", slot.path, timeout_s)
                break
            time.sleep(_LOOK_S)
        yield slots


def held_rows(folder: NodeFolder) -> list[HeldRow]:
    """The complete rows of parity on the node, of checkpoints whose manifests it has."""
    rows = []
    for name in parity_names(folder):
        with suppress(FileNotFoundError, CorruptError), Slot(folder, name) as slot:
            contents = slot.record.contents
            if contents is not None and slot.state == SlotState.HELD:
                read_generation(folder, contents.checkpoint_id)
                rows.append(HeldRow(contents.checkpoint_id, record_of(slot)))
    return rows


def let_go(found: FoundOnNode, checkpoint_ids: Collection[str]) -> None:
    """Remove the slots of checkpoints of another history, and tell the keeper to free those that it owns, and to remove
    the parts on disks."""
    for checkpoint_id in found.parts.keys() & set(checkpoint_ids):
        give_up_generation(found.folder, checkpoint_id)
    for slot in found.slots:
        contents = slot.record.contents
        if contents is not None and contents.checkpoint_id in checkpoint_ids:
            if slot.state in OWED:
                give_up_generation(found.folder, contents.checkpoint_id)
            else:
                slot.remove()  # the other ranks of this node do the same


def copies_of(found: FoundOnNode, seal: Seal, chosen: Chosen) -> dict[str, tuple[FileCopy, ...]]:
    """The copies of the `chosen` checkpoint's files on the nodes, the nearest first, but for the bad ones. This rank
    can read those of its own node."""
    memory = FilesInMemory(str(found.folder.path))
    prefix = records.checkpoint_key(chosen.folder, "")
    part, node = found.parts.get(seal.checkpoint_id), found.inventory.node
    manifest = chosen.manifest or _manifest(found, seal)
    files = {fmt.NAME: (NodeTier.NODE_MEMORY, np.frombuffer(manifest, np.uint8))}
    for slot in sorted(found.slots, key=lambda slot: slot.is_copy):
        contents, tier = slot.record.contents, NodeTier.PEER_MEMORY if slot.is_copy else NodeTier.NODE_MEMORY
        if contents is not None and contents.checkpoint_id == seal.checkpoint_id and slot.record.state in WHOLE:
            for each in contents.files:
                name = seal.files[each.file].name
                if not is_bad(chosen.bad, seal.checkpoint_id, name, tier, node):
                    files.setdefault(name, (tier, data_file(slot, each)))
    for name, (_, data) in files.items():
        memory.add(prefix + name, MemoryFile(data, path=memory.path(prefix + name)))
    on_disk = set() if part is None else {seal.files[number].name for number in part.file_numbers()}
    holders = dict(enumerate(chosen.owners))
    names = {fmt.NAME: EVERY_RANK} | {
        each.name: holders.get(file, EVERY_RANK) for file, each in enumerate(seal.files) if file not in chosen.in_run
    }
    far = {seal.files[number].name: NodeTier.PEER_MEMORY for number in chosen.copied}
    near: dict[str, tuple[FileCopy, ...]] = {}
    for name, holder in names.items():
        # The tier is that of the copy that is read, by this rank or by the one that alone reads it for all.
        is_read_here = holder == EVERY_RANK and name in files
        tier = files[name][0] if is_read_here else far.get(name, NodeTier.NODE_MEMORY)
        in_memory = FileCopy(memory, prefix + name, tier, holder)
        copies = [in_memory] if name in files else []
        is_damaged = is_bad(chosen.bad, seal.checkpoint_id, name, NodeTier.NODE_DISK, node)
        if part is not None and name in on_disk and not is_damaged:
            copies.append(FileCopy(part.store, part.key(name), NodeTier.NODE_DISK, holder))
        near[name] = tuple(copies) or (in_memory,)  # else the rank of another node alone can read it
    return near


def _manifest(found: FoundOnNode, seal: Seal) -> bytes:
    """The manifest of a checkpoint that this node has a file of. Raises `CorruptError` if it is gone."""
    try:
        return generation_of(found.folder, found.parts, seal.checkpoint_id).manifest
    except FileNotFoundError as error:
        raise CorruptError(
            f"step {seal.step} left the memory of this node, because a job that trains has replaced it.",
            code="corrupt.generation",
            action="No action needed: holdfast skips it, and uses storage.",
            path=str(found.folder.path),
            tier="node memory",
        ) from error
