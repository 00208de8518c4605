"""The copies that a keeper holds for other nodes: it receives sealed slots into memory of its own, and verifies them.

A copy becomes HELD only if each of its bytes is what the offer's digests say: the blocks of data are hashed as they
arrive, and the header must be the one that manifest and digest table give. So a peer that sends other bytes, and a
network that alters them, leave nothing behind that a restore could read.

Threads of the connections call `offer`, `sink` and `finish`; the one thread of the keeper calls all other methods. The
lock covers the table of copies, never a transfer: a slot that is being received is WRITING under this process's lock,
so nothing else touches it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.format import container
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.records import Place
from holdfast.keeper.own_slots import file_numbers
from holdfast.keeper.peer_generations import GenerationSink, PeerGenerations
from holdfast.keeper.peer_memory import KEPT, free, opened, reserved
from holdfast.keeper.persist import Sealing
from holdfast.keeper.slot_readers import SlotReaders
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotKind, SlotRecord, SlotState, copy_names
from holdfast.peers.peer_errors import not_received
from holdfast.peers.peer_messages import (
    CopyKept,
    CopyWanted,
    Damaged,
    Declined,
    Noted,
    OfferCopy,
    PeerReply,
    PrepareCopies,
    Put,
    PutGeneration,
    PutRange,
)
from holdfast.store.base import Bytes

#: Number of copies of a rank that the memory has: a newer one is received while the last protected one must stay. There
#: is a third one while newer ones come and none gets protected.
NUM_COPIES: Final = 2
#: Limit for the bytes of a copy that a peer offers.
MAX_COPY_NBYTES: Final = 1 << 44
#: Time that an offer waits for memory that is being taken for it.
_PREPARING_S: Final = 10.0
#: Time after which a reception that no connection feeds is given up: its sender is gone.
_DEAD_S: Final = 120.0


class _DataBlock(NamedTuple):
    """Block number `number` of the data of a file: the bytes from `start` to `stop` of the slot's region."""

    part: SlotFile
    number: int
    start: int
    stop: int


@dataclass
class _Incoming:
    """A copy that is being received into `slot`. `digests` are those of the blocks that have arrived."""

    offer: OfferCopy
    slot: Slot
    sealing: Sealing | None
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    #: Number of transfers into the slot that are under way.
    num_active: int = 0
    touched_at: float = field(default_factory=time.monotonic)

    def note(self, block: _DataBlock) -> None:
        """Hash a block that has arrived."""
        assert self.sealing is not None
        kind = self.sealing.stored.manifest.digests
        self.digests[block.part.file, block.number] = kind.of(self.slot.data[block.start : block.stop].data)


class CopyFilling(NamedTuple):
    """A copy that this process fills by itself: its contents to be, and the region for its files."""

    contents: Contents
    data: Bytes


class PeerCopies:
    """The copies in `folder`, by which this node protects slots of others, and the `generations` of them."""

    def __init__(self, folder: NodeFolder, generations: PeerGenerations) -> None:
        self._folder = folder
        self._generations = generations
        self._lock = Lock()
        self._copies: dict[str, Slot] = {}
        self._incoming: dict[int, _Incoming] = {}
        #: The names of copies that have arrived and are being verified.
        self._verifying: set[str] = set()
        #: The names of the copies that were rebuilt here, with the newest protected checkpoint of that time: a restore
        #: may need one that is older.
        self._rebuilt: dict[str, Place | None] = {}
        #: The names of copies that the keeper is sending to other nodes. It sets them, and they stay meanwhile.
        self.being_sent: frozenset[str] = frozenset()
        #: The copies that threads of the listener are sending to nodes that restore.
        self._readers = SlotReaders()
        #: The ranks for whose copies a thread is taking a slot, or memory. Changes are notified.
        self._preparing: set[int] = set()
        self._changed = Condition(self._lock)
        #: The ranks of offers that wait for that: they come before memory for the next copy.
        self._waiting: Counter[int] = Counter()
        #: The ranks whose copies are expected: the memory for them stays.
        self._expected: set[int] = set()
        self._copies.update((slot.name, slot) for slot in opened(folder, copy_names(folder)))

    def offer(self, offer: OfferCopy) -> PeerReply:
        """Answer an offer: this node has the copy, wants it, or says why it does not take it. Blocks while memory for
        it is taken."""
        _check(offer)
        with self._lock:
            if any(_is_of(slot, offer) for slot in self._copies.values()):
                return CopyKept()
            if not self._begin_preparing(offer.rank) or not self._end_stale(offer):
                return Declined("another connection is sending a copy of that rank")
            self._preparing.add(offer.rank)
        try:
            sealing = self._generations.sealing(offer.contents.checkpoint_id)
            incoming, token = _Incoming(offer, self._slot_for(offer), sealing), secrets.randbits(63)
            self._generations.expect(offer.contents.checkpoint_id)
            with self._lock:
                self._copies[incoming.slot.name] = incoming.slot
                self._incoming[token] = incoming
        except (HoldfastError, OSError) as error:
            return Declined(str(error), is_full=True)
        finally:
            self._end_preparing(offer.rank)
        return CopyWanted(token, needs_generation=incoming.sealing is None)

    def prepare(self, request: PrepareCopies) -> PeerReply:
        """Have memory for copies of a rank that a peer will offer. Blocks while memory is taken."""
        rank, nbytes = request.rank, request.nbytes
        if not 0 < nbytes <= MAX_COPY_NBYTES:
            raise ValueError("a copy needs bytes, and has a limit")
        with self._lock:
            self._expected.add(rank)
            if not self._changed.wait_for(
                lambda: rank not in self._preparing and not self._waiting[rank], _PREPARING_S
            ):
                return Declined("another connection is sending a copy of that rank")
            self._preparing.add(rank)
        try:
            while self._num_fit(rank, nbytes) < request.num_copies:
                slot = reserved(self._folder, SlotKind.COPY, rank=rank, nbytes=nbytes)
                slot.let_go()
                with self._lock:
                    self._copies[slot.name] = slot
        except (HoldfastError, OSError) as error:
            return Declined(str(error), is_full=True)
        finally:
            self._end_preparing(rank)
        return Noted()

    def expect_none(self) -> None:
        """Forget which copies are expected: the peers are those of another job now."""
        with self._lock:
            self._expected.clear()

    def _begin_preparing(self, rank: int) -> bool:
        """Under the lock, wait until no thread takes memory for copies of `rank`. Returns whether that came."""
        self._waiting[rank] += 1
        try:
            return self._changed.wait_for(lambda: rank not in self._preparing, _PREPARING_S)
        finally:
            self._waiting[rank] -= 1
            self._changed.notify_all()

    def _end_preparing(self, rank: int) -> None:
        with self._changed:
            self._preparing.discard(rank)
            self._changed.notify_all()

    def _num_fit(self, rank: int, nbytes: int) -> int:
        """The number of slots for copies of `rank` that have room for `nbytes`."""
        with self._lock:
            mine = [slot for slot in self._copies.values() if slot.rank == rank and not slot.is_removed]
        return sum(slot.nbytes >= nbytes for slot in mine)

    def sink(self, put: Put) -> GenerationSink | _RangeSink:
        """The memory that takes the bytes of `put`. Raises `StorageError` where the copy is not being received, and
        `ValueError` for bytes that are no part of it."""
        if isinstance(put, PutGeneration):
            return self._generations.sink(put)
        with self._lock:
            incoming = self._incoming.get(put.token)
            if incoming is None or not self._knows_sealing(incoming):
                raise not_received()
            if put.start < 0 or put.nbytes < 0 or put.start + put.nbytes > incoming.slot.nbytes:
                raise ValueError("the range lies outside of the slot")
            incoming.num_active += 1
            incoming.touched_at = time.monotonic()
        return _RangeSink(self, incoming, put)

    @contextmanager
    def filling(self, token: int) -> Iterator[CopyFilling]:
        """The copy `token`, to be filled inside the ``with`` block. Raises `StorageError` where it is not being
        received."""
        with self._lock:
            incoming = self._incoming.get(token)
            if incoming is None or not self._knows_sealing(incoming):
                raise not_received()
            incoming.num_active += 1
        try:
            self._rebuilt[incoming.slot.name] = self._generations.newest_protected()
            yield CopyFilling(incoming.offer.contents, incoming.slot.data)
        finally:
            self.end_transfer(incoming)

    def drop(self, token: int) -> PeerReply:
        """Give up the reception of a copy."""
        with self._lock:
            incoming = self._incoming.pop(token, None)
            if incoming is not None:
                incoming.slot.advance(SlotRecord(SlotState.FREE))
        return Damaged("it could not be received")

    def finish(self, token: int) -> PeerReply:
        """End the reception: the copy is kept if it is what was offered."""
        with self._lock:
            incoming = self._incoming.get(token)
            if incoming is None or not self._knows_sealing(incoming) or incoming.num_active:
                return Damaged("it was not sent as a whole")
            del self._incoming[token]
            self._verifying.add(incoming.slot.name)
        try:
            return _verified(incoming)
        finally:
            with self._lock:
                self._verifying.discard(incoming.slot.name)

    def _knows_sealing(self, incoming: _Incoming) -> bool:
        """Whether the generation of a copy that is being received has arrived."""
        incoming.sealing = incoming.sealing or self._generations.sealing(_id_of(incoming.offer))
        return incoming.sealing is not None

    @property
    def owed(self) -> list[Slot]:
        """The copies that a restore, or the keeper, has asked for in the run."""
        with self._lock:
            return [slot for slot in self._copies.values() if slot.refresh().state == SlotState.SEALED]

    @property
    def ids(self) -> set[str]:
        """The ids of the checkpoints that there are copies of, whole ones and those that are being received."""
        with self._lock:
            contents = [slot.record.contents for slot in self._copies.values()]
            return {each.checkpoint_id for each in contents if each is not None}

    def held(self, checkpoint_id: str) -> list[Slot]:
        """The HELD copies of a checkpoint."""
        with self._lock:
            return [
                slot for slot in self._copies.values() if slot.state == SlotState.HELD and _has(slot, checkpoint_id)
            ]

    def kept(self, checkpoint_id: str, files: Collection[int]) -> list[Slot]:
        """The whole copies of slots with any of these files of a checkpoint."""
        with self._lock:
            mine = [
                slot for slot in self._copies.values() if slot.refresh().state in KEPT and _has(slot, checkpoint_id)
            ]
        return [slot for slot in mine if not file_numbers(slot).isdisjoint(files)]

    @property
    def whole(self) -> list[Slot]:
        """The whole copies."""
        with self._lock:
            return [slot for slot in self._copies.values() if slot.refresh().state in KEPT]

    def reading(self, copy: Slot) -> AbstractContextManager[None]:
        """The copy stays as it is inside the ``with`` block."""
        return self._readers.reading(copy.name)

    def named(self, name: str) -> Slot | None:
        """The copy called `name`, if it is there."""
        return self._copies.get(name)

    def tend(self, given_up: Collection[str]) -> None:
        """Close copies that somebody removed, free those of checkpoints that were `given_up`, and remove those of ranks
        that have no part of the newest protected checkpoint, because they live no more, and a third one of a rank once
        it is not needed."""
        newest = self._generations.newest_protected()
        with self._lock:
            for token, each in list(self._incoming.items()):
                if not each.num_active and time.monotonic() - each.touched_at > _DEAD_S:
                    del self._incoming[token]
                    each.slot.advance(SlotRecord(SlotState.FREE))
            busy = self._busy()
            for name in self._rebuilt.keys() - self._copies.keys():
                del self._rebuilt[name]
            idle = {
                name: slot
                for name, slot in self._copies.items()
                if name not in busy and slot.rank not in self._preparing
            }
            last: dict[int, Place] = {}
            for slot in idle.values():
                contents = slot.refresh().contents
                if contents is not None and slot.state in KEPT:
                    last[slot.rank] = max(contents.place, last.get(slot.rank, contents.place))
            num_copies = Counter(slot.rank for slot in self._copies.values())
            for name, slot in idle.items():
                contents = slot.record.contents
                is_extra = num_copies[slot.rank] > NUM_COPIES and (
                    contents is None or (newest is not None and contents.place < newest)
                )
                is_old = newest is not None and (slot.rank not in last or last[slot.rank] < newest)
                is_old = is_old and self._rebuilt.get(name) != newest
                is_old = is_old and not (slot.state == SlotState.FREE and slot.rank in self._expected)
                if slot.is_removed:
                    slot.close()
                    del self._copies[name]
                elif contents is not None and contents.checkpoint_id in given_up:
                    free(slot)
                elif (is_old or is_extra) and slot.remove_if(lambda record: record.state != SlotState.SEALED):
                    num_copies[slot.rank] -= 1
                    del self._copies[name]

    def give_back(self, is_old: Callable[[SlotRecord], bool] = lambda _: True) -> None:
        """Remove all copies that are old but those that are owed to the run, or being received or sent."""
        with self._lock:
            busy = self._busy()
            for name, slot in list(self._copies.items()):
                if name in busy or slot.rank in self._preparing:
                    continue
                if slot.remove_if(lambda record: record.state != SlotState.SEALED and is_old(record)):
                    del self._copies[name]

    def close(self) -> None:
        """Close all copies, which stay in the folder. Nothing may be received any more."""
        with self._lock:
            for slot in self._copies.values():
                slot.close()
            self._copies.clear()

    def _busy(self) -> set[str]:
        """The names of the copies that are being received, verified or sent."""
        received = {each.slot.name for each in self._incoming.values()}
        return received | self._verifying | self.being_sent | self._readers.names

    def end_transfer(self, incoming: _Incoming) -> None:
        """Note that a range has arrived, or that its connection broke."""
        with self._lock:
            incoming.num_active -= 1
            incoming.touched_at = time.monotonic()

    def _end_stale(self, offer: OfferCopy) -> bool:
        """End receptions of the same rank that no connection feeds any more: their sender begins anew. Returns False
        where one is still fed."""
        for token, each in list(self._incoming.items()):
            if each.offer.rank != offer.rank:
                continue
            if each.num_active:
                return False
            del self._incoming[token]
            each.slot.advance(SlotRecord(SlotState.FREE))
        return True

    def _slot_for(self, offer: OfferCopy) -> Slot:
        """A slot for the copy, WRITING under this process's lock. Only one thread at a time calls it for a rank."""
        with self._lock:
            taken = self._take(offer.rank, offer.contents)
        slot = taken or reserved(self._folder, SlotKind.COPY, rank=offer.rank, nbytes=_nbytes(offer.contents))
        slot.advance(SlotRecord(SlotState.WRITING, offer.contents))
        return slot

    def _take(self, rank: int, contents: Contents) -> Slot | None:
        """A copy of `rank` that is not needed any more, under this process's lock; None where there is none. Removes
        those that are too small."""
        newest, busy = self._generations.newest_protected(), self._busy()
        mine = [slot for slot in self._copies.values() if slot.rank == rank and not slot.is_removed]
        # One that is owed to the run stays anyway.
        whole = [slot for slot in mine if slot.refresh().state in KEPT and slot.state != SlotState.SEALED]
        places = {slot.record.contents.place for slot in whole if slot.record.contents is not None}
        # The newest protected one stays, beside one that may get its mark a moment later.
        spare = min(places - {newest}, default=None)
        is_full = len(whole) >= NUM_COPIES + (newest in places)
        for slot in mine:
            held = slot.record.contents
            is_needed = slot.state == SlotState.SEALED or slot.state not in (*KEPT, SlotState.FREE, SlotState.FENCED)
            is_old = held is None or (newest is not None and held.place < newest)
            is_one_too_many = held is not None and is_full and held.place == spare
            is_needed = is_needed or slot.name in busy
            if is_needed or not (is_old or is_one_too_many) or not slot.take():
                continue
            if slot.nbytes >= _nbytes(contents):
                return slot
            slot.remove()
            del self._copies[slot.name]
        return None


class _RangeSink:
    """A `PutSink` for a range of a copy. Blocks are hashed as soon as they have arrived, while the cache has them."""

    def __init__(self, copies: PeerCopies, incoming: _Incoming, put: PutRange) -> None:
        self.memory: Bytes = incoming.slot.data[put.start : put.start + put.nbytes]
        self._copies = copies
        self._incoming = incoming
        self._put = put
        self._blocks = _blocks(incoming.offer.contents, put.start, put.start + put.nbytes)
        self._next = next(self._blocks, None)

    def received(self, nbytes: int) -> None:
        """The first `nbytes` have arrived."""
        while self._next is not None and self._next.stop <= self._put.start + nbytes:
            self._incoming.note(self._next)
            self._next = next(self._blocks, None)

    def finish(self) -> PeerReply:
        """All bytes have arrived."""
        self._copies.end_transfer(self._incoming)
        return Noted()

    def abort(self) -> None:
        """The connection broke."""
        self._copies.end_transfer(self._incoming)


def _blocks(contents: Contents, start: int, stop: int) -> Iterator[_DataBlock]:
    """The blocks of data that lie between `start` and `stop` of a slot's region, in order."""
    for part in contents.files:
        data = part.start + part.data_start
        first = max(-(-(start - data) // BLOCK_NBYTES), 0)
        for number in range(first, container.num_blocks(part.nbytes - part.data_start)):
            block = _DataBlock(
                part, number, data + number * BLOCK_NBYTES, min(data + (number + 1) * BLOCK_NBYTES, part.stop)
            )
            if block.stop > stop:
                break
            yield block


def _verified(incoming: _Incoming) -> PeerReply:
    """Keep a copy that has arrived if it is what was offered."""
    slot, offer = incoming.slot, incoming.offer
    try:
        damage = _damage(incoming)
    except BaseException:
        slot.advance(SlotRecord(SlotState.FREE))
        raise
    if damage is not None:
        slot.advance(SlotRecord(SlotState.FREE))
        return Damaged(damage)
    slot.advance(SlotRecord(SlotState.STAGED, offer.contents))
    slot.advance(SlotRecord(SlotState.HELD, offer.contents, offer.digests[0], second_digest="".join(offer.digests[1:])))
    return CopyKept()


def _damage(incoming: _Incoming) -> str | None:
    """The reason why a received copy is not what was offered; None where it is."""
    offer, slot, sealing = incoming.offer, incoming.slot, incoming.sealing
    assert sealing is not None
    kind, tables = sealing.stored.manifest.digests, defaultdict[int, list[bytes]](list)
    for block in _blocks(offer.contents, 0, offer.contents.files[-1].stop):
        if (block.part.file, block.number) not in incoming.digests:  # it came in two ranges
            incoming.note(block)
        tables[block.part.file].append(incoming.digests[block.part.file, block.number])
    for part, digest in zip(offer.contents.files, offer.digests, strict=True):
        layout, table = sealing.layout(part.file), b"".join(tables[part.file])
        if (part.data_start, part.nbytes) != (layout.data_start, layout.nbytes):
            return "it has another layout than its manifest says"
        if kind.hex(table) != digest:
            return "bytes of it changed on the way, or in the memory of the node that sent it"
        header = container.header(sealing.stored.manifest, layout, table)
        if slot.data[part.start : part.start + part.data_start].tobytes() != header:
            return "its header changed on the way, or in the memory of the node that sent it"
    return None


def _check(offer: OfferCopy) -> None:
    """Raise `ValueError` for an offer that no keeper makes."""
    end, files = 0, offer.contents.files
    for part in files:
        if part.start < end or part.data_start < 0 or part.nbytes < part.data_start or part.file < 0:
            raise ValueError("the offered files overlap, or have no sizes")
        end = part.stop
    if len(offer.digests) != len(files) or end <= 0 or end > MAX_COPY_NBYTES:
        raise ValueError("an offer needs a digest for each file, and bytes")


def _is_of(slot: Slot, offer: OfferCopy) -> bool:
    """Whether a copy is what is offered."""
    record = slot.refresh()
    digests = tuple(filter(None, record.digests))
    return record.state in KEPT and record.contents == offer.contents and digests == offer.digests


def _has(slot: Slot, checkpoint_id: str) -> bool:
    return slot.record.contents is not None and slot.record.contents.checkpoint_id == checkpoint_id


def _id_of(offer: OfferCopy) -> str:
    return offer.contents.checkpoint_id


def _nbytes(contents: Contents) -> int:
    """The size of the region that the files of a slot take."""
    return contents.files[-1].stop
