"""Memory of a node for what its keeper holds for other nodes: copies and parity."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.node_memory.inventory import give_way
from holdfast.node_memory.limits import rooms
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory
from holdfast.node_memory.slots import Slot, SlotKind, SlotRecord, SlotState

#: States of copies and rows of parity that are whole.
KEPT: Final = (SlotState.HELD, SlotState.SEALED, SlotState.COMMITTED)
#: Memory that copies and parity leave free for others.
_SPARE_NBYTES: Final = 256 << 20

_log = logging.getLogger(__name__)


def opened(folder: NodeFolder, names: Iterable[str]) -> Iterator[Slot]:
    """Open the slots of these `names`, as a keeper that was just started. Frees those that were being filled when the
    keeper before it died, and drops damaged ones."""
    for name in names:
        with suppress(FileNotFoundError):
            try:
                slot = Slot(folder, name)
            except CorruptError as error:
                _log.error("%s", error)
                folder.discard(name)
                continue
            slot.free_if_abandoned()
            if slot.state == SlotState.STAGED:  # nobody knows its digests
                slot.advance(SlotRecord(SlotState.FREE))
            yield slot


def reserved(folder: NodeFolder, kind: SlotKind, *, rank: int, nbytes: int) -> Slot:
    """A new slot with its memory, under this process's lock. Raises `ConfigurationError` where there is too little, and
    `StorageError` where it cannot be used, as one that has no room at all."""
    with unusable_memory(folder.path):
        slot = Slot.create(folder, rank=rank, nbytes=nbytes, kind=kind)
        assert slot.take()
        try:
            slot.reserve(before=partial(_require_room, folder))
        except BaseException:
            slot.remove()
            raise
    return slot


def free(slot: Slot) -> None:
    """Free a slot that nobody needs, unless it is being written to the run."""
    if slot.state in KEPT and slot.state != SlotState.SEALED and slot.take():
        slot.advance(SlotRecord(SlotState.FREE))


def _require_room(folder: NodeFolder, left_nbytes: int) -> None:
    tightest = rooms(folder.path)[0]
    missing_nbytes = left_nbytes + _SPARE_NBYTES - tightest.free_nbytes
    if missing_nbytes > 0 and give_way(folder.node_dir, missing_nbytes):
        tightest = rooms(folder.path)[0]
    if tightest.free_nbytes < left_nbytes + _SPARE_NBYTES:
        raise ConfigurationError(
            f"a node has no memory for copies or parity: they need {left_nbytes} more bytes, and {_SPARE_NBYTES} must "
            f"stay free, but {tightest.what} leaves {tightest.free_nbytes}.",
            code="config.memory",
            action="Raise that limit, keep fewer generations, or protect with fewer copies or larger groups.",
            path=str(folder.path),
        )
