"""The work of the threads of a keeper that send: they offer slots to a peer, and send them, or have it take memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock
from typing import Final

from holdfast.format.container import BLOCK_NBYTES
from holdfast.keeper.copies import NUM_COPIES
from holdfast.keeper.peer_ways import ANSWER_S, Way, ask, put_generation, require
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import encode_generation
from holdfast.node_memory.parity_records import SlotDigests
from holdfast.node_memory.slots import Contents, Slot, SlotFile
from holdfast.peers.peer_errors import not_taken
from holdfast.peers.peer_messages import (
    CopyKept,
    CopyWanted,
    Declined,
    Finish,
    Noted,
    OfferCopy,
    OfferParity,
    ParityWanted,
    PrepareCopies,
    PutRange,
)
from holdfast.peers.transport import PeerConnection, Region

#: Number of connections that send a slot to a peer at the same time.
_NUM_STREAMS: Final = 2
#: Bytes of a slot that one request sends.
_RANGE_NBYTES: Final = 16 << 20
#: Limits for a peer: to take memory for a copy, per byte (a slow machine takes 4 s per GiB), and to receive a range.
_MEMORY_S_PER_NBYTES: Final = 4 / (1 << 30)
_RANGE_S: Final = 600.0


def prepare_copies(way: Way, rank: int, nbytes: int) -> None:
    """Have a peer take memory for the copies of a rank. One that does not will say why when they are offered."""
    for num_copies in range(1, NUM_COPIES + 1):
        ask(way, PrepareCopies(rank, nbytes, num_copies), timeout_s=ANSWER_S + nbytes * _MEMORY_S_PER_NBYTES)


def offer_parity(way: Way, offer: OfferParity, sealing: Sealing) -> bool:
    """Offer slots for the parity that a peer keeps. Returns whether its rows are complete.

    Raises:
        StorageError: the peer cannot be reached, or could not make its rows.
    """
    with way.connect() as connection:
        reply = connection.ask(offer, timeout_s=ANSWER_S)
        if isinstance(reply, ParityWanted):
            if reply.needs_generation:
                _put_generation(way, connection, sealing)
            return False
        require(reply, CopyKept, way)
        return True


def _put_generation(way: Way, connection: PeerConnection, sealing: Sealing) -> None:
    generation = sealing.generation
    data = encode_generation(generation)
    put_generation(way, connection, generation.checkpoint_id, data, timeout_s=_RANGE_S)


def offer_of(slot: Slot) -> OfferCopy:
    """The offer of a sealed slot."""
    assert slot.record.contents is not None
    return OfferCopy(slot.record.contents, SlotDigests.of(slot).digests, slot.rank)


def send_copy(
    way: Way, slot: Slot, offer: OfferCopy, sealing: Sealing, *, metered: AbstractContextManager[None]
) -> bool:
    """Send a copy of `slot` to a peer, its bytes within the context `metered`. On return, the peer has it, whole and
    verified. Returns true.

    Raises:
        StorageError: the peer cannot be reached, or found other bytes than were offered; code ``storage.memory``, its
            node has no memory for the copy.
    """
    nbytes = offer.contents.files[-1].stop
    with way.connect() as connection:
        reply = connection.ask(offer, timeout_s=ANSWER_S + nbytes * _MEMORY_S_PER_NBYTES)
        if isinstance(reply, Declined) and reply.is_full:
            raise not_taken(way.address, reply.reason)
        if isinstance(reply, CopyWanted):
            if reply.needs_generation:
                _put_generation(way, connection, sealing)
            ranges = _ranges(offer.contents)
            with metered:
                _send_ranges(way, connection, slot, reply.token, ranges)
            reply = connection.ask(Finish(reply.token), timeout_s=_RANGE_S)
        require(reply, CopyKept, way)
        return True


def _send_ranges(
    way: Way, connection: PeerConnection, slot: Slot, token: int, ranges: Iterator[tuple[int, int]]
) -> None:
    """Send the `ranges` of `slot` by several connections, each of which takes the next one when it is done with one."""
    (fd, offset), lock = slot.region, Lock()

    def following() -> tuple[int, int] | None:
        with lock:
            return next(ranges, None)

    def send(stream: PeerConnection) -> None:
        while (following_range := following()) is not None:
            start, stop = following_range
            put = PutRange(token, start, stop - start)
            region = Region(fd, offset + start, stop - start)
            require(stream.put(put, region, timeout_s=_RANGE_S, pace=way.pace), Noted, way)

    def send_by_another() -> None:
        with way.connect() as stream:
            send(stream)

    with ThreadPoolExecutor(_NUM_STREAMS - 1, thread_name_prefix="holdfast-stream") as pool:
        others = [pool.submit(send_by_another) for _ in range(_NUM_STREAMS - 1)]
        send(connection)
        for other in others:
            other.result()


def _ranges(contents: Contents) -> Iterator[tuple[int, int]]:
    """The ranges in which a slot is sent. They begin and end at blocks of data, so that each block comes in one."""
    for part in contents.files:
        yield from _ranges_of(part)


def _ranges_of(part: SlotFile) -> Iterator[tuple[int, int]]:
    start, stop = part.start, part.start + part.data_start + _RANGE_NBYTES // BLOCK_NBYTES * BLOCK_NBYTES
    while start < part.stop:
        yield start, min(stop, part.stop)
        start, stop = stop, stop + _RANGE_NBYTES // BLOCK_NBYTES * BLOCK_NBYTES
