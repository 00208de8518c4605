"""The sealed slots of a keeper's own node, as its peers read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from holdfast.keeper.slot_readers import SlotReaders
from holdfast.node_memory.slots import WHOLE, Slot, SlotFile
from holdfast.peers.peer_errors import not_held
from holdfast.peers.peer_messages import GetRange
from holdfast.peers.transport import Region
from holdfast.store.base import Bytes


class _OwnFile(NamedTuple):
    slot: Slot
    part: SlotFile


class OwnSlots:
    """The whole slots of this node. The one thread of the keeper calls `show`, threads of the listener all else.

    A trainer may fill a slot again while a peer reads it. The peer finds that by the digests.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], _OwnFile] = {}
        self._readers = SlotReaders()

    def show(self, slots: Iterable[Slot]) -> None:
        """Let peers read these slots, and no others."""
        files: dict[tuple[str, int], _OwnFile] = {}
        for slot in slots:
            contents = slot.record.contents
            if contents is not None and slot.state in WHOLE:
                files.update({(contents.checkpoint_id, each.file): _OwnFile(slot, each) for each in contents.files})
        self._files = files

    @property
    def being_read(self) -> set[str]:
        """The names of the slots that a peer is reading."""
        return self._readers.names

    def all(self) -> list[Slot]:
        """All of them."""
        return list({each.slot.name: each.slot for each in self._files.values()}.values())

    def reading(self, slot: Slot) -> AbstractContextManager[None]:
        """The keeper does not free the slot inside the ``with`` block."""
        return self._readers.reading(slot.name)

    def of(self, checkpoint_id: str) -> list[Slot]:
        """The slots with a part of a checkpoint."""
        return list(
            {each.slot.name: each.slot for (id_, _), each in self._files.items() if id_ == checkpoint_id}.values()
        )

    @contextmanager
    def region(self, get: GetRange) -> Iterator[Region]:
        """The range of a file that a peer asks for. Raises `StorageError` where this node does not have it."""
        slot, start = self._found(get.checkpoint_id, get.file, get.start, get.nbytes)
        with self.reading(slot):
            fd, offset = slot.region
            fd = os.dup(fd)  # the keeper may close the slot meanwhile
            try:
                yield Region(fd, offset + start, get.nbytes)
            finally:
                os.close(fd)

    def view(self, checkpoint_id: str, file: int, start: int, nbytes: int) -> Bytes:
        """The memory of a range of a file. Raises `StorageError` where this node does not have it."""
        slot, begin = self._found(checkpoint_id, file, start, nbytes)
        data = slot.data[begin : begin + nbytes]
        if data.size != nbytes:
            raise not_held(f"file {file} of checkpoint {checkpoint_id}")
        return data

    def _found(self, checkpoint_id: str, file: int, start: int, nbytes: int) -> tuple[Slot, int]:
        """The slot with a range of a file, and the start of the range in its region."""
        found = self._files.get((checkpoint_id, file))
        contents = None if found is None else found.slot.refresh().contents
        is_here = contents is not None and contents.checkpoint_id == checkpoint_id
        if found is None or not is_here or found.slot.state not in WHOLE:
            raise not_held(f"file {file} of checkpoint {checkpoint_id}")
        if start < 0 or nbytes < 0 or start + nbytes > found.part.nbytes:
            raise not_held(f"{nbytes} bytes from {start} on of file {file}")
        return found.slot, found.part.start + start


def file_numbers(slot: Slot) -> set[int]:
    """The numbers of the data files in a slot, as it was last read."""
    return set() if slot.record.contents is None else {part.file for part in slot.record.contents.files}
