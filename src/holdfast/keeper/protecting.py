"""The keeper's work for protected memory: it sends sealed slots to peers, and finds out when a generation is protected.

An offer may be repeated at any time, and costs one round trip where the peer has the copy. So nothing about what was
sent is written down: a new keeper offers again.

The keeper begins to send slots of the newest generation only: an older one is of no use once that is protected. A
trainer may fill a slot again in the middle of a transfer, if the run has its contents by then. The peer finds that by
the digests, and gives the copy up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from holdfast.errors import HoldfastError, StorageError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.records import Place
from holdfast.keeper.copies import PeerCopies
from holdfast.keeper.pacing import LinkPaces
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import encode_generation, mark_protected, protected_ids
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import (
    PeerNode,
    PeerPort,
    PeerSecret,
    PeerTable,
    digest_of,
    note_peer_trouble,
    note_port,
    noted_port,
    noted_secret,
    noted_table,
)
from holdfast.node_memory.slots import WHOLE, Contents, Slot, SlotFile
from holdfast.peers.peer_messages import (
    CopyKept,
    CopyWanted,
    Damaged,
    Declined,
    Finish,
    GetRange,
    MarkProtected,
    Noted,
    NoteProtected,
    OfferCopy,
    PeerReply,
    PeerRequest,
    Put,
    PutGeneration,
    PutRange,
    RequestRefused,
)
from holdfast.peers.tcp import TcpPeers
from holdfast.peers.transport import PeerConnection, PeerListener, PeerTransport, PutPace, PutSink, Region
from holdfast.store.retry_budget import RetryBudget

#: Number of connections that send a slot to a peer at the same time, and number of slots sent at the same time.
_NUM_STREAMS: Final = 2
_NUM_SENDERS: Final = 4
#: Bytes of a slot that one request sends.
_RANGE_NBYTES: Final = 16 << 20
#: Limits for a peer to answer: to take memory for a copy, per byte (a slow machine takes 4 s per GiB) and in all; to
#: receive a range; and any other request.
_MEMORY_S_PER_NBYTES: Final = 4 / (1 << 30)
_ANSWER_S: Final = 30.0
_RANGE_S: Final = 600.0
#: Interval at which a keeper says again that its copies are kept, until the generation is marked.
_SAY_AGAIN_S: Final = 1.0
_RETRIES: Final = RetryBudget(total_s=math.inf, first_s=0.5, longest_s=15.0)
#: More than the resolution of the times of files.
_TICK_NS: Final = 100_000_000

_log = logging.getLogger(__name__)


class _Sending(NamedTuple):
    """The sending of a slot with these `contents` to the peer number `target` of the `session`."""

    session: _PeerSession
    slot: Slot
    contents: Contents
    target: int
    sent: Future[None]


@dataclass
class _PeerState:
    """The state of the way to a peer: when it may be tried again, after how many failures, and the last trouble."""

    retry_at: float = 0.0
    num_failures: int = 0
    trouble: str = ""

    def fail(self, trouble: str) -> None:
        """Note a failure."""
        self.retry_at = time.monotonic() + (_RETRIES.pause_s(self.num_failures) or 0.0)
        self.num_failures += 1
        self.trouble = trouble

    def work(self) -> None:
        """Note a success."""
        self.retry_at, self.num_failures, self.trouble = 0.0, 0, ""


@dataclass
class _PeerSession:
    """The peers of one job, which this keeper knows by `table`. ``kept`` has, by slot name and checkpoint, the peers
    that hold the copy."""

    secret: PeerSecret
    table: PeerTable
    kept: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    peers: dict[int, _PeerState] = field(default_factory=dict)
    #: By checkpoint id, the files that nodes have said are kept, which `lock` guards. Only the first node of the table
    #: counts.
    counted: dict[str, set[int]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    #: By checkpoint id and number of files, the time at which the first node was last told.
    said_at: dict[tuple[str, int], float] = field(default_factory=dict)
    paces: LinkPaces = field(init=False)

    def __post_init__(self) -> None:
        self.paces = LinkPaces(self.table.pacing)

    @property
    def targets(self) -> tuple[int, ...]:
        """The peers that get copies of this node's slots."""
        return self.table.targets[self.table.own]

    def state(self, peer: int) -> _PeerState:
        """The state of the way to a peer."""
        return self.peers.setdefault(peer, _PeerState())

    def forget(self, slots: Iterable[Slot]) -> None:
        """Forget which peers hold copies of what `slots` held before."""
        held = {(slot.name, slot.record.contents.checkpoint_id) for slot in slots if slot.record.contents is not None}
        self.kept = {key: peers for key, peers in self.kept.items() if key in held}

    def count(self, checkpoint_id: str, files: Iterable[int], num_files: int) -> bool:
        """Note on the first node that all copies of these files are kept. Returns whether all are, and forgets them
        then: a node that misses the mark says again that it has all copies. Any thread may call it."""
        with self.lock:
            counted = self.counted.setdefault(checkpoint_id, set())
            counted.update(files)
            if len(counted) < num_files:
                return False
            del self.counted[checkpoint_id]
            return True


class Protection:
    """The protection of the slots in `folder` by peers, and of slots of peers by this node. Only the one thread of the
    keeper uses it, except for `answer`, `sink` and `source`, which threads of the listener call."""

    def __init__(self, folder: NodeFolder, copies: PeerCopies, sealing_of: Callable[[str], Sealing | None]) -> None:
        self.copies = copies
        self._folder = folder
        self._sealing_of = sealing_of
        self._session: _PeerSession | None = None
        self._secret: PeerSecret | None = None
        #: The folder's time of change (`NodeFolder.changed_ns`) at the last look at its notes.
        self._met_ns = 0
        self._transport: PeerTransport | None = None
        self._listener: PeerListener | None = None
        self._senders = ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="holdfast-protect")
        self._sending: dict[tuple[str, int], _Sending] = {}
        self._told = ""

    def meet(self) -> None:
        """Listen for peers, and take the table of a new job."""
        changed_ns = self._folder.changed_ns()
        if changed_ns == self._met_ns:
            return
        secret, table = noted_secret(self._folder), noted_table(self._folder)
        if secret != self._secret:
            self._listen(secret)
        if secret is None or table is None or table.secret_digest != digest_of(secret.secret):
            self._session = None
        elif self._session is None or self._session.table != table:
            self._session = _PeerSession(secret, table)
        # Another change in the same tick of the clock would not show, so a fresh one is looked at again.
        is_past = abs(time.time_ns() - changed_ns) > _TICK_NS
        self._met_ns = changed_ns if is_past else -1

    def look(self, slots: Iterable[Slot]) -> bool:
        """Record which copies are kept, mark what is protected, and start to send what is due. Returns whether anything
        is under way."""
        session = self._session
        if session is None:
            return False
        self._end_sends()
        marked = protected_ids(self._folder)
        whole = [slot for slot in slots if slot.record.state in WHOLE]
        session.forget(whole)
        due = _newest(whole, marked)
        for slot in due:
            for target in session.targets:
                self._start(session, slot, target)
        self._say(session, due)
        trouble = next((each.trouble for each in session.peers.values() if each.trouble), "")
        self._tell(trouble)
        return bool(self._sending)

    @property
    def being_read(self) -> set[str]:
        """The names of the slots that are being sent."""
        return {name for name, _ in self._sending}

    @property
    def is_sending(self) -> bool:
        """Whether a slot is being sent."""
        return bool(self._sending)

    @property
    def has_news(self) -> bool:
        """Whether the sending of a slot has ended, so that there is more to do."""
        return any(each.sent.done() for each in self._sending.values())

    def close(self) -> None:
        """End all connections, and wait for the threads that send."""
        if self._listener is not None:
            self._listener.close()
        if self._session is not None:
            self._session.paces.release()
        self._senders.shutdown(cancel_futures=True)

    def answer(self, request: PeerRequest) -> PeerReply:
        """As `PeerService.answer`."""
        match request:
            case OfferCopy():
                return self.copies.offer(request)
            case Finish():
                return self.copies.finish(request.token)
            case NoteProtected():
                session = self._session
                if session is None:
                    return RequestRefused("this keeper has no table of peers yet")
                self._count(session, request.checkpoint_id, request.files, request.num_files)
                return Noted()
            case MarkProtected():
                mark_protected(self._folder, request.checkpoint_id)
                return Noted()
            case _:
                return RequestRefused("this keeper does not serve such requests")

    def sink(self, put: Put) -> PutSink:
        """As `PeerService.sink`."""
        return self.copies.sink(put)

    def source(self, get: GetRange) -> AbstractContextManager[Region]:
        """As `PeerService.source`."""
        raise ValueError("this keeper does not serve such requests")

    def _listen(self, secret: PeerSecret | None) -> None:
        """Listen for peers that know `secret`: where the keeper before this one did, if it can. With None, end that."""
        if self._listener is not None:
            self._listener.close()
        self._secret, self._listener, self._transport = secret, None, None
        if secret is None:
            return
        digest, before = digest_of(secret.secret), noted_port(self._folder)
        transport = TcpPeers(secret.host)
        wanted = before.port if before is not None and before.secret_digest == digest else 0
        try:
            try:
                self._listener = transport.listen(self, secret=secret.secret, port=wanted)
            except HoldfastError:
                self._listener = transport.listen(self, secret=secret.secret)
        except HoldfastError as error:
            note_port(self._folder, PeerPort(digest, error=str(error)))
            return
        self._transport = transport
        note_port(self._folder, PeerPort(digest, int(self._listener.address.rpartition(":")[2])))

    def _start(self, session: _PeerSession, slot: Slot, target: int) -> None:
        """Start to send `slot` to `target`, unless that is done, under way, or not to be tried again yet."""
        contents, state = slot.record.contents, session.state(target)
        assert contents is not None
        if (slot.name, target) in self._sending or target in session.kept.get((slot.name, contents.checkpoint_id), ()):
            return
        sealing = self._sealing_of(contents.checkpoint_id)
        if sealing is None or self._transport is None or time.monotonic() < state.retry_at:
            return
        peer = session.table.nodes[target]
        offer = OfferCopy(contents, tuple(filter(None, slot.record.digests)), slot.rank)
        connect = _Way(self._transport, peer, session.secret.secret, session.paces.to(peer.address))
        sent = self._senders.submit(_send, connect, slot, offer, sealing)
        self._sending[slot.name, target] = _Sending(session, slot, contents, target, sent)

    def _end_sends(self) -> None:
        for key, sending in list(self._sending.items()):
            if not sending.sent.done():
                continue
            del self._sending[key]
            session, contents, error = sending.session, sending.contents, sending.sent.exception()
            state = session.state(sending.target)
            if error is None:
                state.work()
                session.kept.setdefault((sending.slot.name, contents.checkpoint_id), set()).add(sending.target)
            elif sending.slot.refresh().contents == contents:  # else a trainer has filled it anew meanwhile
                address = session.table.nodes[sending.target].address
                state.fail(f"step {contents.step} has no copy at {address}: {error}")

    def _say(self, session: _PeerSession, due: Iterable[Slot]) -> None:
        """Tell the first node which files of this node are kept by all their peers, again and again until it has marked
        the generation."""
        kept: dict[str, set[int]] = {}
        for slot in due:
            contents = slot.record.contents
            assert contents is not None
            id_ = contents.checkpoint_id
            if session.kept.get((slot.name, id_), set()) >= set(session.targets):
                kept.setdefault(id_, set()).update(part.file for part in contents.files)
        for id_, files in kept.items():
            sealing, now = self._sealing_of(id_), time.monotonic()
            if sealing is None:
                continue
            num_files = len(sealing.stored.manifest.file_names)
            if session.table.own == 0:
                self._count(session, id_, files, num_files)
            elif now - session.said_at.get((id_, len(files)), -math.inf) > _SAY_AGAIN_S:
                session.said_at = {(id_, len(files)): now}
                self._tell_peer(session, 0, NoteProtected(id_, tuple(sorted(files)), num_files))

    def _count(self, session: _PeerSession, checkpoint_id: str, files: Iterable[int], num_files: int) -> None:
        """On the first node, count files that are kept. Marks the generation, here and on all nodes, when all are."""
        if session.table.own == 0 and session.count(checkpoint_id, files, num_files):
            mark_protected(self._folder, checkpoint_id)
            for peer in range(1, len(session.table.nodes)):
                self._tell_peer(session, peer, MarkProtected(checkpoint_id))

    def _tell_peer(self, session: _PeerSession, peer: int, request: PeerRequest) -> None:
        if self._transport is not None:
            way = _Way(self._transport, session.table.nodes[peer], session.secret.secret)
            self._senders.submit(_ask, way, request)

    def _tell(self, trouble: str) -> None:
        if trouble != self._told:
            self._told = trouble
            if trouble:
                _log.error("%s", trouble)
            note_peer_trouble(self._folder, trouble)


class _Way(NamedTuple):
    """The way to a peer, and the pace at which copies go there."""

    transport: PeerTransport
    peer: PeerNode
    secret: bytes
    pace: PutPace | None = None

    def connect(self) -> PeerConnection:
        """Connect to the peer."""
        return self.transport.connect(self.peer.address, secret=self.secret, timeout_s=_ANSWER_S)


def _newest(slots: Iterable[Slot], marked: Collection[str]) -> list[Slot]:
    """The slots of the newest generation among `slots`, unless it is marked as protected."""
    held = [(slot, contents) for slot in slots if (contents := slot.record.contents) is not None]
    newest: Place | None = max((contents.place for _, contents in held), default=None)
    return [slot for slot, contents in held if contents.place == newest and contents.checkpoint_id not in marked]


def _ask(way: _Way, request: PeerRequest) -> None:
    """Make a request whose failure does no harm, since it is made again."""
    try:
        with way.connect() as connection:
            _require(connection.ask(request, timeout_s=_ANSWER_S), Noted, way)
    except HoldfastError as error:
        _log.info("%s", error)


def _send(way: _Way, slot: Slot, offer: OfferCopy, sealing: Sealing) -> None:
    """Send a copy of `slot` to a peer; on return, the peer has it, whole and verified.

    Raises:
        StorageError: the peer cannot be reached, has no room, or found other bytes than were offered.
    """
    nbytes = offer.contents.files[-1].stop
    with way.connect() as connection:
        reply = connection.ask(offer, timeout_s=_ANSWER_S + nbytes * _MEMORY_S_PER_NBYTES)
        if isinstance(reply, CopyWanted):
            if reply.needs_generation:
                data = encode_generation(sealing.generation)
                put = PutGeneration(offer.contents.checkpoint_id, len(data))
                _require(connection.put(put, np.frombuffer(data, np.uint8), timeout_s=_RANGE_S), Noted, way)
            ranges = _ranges(offer.contents)
            _send_ranges(way, connection, slot, reply.token, ranges)
            reply = connection.ask(Finish(reply.token), timeout_s=_RANGE_S)
        _require(reply, CopyKept, way)


def _send_ranges(
    way: _Way, connection: PeerConnection, slot: Slot, token: int, ranges: Iterator[tuple[int, int]]
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
            _require(
                stream.put(put, Region(fd, offset + start, stop - start), timeout_s=_RANGE_S, pace=way.pace), Noted, way
            )

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


def _require(reply: PeerReply, kind: type[PeerReply], way: _Way) -> None:
    if isinstance(reply, kind):
        return
    reason = reply.reason if isinstance(reply, Declined | Damaged | RequestRefused) else repr(reply)
    raise StorageError(
        f"the keeper at {way.peer.address} does not keep a copy: {reason}",
        code="storage.peer",
        action="No action needed: holdfast tries again. If this goes on, look at that node.",
        retryable=True,
    )
