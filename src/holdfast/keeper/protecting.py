"""The keeper's work for protected memory: it sends sealed slots to peers, and finds out when a generation is protected.

An offer may be repeated at any time, and costs one round trip where the peer has the copy. So nothing about what was
sent is written down: a new keeper offers again.

Where nodes share parity, an offer is of all slots of a checkpoint that this node has, and the peers read from them what
their rows need (`parity_rows`). So all files of a node are kept when all partners say that their rows are complete.

The keeper protects the copies of slots that were lost with their nodes like its own slots, where the table says so.

The keeper begins to send slots of the newest generation only: an older one is of no use once that is protected. A
trainer may fill a slot again in the middle of a transfer, if the run has its contents by then. The peer finds that by
the digests, and gives the copy up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format.records import Place
from holdfast.keeper.copies import PeerCopies
from holdfast.keeper.marking import Marking
from holdfast.keeper.own_slots import OwnSlots, file_numbers
from holdfast.keeper.parity_rows import ParityPeers, ParityRows
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.peer_session import PeerSession, Sending, patience_s
from holdfast.keeper.peer_ways import Way
from holdfast.keeper.persist import Sealing
from holdfast.keeper.rebuilding import ChainSums, Rebuilder
from holdfast.keeper.sending import offer_of, offer_parity, prepare_copies, send_copy
from holdfast.node_memory.generations import mark_protected, protected_ids
from holdfast.node_memory.node_folder import NodeFolder, memory_error, unusable_memory
from holdfast.node_memory.parity_records import SlotDigests
from holdfast.node_memory.peering import (
    PeerPort,
    PeerSecret,
    PeerSpeed,
    digest_of,
    note_peer_trouble,
    note_port,
    note_speed,
    note_trouble_elsewhere,
    noted_port,
    noted_secret,
    noted_table,
)
from holdfast.node_memory.slots import WHOLE, Slot, SlotState
from holdfast.peers.peer_messages import (
    CheckHeld,
    CopyKept,
    Declined,
    Finish,
    Get,
    GetRange,
    ListedSlot,
    ListedSlots,
    ListHeld,
    MarkProtected,
    Noted,
    NoteProtected,
    NoteTrouble,
    NotTaken,
    OfferCopy,
    OfferParity,
    PeerReply,
    PeerRequest,
    PrepareCopies,
    Put,
    RebuildCopy,
    RequestRefused,
    SendCopies,
)
from holdfast.peers.tcp import TcpPeers
from holdfast.peers.transport import PeerListener, PeerTransport, PutPace, PutSink, Region
from holdfast.store.base import Bytes

#: Number of slots sent at the same time.
_NUM_SENDERS: Final = 4
#: Interval at which a keeper that cannot listen tries to.
_LISTEN_AGAIN_S: Final = 5.0
#: The change of the speed of this node that a restore should know of.
_SPEED_SHARE: Final = 0.2
#: More than the resolution of the times of files.
_TICK_NS: Final = 100_000_000

_log = logging.getLogger(__name__)


class Protection:
    """The protection of the slots in `folder` by peers, and of slots of peers by this node: by `copies` and `rows` of
    parity. Only the one thread of the keeper uses it, except for `answer`, `sink`, `source` and `pace`, which threads
    of the listener call."""

    def __init__(
        self,
        folder: NodeFolder,
        copies: PeerCopies,
        rows: ParityRows,
        generations: PeerGenerations,
        sealing_of: Callable[[str], Sealing | None],
    ) -> None:
        self.copies = copies
        self.rows = rows
        self._own = OwnSlots()
        self._generations = generations
        self._sums = ChainSums(self._own, rows, generations, self._way_to)
        self._rebuilder = Rebuilder(copies, self._sums)
        self._folder = folder
        self._sealing_of = sealing_of
        self._session: PeerSession | None = None
        self._secret: PeerSecret | None = None
        #: The folder's time of change (`NodeFolder.changed_ns`) at the last look at its notes.
        self._met_ns = 0
        self._transport: PeerTransport | None = None
        self._listener: PeerListener | None = None
        self._senders = ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="holdfast-protect")
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-prepare")
        self._marking = Marking(folder, sealing_of, self._way_to_peer, self._has_noted)
        self._sending: dict[tuple[str, int], Sending] = {}
        self._told = ""
        self._told_others = ""
        self._told_speed = 0.0
        #: The port that ranks of this node do not know yet, because their memory did not take the note.
        self._unnoted_port: PeerPort | None = None
        #: The time at which this keeper tries again to listen, where it does not.
        self._listens_at = 0.0
        self._is_memory_full = False

    def meet(self, slots: Iterable[Slot]) -> None:
        """Listen for peers, which may read `slots`, and take the table of a new job."""
        if self._unnoted_port is not None:
            self._note_port(self._unnoted_port)
        if self._secret is not None and self._listener is None and time.monotonic() > self._listens_at:
            self._listen(self._secret)
            self.rows.join(self._parity_peers(self._session))
        changed_ns = self._folder.changed_ns()
        if changed_ns == self._met_ns:
            return
        secret, table = noted_secret(self._folder), noted_table(self._folder)
        if secret != self._secret:
            self._own.show(slots)  # a peer may ask for them at once
            self._listen(secret)
        session = self._session
        if secret is None or table is None or table.secret_digest != digest_of(secret.secret):
            session = None
        elif session is None or session.table != table:
            session = PeerSession(secret, table)
        if session is not self._session:
            self._release_paces()
            self._session = session
            self._marking.join(session)
            self._told = self._told_others = ""
            note_peer_trouble(self._folder, "")  # that of an earlier job, or of the keeper before this one
            note_trouble_elsewhere(self._folder, "")
            self.copies.expect_none()
            self.rows.join(self._parity_peers(session))
        # Another change in the same tick of the clock would not show, so a fresh one is looked at again.
        is_past = abs(time.time_ns() - changed_ns) > _TICK_NS
        self._met_ns = changed_ns if is_past else -1

    def look(self, slots: Iterable[Slot]) -> bool:
        """Record which copies are kept, mark what is protected, and start to send what is due. Returns whether anything
        is under way."""
        own = list(slots)
        whole = [slot for slot in own if slot.record.state in WHOLE]
        self._own.show(whole)
        session = self._session
        if session is None:
            return False
        self._end_sends()
        if session.table.parity is None:
            self._prepare(session, [slot for slot in own if slot.state == SlotState.FREE])
        whole += self._adopted(session)
        marked = protected_ids(self._folder)
        session.forget(whole)
        due = _newest(whole, marked)
        if due and not session.awaits_mark(due, marked):  # else peers fill again what is just being marked
            self._send_due(session, due)
        if not due:
            session.unmarked, session.encoded = "", ("", 0, math.inf)
        self._marking.say(session, due)
        trouble = self._trouble(session)
        self._marking.complain(session, trouble)
        self._tell(trouble or session.unmarked, others=session.trouble_elsewhere if due and not trouble else "")
        return bool(self._sending)

    def _send_due(self, session: PeerSession, due: Sequence[Slot]) -> None:
        """Start to send the `due` slots of a checkpoint to all nodes that protect them."""
        if session.table.parity is not None:
            self._offer_parity(session, due)
            return
        for slot in due:
            for target in session.table.partners:
                self._start_copy(session, slot, target)

    def _adopted(self, session: PeerSession) -> list[Slot]:
        """The copies that this node protects, because their owners are lost. Nodes that share parity do not."""
        adoption = session.table.adoption
        if adoption is None or session.table.parity is not None:
            return []
        return self.copies.kept(adoption.checkpoint_id, session.table.adopted)

    @property
    def is_wanted(self) -> bool:
        """Whether the last job wanted protection, as far as this keeper knows."""
        return self._secret is not None

    @property
    def being_read(self) -> set[str]:
        """The names of the slots that are being sent, or that peers read."""
        return {name for name, _ in self._sending} | self._own.being_read

    @property
    def is_sending(self) -> bool:
        """Whether a slot is being sent."""
        return bool(self._sending)

    @property
    def has_news(self) -> bool:
        """Whether the sending of a slot has ended, so that there is more to do."""
        return self._marking.has_news or any(each.sent.done() for each in self._sending.values())

    def close(self) -> None:
        """End all connections, and wait for the threads that send."""
        self._release_paces()
        if self._listener is not None:
            self._listener.close()
        self._senders.shutdown(cancel_futures=True)
        self._preparer.shutdown(cancel_futures=True)
        self._marking.close()
        self._sums.close()

    def answer(self, request: PeerRequest) -> PeerReply:
        """As `PeerService.answer`."""
        with unusable_memory(self._folder.path):
            return self._answer(request)

    def _answer(self, request: PeerRequest) -> PeerReply:
        reply: PeerReply = Noted()
        match request:
            case PrepareCopies():
                reply = self.copies.prepare(request)
            case OfferCopy():
                reply = self.copies.offer(request)
            case Finish():
                reply = self.copies.finish(request.token)
            case OfferParity():
                reply = self.rows.offer(request)
            case RebuildCopy():
                reply = self._rebuilder.rebuild(request)
            case CheckHeld():
                reply = self._sums.check(request)
            case ListHeld():
                own, copies = _listed(self._own.all()), _listed(self.copies.whole)
                reply = ListedSlots(tuple(own), tuple(copies), tuple(self.rows.all()))
            case SendCopies():
                reply = self._send_copies(request)
            case NoteProtected() | NoteTrouble():
                reply = self._marking.answer(request)
            case MarkProtected():
                mark_protected(self._folder, request.checkpoint_id)
            case _:
                reply = RequestRefused("this keeper does not serve such requests")
        return reply

    def _send_copies(self, request: SendCopies) -> PeerReply:
        """Send slots, and copies of other ones, to a node that is to restore from them: this one has no part in the job
        any more."""
        id_, wanted = request.checkpoint_id, set(request.files)
        way, sealing = self._way_to(request.address), self._generations.sealing(id_)
        own = [slot for slot in self._own.of(id_) if not file_numbers(slot).isdisjoint(wanted)]
        copies = self.copies.kept(id_, wanted - set().union(*map(file_numbers, own)))
        if way is None or sealing is None or not wanted <= set().union(*map(file_numbers, [*own, *copies])):
            return Declined("this node does not have these files any more")
        try:
            for slot in (*own, *copies):
                with self.copies.reading(slot) if slot.is_copy else self._own.reading(slot):
                    send_copy(way, slot, offer_of(slot), sealing, metered=nullcontext())
        except HoldfastError as error:
            return NotTaken(str(error)) if error.code == "storage.memory" else Declined(error.message)
        return CopyKept()

    def sink(self, put: Put) -> PutSink:
        """As `PeerService.sink`."""
        return self.copies.sink(put)

    def source(self, get: Get) -> AbstractContextManager[Region | Bytes]:
        """As `PeerService.source`."""
        return self._own.region(get) if isinstance(get, GetRange) else nullcontext(self._sums.sum(get))

    def pace(self, get: Get, address: str) -> PutPace | None:
        """As `PeerService.pace`. Training waits for a restore, and not for parity of what it saved."""
        session = self._session
        return session.paces.to(address) if session is not None and isinstance(get, GetRange) else None

    def _way_to_peer(self, session: PeerSession, peer: int) -> Way | None:
        address, transport = session.table.nodes[peer].address, self._transport
        return None if transport is None else Way(transport, address, session.secret.secret)

    def _way_to(self, address: str) -> Way | None:
        secret, transport = self._secret, self._transport
        return None if secret is None or transport is None else Way(transport, address, secret.secret)

    def _parity_peers(self, session: PeerSession | None) -> ParityPeers | None:
        """The peers that share parity with this node."""
        if session is None or session.table.parity is None or self._transport is None:
            return None
        return ParityPeers(session.table, self._transport, session.secret.secret)

    def _release_paces(self) -> None:
        """Have threads that wait for their turns to send go on, so that they can end."""
        if self._session is not None:
            self._session.paces.release()

    def _listen(self, secret: PeerSecret | None) -> None:
        """Listen for peers that know `secret`: where the keeper before this one did, if it can. With None, end that."""
        self._release_paces()
        if self._listener is not None:
            self._listener.close()
        self._secret, self._listener, self._transport, self._unnoted_port = secret, None, None, None
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
            self._listens_at = time.monotonic() + _LISTEN_AGAIN_S
            self._note_port(PeerPort(digest, error=str(error)))
            return
        self._transport = transport
        self._note_port(PeerPort(digest, int(self._listener.address.rpartition(":")[2])))

    def _note_port(self, port: PeerPort) -> None:
        """Tell the ranks of this node the port, now or at a later look."""
        is_noted = self._has_noted(lambda: note_port(self._folder, port))
        self._unnoted_port = None if is_noted else port

    def _has_noted(self, note: Callable[[], None]) -> bool:
        """Whether a note could be written into the memory of this node. Where that is full, the keeper goes on without
        the note, and writes it at a later look: it still has slots to write to the run."""
        try:
            note()
        except OSError as error:
            if not self._is_memory_full:
                _log.error("%s", memory_error(self._folder.path, error))
            self._is_memory_full = True
            return False
        self._is_memory_full = False
        return True

    def _prepare(self, session: PeerSession, slots: Iterable[Slot]) -> None:
        """Have the peers take memory for copies of slots that trainers are going to fill: it takes seconds."""
        for slot in slots:
            for target in session.table.partners:
                way = self._way_to_peer(session, target)
                if session.prepared.get((slot.rank, target), 0) < slot.nbytes and way is not None:
                    session.prepared[slot.rank, target] = slot.nbytes
                    self._preparer.submit(prepare_copies, way, slot.rank, slot.nbytes)

    def _start_copy(self, session: PeerSession, slot: Slot, target: int) -> None:
        """Start to send a copy of `slot` to `target`, unless that is not due."""
        contents = slot.record.contents
        assert contents is not None
        sealing = self._sealing_of(contents.checkpoint_id)
        if sealing is not None:
            metered = session.meter.sending(target, contents.files[-1].stop)
            send = partial(send_copy, slot=slot, offer=offer_of(slot), sealing=sealing, metered=metered)
            self._start(session, (slot,), target, send)

    def _offer_parity(self, session: PeerSession, slots: Sequence[Slot]) -> None:
        """Offer the `slots` of a checkpoint for parity, to this node's own rows and to its partners, if they are all
        that this node has of it."""
        contents, peers = slots[0].record.contents, self._parity_peers(session)
        assert contents is not None
        sealing = self._sealing_of(contents.checkpoint_id)
        if sealing is None or peers is None:
            return
        mine = tuple(sorted((SlotDigests.of(slot) for slot in slots), key=lambda slot: slot.rank))
        own = session.table.own
        if {part.file for slot in mine for part in slot.files} != peers.files(sealing, own):
            return
        known, _, until_s = session.encoded
        if known != contents.checkpoint_id and time.monotonic() <= until_s:  # else the trouble lasts until one is made
            nbytes = sum(slot.nbytes for slot in slots)
            session.encoded = contents.checkpoint_id, contents.step, time.monotonic() + patience_s(nbytes)
        offer = OfferParity(contents.checkpoint_id, own, mine)
        self.rows.offer(offer)
        for target in session.table.partners:
            self._start(session, tuple(slots), target, partial(offer_parity, offer=offer, sealing=sealing))

    def _start(self, session: PeerSession, slots: tuple[Slot, ...], target: int, send: Callable[[Way], bool]) -> None:
        """Start to send `slots` of one checkpoint to `target`, unless that is done, under way, or not to be tried again
        yet. After a failure, one thread at a time tries: one that cannot be reached keeps it for ten seconds."""
        contents, state, name = slots[0].record.contents, session.state(target), slots[0].name
        assert contents is not None
        if (name, target) in self._sending or target in session.kept.get((name, contents.checkpoint_id), ()):
            return
        if self._transport is None or time.monotonic() < state.retry_at:
            return
        if state.num_failures and any(each.is_to(session, target) for each in self._sending.values()):
            return
        address = session.table.nodes[target].address
        way = Way(self._transport, address, session.secret.secret, session.paces.to(address))
        self.copies.being_sent |= {slot.name for slot in slots}
        self._sending[name, target] = Sending(
            session, slots, contents, target, self._senders.submit(send, way), time.monotonic()
        )

    def _end_sends(self) -> None:
        for key, sending in list(self._sending.items()):
            if not sending.sent.done():
                continue
            del self._sending[key]
            if sending.sent.cancelled():
                continue
            session, contents, error = sending.session, sending.contents, sending.sent.exception()
            state = session.state(sending.target)
            if error is None:
                is_kept = sending.sent.result()
                state.work(is_done=is_kept)
                for slot in sending.slots if is_kept else ():
                    session.kept.setdefault((slot.name, contents.checkpoint_id), set()).add(sending.target)
            elif sending.slots[0].refresh().contents == contents:  # else a trainer has filled it anew meanwhile
                address = session.table.nodes[sending.target].address
                state.fail(f"step {contents.step} is not protected by {address}: {error}")
                for other in self._sending.values():
                    if other.is_to(session, sending.target):
                        other.sent.cancel()  # unless a thread has begun it
        self.copies.being_sent = frozenset(name for name, _ in self._sending)
        self._note_speed()

    def _note_speed(self) -> None:
        """Tell the ranks of this node, for a restore, how fast it sends, if that has changed."""
        speed = 0.0 if self._session is None else self._session.meter.bytes_per_s
        is_news = speed > 0.0 and abs(speed - self._told_speed) > _SPEED_SHARE * speed
        if is_news and self._has_noted(lambda: note_speed(self._folder, PeerSpeed(speed))):
            self._told_speed = speed

    def _trouble(self, session: PeerSession) -> str:
        """The reason why the slots of this node are not protected now; "" where there is none."""
        for sending in self._sending.values():
            if sending.session is session and sending.is_slow:
                address = session.table.nodes[sending.target].address
                return f"step {sending.contents.step} is not protected by {address} yet, which takes it slowly."
        _, step, until_s = session.encoded
        if time.monotonic() > until_s:
            return f"step {step} is not protected yet: its parity is not complete on all nodes of the group."
        return next(filter(None, (*(each.trouble for each in session.peers.values()), self.rows.trouble)), "")

    def _tell(self, trouble: str, *, others: str) -> None:
        """Tell the ranks of this node the reason why saves should not wait for protection now, and that of `others`."""
        if trouble != self._told and self._has_noted(lambda: note_peer_trouble(self._folder, trouble)):
            self._told = trouble
            if trouble:
                _log.error("%s", trouble)
        if others != self._told_others and self._has_noted(lambda: note_trouble_elsewhere(self._folder, others)):
            self._told_others = others
            if others:
                _log.info("%s", others)


def _listed(slots: Iterable[Slot]) -> Iterator[ListedSlot]:
    for slot in slots:
        contents = slot.record.contents
        if contents is not None and slot.state in WHOLE:
            yield ListedSlot(contents.checkpoint_id, SlotDigests.of(slot))


def _newest(slots: Iterable[Slot], marked: Collection[str]) -> list[Slot]:
    """The slots of the newest generation among `slots`, unless it is marked as protected."""
    held = [(slot, contents) for slot in slots if (contents := slot.record.contents) is not None]
    newest: Place | None = max((contents.place for _, contents in held), default=None)
    return [slot for slot, contents in held if contents.place == newest and contents.checkpoint_id not in marked]
