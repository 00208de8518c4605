"""The rows of parity that a keeper holds for the other nodes of its group.

Each node of the group offers its sealed slots of a checkpoint: their files and digests. When all have, the keeper knows
the stripes, takes memory for its rows, and reads the segments that they are the sum of from the nodes that have these.
It compares each header and each block with the offered digests before it adds it. So a row is HELD only if it is the
parity of what was sealed, and nothing has to be written down before that: a row that is not complete when its keeper
dies, or when bytes of it turn out to be wrong, begins anew.

Threads of the listener call `offer`, `view` and `check`; the one thread of the keeper calls all other methods, and a
thread of this object makes the rows. The lock covers the table of rows, never a transfer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

import msgspec
import numpy as np

from holdfast.errors import CorruptError, HoldfastError, StorageError
from holdfast.format import container
from holdfast.format.container import BLOCK_NBYTES, TABLE_OFFSET
from holdfast.format.records import Place
from holdfast.io.digest import bad_blocks, digest_blocks, table_nbytes
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.peer_memory import KEPT, free, opened, reserved
from holdfast.keeper.peer_ways import ANSWER_S, Way, require
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.node_folder import NodeFolder, boot_id
from holdfast.node_memory.parity_records import (
    GroupNode,
    HeldRow,
    ParityGroup,
    ParityRecord,
    SlotDigests,
    finish_row,
    needed_nbytes,
    parity_in,
    record_of,
)
from holdfast.node_memory.peering import PeerTable
from holdfast.node_memory.slots import Contents, Slot, SlotKind, SlotRecord, SlotState, parity_names
from holdfast.peers.peer_errors import not_held
from holdfast.peers.peer_messages import CopyKept, Declined, GetRange, OfferParity, ParityWanted, PeerReply, Sent
from holdfast.peers.transport import PeerConnection, PeerTransport
from holdfast.protection.erasure import STRIP_NBYTES, add_multiple
from holdfast.protection.stripes import FileRange, Striping
from holdfast.store.base import Bytes
from holdfast.store.retry_budget import RetryBudget

#: Bytes of a segment that one request asks for: whole blocks, which are verified before they are added.
PIECE_NBYTES: Final = 8 << 20
#: Limit for a piece to arrive: eight peers may take turns at the least pace (`piece_pacer`).
_PIECE_S: Final = 300.0
#: Number of rows with the same number that the memory has: a newer one is made while the last protected one must stay.
_NUM_ROWS: Final = 2
_RETRIES: Final = RetryBudget(total_s=math.inf, first_s=0.5, longest_s=15.0)

_log = logging.getLogger(__name__)


class ParityPeers(NamedTuple):
    """The peers of one job, as this keeper reaches them."""

    table: PeerTable
    transport: PeerTransport
    secret: bytes

    def way(self, number: int) -> Way:
        """The way to node `number` of the table."""
        return Way(self.transport, self.table.nodes[number].address, self.secret)

    def files(self, sealing: Sealing, number: int) -> set[int]:
        """The numbers of the data files of a checkpoint that node `number` has."""
        assert self.table.parity is not None
        ranks = self.table.parity.ranks[number]
        return set(np.flatnonzero(np.isin(sealing.stored.manifest.writers, ranks)).tolist())


@dataclass
class _Gathering:
    """The offers for the rows of one checkpoint, by number of the node. `made` is the making of the rows."""

    offers: dict[int, tuple[SlotDigests, ...]] = field(default_factory=dict)
    made: Future[None] | None = None
    is_dropped: bool = False
    retry_at: float = 0.0
    num_failures: int = 0
    trouble: str = ""

    @property
    def is_at_work(self) -> bool:
        """Whether the rows are being made."""
        return self.made is not None and not self.made.done()

    def fail(self, trouble: str) -> None:
        """Note that the rows could not be made."""
        self.retry_at = time.monotonic() + (_RETRIES.pause_s(self.num_failures) or 0.0)
        self.num_failures += 1
        self.trouble = trouble


class _KeptRow(NamedTuple):
    """A row that is complete."""

    slot: Slot
    record: ParityRecord


class ParityRows:
    """The rows of parity in `folder`, and the `generations` of their checkpoints."""

    def __init__(self, folder: NodeFolder, generations: PeerGenerations) -> None:
        self._folder = folder
        self._generations = generations
        self._lock = Lock()
        self._peers: ParityPeers | None = None
        self._rows = {slot.name: slot for slot in opened(folder, parity_names(folder))}
        #: The names of the rows that are being made.
        self._filling: set[str] = set()
        self._gatherings: dict[str, _Gathering] = {}
        #: The record of each row that was read, by name and checkpoint.
        self._records: dict[tuple[str, str], ParityRecord] = {}
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="holdfast-parity")

    def join(self, peers: ParityPeers | None) -> None:
        """Make rows for these peers from now on (None: make none)."""
        with self._lock:
            for gathering in self._gatherings.values():
                gathering.is_dropped = True
            self._gatherings.clear()
            self._peers = peers

    def offer(self, offer: OfferParity) -> PeerReply:
        """Answer an offer: the rows are complete, are being made, or cannot be. Raises `ValueError` for one that no
        peer makes."""
        id_, peers = offer.checkpoint_id, self._peers
        if peers is None or offer.sender not in peers.table.group:
            return Declined("this node does not share parity with the sender, or does not know of it yet")
        with self._lock:
            gathering = self._gatherings.setdefault(id_, _Gathering())
        self._generations.expect(id_)
        sealing = self._generations.sealing(id_)
        if sealing is None:
            return ParityWanted(needs_generation=True)
        _check(offer, sealing, peers)
        with self._lock:
            if self._has_rows_of(offer, peers):
                return CopyKept()
            gathering.offers[offer.sender] = offer.slots
            self._drop_older(sealing.generation.place)
            self._start(gathering, sealing, peers)
            if gathering.trouble and not gathering.is_at_work:
                return Declined(gathering.trouble)
        return ParityWanted(needs_generation=False)

    @property
    def ids(self) -> set[str]:
        """The ids of the checkpoints that there is parity of, and of those that nodes have offered."""
        with self._lock:
            contents = [slot.record.contents for slot in self._rows.values()]
            return {*self._gatherings, *(each.checkpoint_id for each in contents if each is not None)}

    @property
    def trouble(self) -> str:
        """The reason why rows cannot be made; "" where there is none."""
        with self._lock:
            return next((each.trouble for each in self._gatherings.values() if each.trouble), "")

    def view(self, checkpoint_id: str, stripe: int, row: int) -> Bytes:
        """The parity of a complete row. Raises `StorageError` where this node does not have it."""
        for kept in self._kept(checkpoint_id):
            if (kept.record.stripe, kept.record.row) == (stripe, row):
                return parity_in(kept.slot)
        raise not_held(f"row {row} of stripe {stripe} of checkpoint {checkpoint_id}")

    def all(self) -> list[HeldRow]:
        """All complete rows."""
        return [HeldRow(id_, kept.record) for id_ in self.ids for kept in self._kept(id_)]

    def check(self, checkpoint_id: str) -> int:
        """Hash the rows of a checkpoint again. Returns how many there are; raises `CorruptError` if one has changed."""
        rows, sealing = self._kept(checkpoint_id), self._generations.sealing(checkpoint_id)
        for slot, record in rows:
            if sealing is None or _digest(sealing, parity_in(slot)) != record.digest:
                raise CorruptError(
                    f"parity has changed in '{slot.path}' since it was made.",
                    code="corrupt.slot",
                    action="Check the memory of this machine.",
                    path=str(slot.path),
                    tier="node memory",
                )
        return len(rows)

    def tend(self, given_up: Collection[str]) -> None:
        """Close rows that somebody removed, free those of checkpoints that were `given_up`, remove those that are older
        than the newest protected checkpoint where no newer ones are made, and forget offers that came to nothing."""
        newest = self._generations.newest_protected()
        with self._lock:
            for id_, gathering in list(self._gatherings.items()):
                sealing = self._generations.sealing(id_)
                is_old = newest is not None and sealing is not None and sealing.generation.place <= newest
                if id_ in given_up or is_old:
                    gathering.is_dropped = True
                    del self._gatherings[id_]
            idle = {name: slot for name, slot in self._rows.items() if name not in self._filling}
            last: dict[int, Place] = {}
            for slot in idle.values():
                contents = slot.refresh().contents
                if contents is not None and slot.state in KEPT:
                    last[slot.rank] = max(contents.place, last.get(slot.rank, contents.place))
            for name, slot in idle.items():
                contents = slot.record.contents
                is_old = newest is not None and (slot.rank not in last or last[slot.rank] < newest)
                if slot.is_removed:
                    slot.close()
                    del self._rows[name]
                elif contents is not None and contents.checkpoint_id in given_up:
                    free(slot)
                elif is_old and slot.remove_if(lambda _: True):
                    del self._rows[name]
            there = {
                (name, slot.record.contents.checkpoint_id)
                for name, slot in self._rows.items()
                if slot.record.contents is not None
            }
            self._records = {key: record for key, record in self._records.items() if key in there}

    def give_back(self, is_old: Callable[[SlotRecord], bool] = lambda _: True) -> None:
        """Remove all rows that are old but those that are being made."""
        with self._lock:
            for name in self._rows.keys() - self._filling:
                if self._rows[name].remove_if(is_old):
                    del self._rows[name]

    def close(self) -> None:
        """End the making of rows, and close all, which stay in the folder."""
        self.join(None)
        self._makers.shutdown(cancel_futures=True)
        with self._lock:
            for slot in self._rows.values():
                slot.close()
            self._rows.clear()

    def _kept(self, checkpoint_id: str) -> list[_KeptRow]:
        """The complete rows of a checkpoint."""
        with self._lock:
            return list(self._complete(checkpoint_id))

    def _complete(self, checkpoint_id: str) -> Iterator[_KeptRow]:
        """As `_kept`, under the lock."""
        for slot in self._rows.values():
            contents = slot.refresh().contents
            if contents is None or contents.checkpoint_id != checkpoint_id or slot.state not in KEPT:
                continue
            key = slot.name, checkpoint_id
            if key not in self._records:
                try:
                    self._records[key] = record_of(slot)
                except CorruptError as error:
                    _log.error("%s", error)
                    free(slot)
                    continue
            yield _KeptRow(slot, self._records[key])

    def _has_rows_of(self, offer: OfferParity, peers: ParityPeers) -> bool:
        """Whether all rows of this node are complete, and have what is offered."""
        identities = [peers.table.nodes[number].identity for number in peers.table.group]
        sender = peers.table.group.index(offer.sender)
        assert peers.table.parity is not None
        rows = {
            record.row
            for _, record in self._complete(offer.checkpoint_id)
            if [node.identity for node in record.group.nodes] == identities
            and record.group.nodes[sender].slots == offer.slots
        }
        return len(rows) == peers.table.parity.losses

    def _drop_older(self, place: Place) -> None:
        """Forget offers of checkpoints before `place` that are not complete: their senders offer the newest one."""
        for id_, gathering in list(self._gatherings.items()):
            sealing = self._generations.sealing(id_)
            if not gathering.is_at_work and sealing is not None and sealing.generation.place < place:
                del self._gatherings[id_]

    def _start(self, gathering: _Gathering, sealing: Sealing, peers: ParityPeers) -> None:
        """Begin to make the rows if all nodes of the group have offered what they have."""
        if gathering.is_at_work or time.monotonic() < gathering.retry_at:
            return
        nodes = []
        for number in peers.table.group:
            slots = gathering.offers.get(number)
            if slots is None and peers.files(sealing, number):
                return
            nodes.append(GroupNode(peers.table.nodes[number].identity, slots or ()))
        assert peers.table.parity is not None
        group = ParityGroup(tuple(nodes), peers.table.parity.losses)
        gathering.made = self._makers.submit(self._make, gathering, sealing, peers, group)

    def _make(self, gathering: _Gathering, sealing: Sealing, peers: ParityPeers, group: ParityGroup) -> None:
        """Make the rows of this node, those that are not complete yet."""
        try:
            own, striping = peers.table.nodes[peers.table.own].identity, group.striping
            held = {kept.record.row for kept in self._kept(sealing.generation.checkpoint_id)}
            for row in striping.parity_rows:
                if row not in held:
                    record = ParityRecord(group, striping.stripe(own, row), row)
                    self._make_row(_RowMaking(gathering, sealing, peers, striping, record))
            gathering.trouble = ""
        except (HoldfastError, OSError) as error:
            if not gathering.is_dropped:
                _log.warning("parity of step %d cannot be made: %s", sealing.generation.step, error)
            with self._lock:
                gathering.fail(str(error))

    def _make_row(self, making: _RowMaking) -> None:
        contents = making.contents
        slot = self._slot_for(making)
        try:
            total = slot.data[: contents.nbytes]
            total[:] = 0
            for row in range(making.striping.num_data):
                making.add_segment(row, total)
            digest = _digest(making.sealing, total)
        except BaseException:
            slot.advance(SlotRecord(SlotState.FREE))
            raise
        else:
            finish_row(slot, contents, msgspec.structs.replace(making.record, digest=digest))
        finally:
            with self._lock:
                self._filling.discard(slot.name)

    def _slot_for(self, making: _RowMaking) -> Slot:
        """A slot for a row, WRITING under this process's lock."""
        index = making.record.row - making.striping.num_data
        nbytes = needed_nbytes(making.contents.nbytes, making.record)
        with self._lock:
            slot = self._take(index, nbytes)
            if slot is not None:
                self._filling.add(slot.name)
        slot = slot or reserved(self._folder, SlotKind.PARITY, rank=index, nbytes=nbytes)
        slot.advance(SlotRecord(SlotState.WRITING, making.contents))
        with self._lock:
            self._rows[slot.name] = slot
            self._filling.add(slot.name)
        return slot

    def _take(self, index: int, nbytes: int) -> Slot | None:
        """A row of that number that is not needed any more, under this process's lock; None where there is none.
        Removes those that are too small."""
        newest = self._generations.newest_protected()
        mine = [slot for slot in self._rows.values() if slot.rank == index and not slot.is_removed]
        places = [
            slot.record.contents.place
            for slot in mine
            if slot.refresh().state in KEPT and slot.record.contents is not None
        ]
        spare = min((place for place in places if place != newest), default=None)
        for slot in mine:
            held = slot.record.contents
            is_old = held is not None and newest is not None and held.place < newest
            is_one_too_many = held is not None and len(places) >= _NUM_ROWS and held.place == spare
            if slot.state == SlotState.FREE or (slot.state in KEPT and (is_old or is_one_too_many)):
                if not slot.take():
                    continue
                if slot.nbytes >= nbytes:
                    return slot
                slot.remove()
                del self._rows[slot.name]
        return None


class _RowMaking(NamedTuple):
    """The making of the row that `record` describes."""

    gathering: _Gathering
    sealing: Sealing
    peers: ParityPeers
    striping: Striping
    record: ParityRecord

    @property
    def contents(self) -> Contents:
        """The contents of the row's slot."""
        about, stripe = self.sealing.generation, self.record.stripe
        run_id = self.sealing.stored.manifest.body.run_id
        nbytes = self.striping.row_nbytes(stripe, self.record.row)
        return Contents(run_id, about.checkpoint_id, about.place, about.step, stripe, 0, nbytes, boot=boot_id())

    def add_segment(self, row: int, total: Bytes) -> None:
        """Add the product of row number `row`, which another node has, to `total`. Raises `StorageError` where it
        cannot be read, or is not what was offered."""
        nbytes = self.striping.row_nbytes(self.record.stripe, row)
        if not nbytes:
            return
        identity = self.striping.node(self.record.stripe, row)
        number = next(each for each in self.peers.table.group if self.peers.table.nodes[each].identity == identity)
        factor = self.striping.data_factors(self.record.row)[row]
        way = self.peers.way(number)
        digests = next(node.files for node in self.record.group.nodes if node.identity == identity)
        parts = [data for _, data in self.striping.row_parts(self.record.stripe, row, 0, nbytes)]
        buffer = np.empty(PIECE_NBYTES + STRIP_NBYTES, np.uint8)
        at = filled = 0
        with way.connect() as connection:
            reading = _VerifiedReading(self, connection, way, digests)
            for piece in _pieces(parts, self.sealing):
                if self.gathering.is_dropped:
                    raise StorageError(
                        "the parity is not wanted any more.", code="storage.peer", action="No action needed."
                    )
                reading.read(piece, buffer[filled : filled + piece.nbytes])
                filled += piece.nbytes
                whole = filled if factor == 1 else filled // STRIP_NBYTES * STRIP_NBYTES
                add_multiple(total[at : at + whole], buffer[:whole], factor)
                buffer[: filled - whole] = buffer[whole:filled].copy()
                at, filled = at + whole, filled - whole
        add_multiple(total[at : at + STRIP_NBYTES], buffer[:filled], factor)


class _VerifiedReading:
    """Reads ranges of the files of one node, and compares them with the digests that it offered, by number of the
    file."""

    def __init__(self, making: _RowMaking, connection: PeerConnection, way: Way, digests: dict[int, str]) -> None:
        self._sealing = making.sealing
        self._connection = connection
        self._way = way
        self._digests = digests
        #: The header of the file that is being read, and its digests.
        self._file = -1
        self._header: Bytes = np.empty(0, np.uint8)
        self._table = b""

    def read(self, data: FileRange, out: Bytes) -> None:
        """Fill `out` with a range of a file: of its header, or whole blocks."""
        layout, kind = self._sealing.layout(data.file), self._sealing.stored.manifest.digests
        if data.file != self._file:
            self._learn_header(data.file)
        if data.start < layout.data_start:
            out[:] = self._header[data.start : data.start + data.nbytes]
            return
        self._get(data, out)
        first = (data.start - layout.data_start) // BLOCK_NBYTES
        if bad_blocks(out, self._table, first=first, kind=kind):
            raise _changed(self._way, data.file)

    def _learn_header(self, file: int) -> None:
        layout, manifest = self._sealing.layout(file), self._sealing.stored.manifest
        self._header = np.empty(layout.data_start, np.uint8)
        self._get(FileRange(file, 0, layout.data_start), self._header)
        nbytes = 2 * table_nbytes(layout.data_nbytes, manifest.digests)
        table = container.parse_table(self._header[TABLE_OFFSET : TABLE_OFFSET + nbytes].tobytes())
        if len(table) != nbytes // 2 or manifest.digests.hex(table) != self._digests[file]:
            raise _changed(self._way, file)
        if self._header.tobytes() != container.header(manifest, layout, table):
            raise _changed(self._way, file)
        self._file, self._table = file, table

    def _get(self, data: FileRange, out: Bytes) -> None:
        request = GetRange(self._sealing.generation.checkpoint_id, *data)
        require(self._connection.get(request, out, timeout_s=ANSWER_S + _PIECE_S), Sent, self._way)


def _pieces(parts: list[FileRange], sealing: Sealing) -> Iterator[FileRange]:
    """The `parts` of a segment in pieces that are read at once: of the header of a file, or whole blocks of it."""
    for file, start, nbytes in parts:
        at, stop, data_start = start, start + nbytes, sealing.layout(file).data_start
        while at < stop:
            end = min(at + PIECE_NBYTES, stop, data_start if at < data_start else stop)
            yield FileRange(file, at, end - at)
            at = end


def _check(offer: OfferParity, sealing: Sealing, peers: ParityPeers) -> None:
    """Raise `ValueError` for an offer that no peer makes."""
    parts = [part for slot in offer.slots for part in slot.files]
    if {part.file for part in parts} != peers.files(sealing, offer.sender) or len({*parts}) != len(parts):
        raise ValueError("the offer does not have the files that the manifest says")
    for slot in offer.slots:
        if len(slot.files) != len(slot.digests):
            raise ValueError("an offer needs a digest for each file")
    for part in parts:
        layout = sealing.layout(part.file)
        if (part.data_start, part.nbytes) != (layout.data_start, layout.nbytes):
            raise ValueError("a file has another layout than the manifest says")


def _digest(sealing: Sealing, parity: Bytes) -> str:
    """The digest of the digests of a row's blocks."""
    kind = sealing.stored.manifest.digests
    return kind.hex(digest_blocks(parity, kind))


def _changed(way: Way, file: int) -> StorageError:
    return StorageError(
        f"data file {file} has changed on the way from {way.address}, or in the memory of that node.",
        code="storage.peer",
        action="No action needed: holdfast tries again. If this goes on, check the memory of that machine.",
        retryable=True,
    )
