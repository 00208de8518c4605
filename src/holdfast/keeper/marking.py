"""Keepers find out together that a generation is protected: each node tells the first node of the table which of its
files are kept. That counts them, marks the generation when all are, and tells all nodes.

A node that cannot be protected tells the first node why, which passes that on to those that wait for the mark: so the
ranks of all nodes hear the reason. They go on to wait for protection, as before: what was protected last stays on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from holdfast.keeper.peer_session import PeerSession
from holdfast.keeper.peer_ways import Way, ask
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import is_protected, mark_protected
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot
from holdfast.peers.peer_messages import (
    MAX_TROUBLE_LEN,
    CopyKept,
    MarkProtected,
    Noted,
    NoteProtected,
    NoteTrouble,
    PeerReply,
    RequestRefused,
    Unprotected,
)

#: Interval at which a keeper says again that its copies are kept, until the generation is marked.
_SAY_AGAIN_S: Final = 1.0
#: Number of messages that are under way at the same time. One to a node that cannot be reached takes ten seconds.
_NUM_TELLERS: Final = 4


class Marking:
    """Tells other nodes what the keeper of `folder` knows about protection. Only the one thread of the keeper uses it,
    except for `answer`. `way_to` is the way to a peer of a session; `has_noted` writes a note into the memory of this
    node, and returns whether that was possible."""

    def __init__(
        self,
        folder: NodeFolder,
        sealing_of: Callable[[str], Sealing | None],
        way_to: Callable[[PeerSession, int], Way | None],
        has_noted: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._folder = folder
        self._sealing_of = sealing_of
        self._way_to = way_to
        self._has_noted = has_noted
        self._session: PeerSession | None = None
        #: Apart from the threads that send copies, which must not wait for a first node that cannot be reached.
        self._tellers = ThreadPoolExecutor(_NUM_TELLERS, thread_name_prefix="holdfast-tell")
        #: The last message to the first node of what is kept, and of trouble: one of each is under way at a time.
        self._said: Future[None] | None = None
        self._complained: Future[None] | None = None
        #: Whether something waits for the end of that message.
        self._is_held_back = False
        self._complains_at = -math.inf

    def join(self, session: PeerSession | None) -> None:
        """Speak to the peers of another job from now on."""
        self._session = session

    @property
    def has_news(self) -> bool:
        """Whether the first node may be told more now."""
        return self._is_held_back and not _is_under_way(self._said)

    def close(self) -> None:
        """End, and wait for the messages that are under way."""
        self._tellers.shutdown(cancel_futures=True)

    def say(self, session: PeerSession, due: Iterable[Slot]) -> None:
        """Tell the first node which files of this node are kept by all their peers, again and again until it has marked
        the generation. `due` are the slots of a generation that is not marked."""
        slots = [(slot, contents) for slot in due if (contents := slot.record.contents) is not None]
        if not slots:
            return
        partners = set(session.table.partners)
        kept = [each for each in slots if session.kept.get((each[0].name, each[1].checkpoint_id), set()) >= partners]
        if not kept and not session.lateness:  # else the first node may know why
            return
        contents = (kept or slots)[0][1]  # all are of one generation
        if len(kept) == len(slots):
            session.encoded = contents.checkpoint_id, contents.step, math.inf
            session.await_mark(contents, sum(slot.nbytes for slot, _ in kept))
        sealing = self._sealing_of(contents.checkpoint_id)
        if sealing is not None:
            files = {part.file for _, each in kept for part in each.files}
            self._say_kept(session, contents.checkpoint_id, files, len(sealing.stored.manifest.file_names))

    def complain(self, session: PeerSession, trouble: str) -> None:
        """Tell the first node why slots of this node cannot be protected now; "" says that they can."""
        now_s = time.monotonic()
        if session.table.own == 0:
            session.note_trouble(0, trouble)
        elif trouble and now_s - self._complains_at > _SAY_AGAIN_S and not _is_under_way(self._complained):
            self._complains_at = now_s
            note = NoteTrouble(session.table.own, trouble[:MAX_TROUBLE_LEN])
            self._complained = self._tell(session, 0, note)

    def answer(self, request: NoteProtected | NoteTrouble) -> PeerReply:
        """The first node's answer to another one. Any thread may call it."""
        session = self._session
        if session is None:
            return RequestRefused("this keeper has no table of peers yet")
        if isinstance(request, NoteTrouble):
            if request.sender >= len(session.table.nodes):
                raise ValueError("the job has no node of that number")
            session.note_trouble(request.sender, request.trouble)
        elif self._count(session, request.checkpoint_id, request.files, request.num_files):
            return CopyKept()
        elif trouble := session.trouble_elsewhere:
            return Unprotected(trouble[:MAX_TROUBLE_LEN])
        return Noted()

    def _say_kept(self, session: PeerSession, checkpoint_id: str, files: set[int], num_files: int) -> None:
        self._is_held_back = False
        if session.table.own == 0:
            self._count(session, checkpoint_id, files, num_files)
            return
        now_s, key = time.monotonic(), (checkpoint_id, len(files))
        if now_s - session.said_at.get(key, -math.inf) <= _SAY_AGAIN_S:
            return
        if _is_under_way(self._said):
            self._is_held_back = True
            return
        session.said_at = {key: now_s}
        self._said = self._tell(session, 0, NoteProtected(checkpoint_id, tuple(sorted(files)), num_files))

    def _count(self, session: PeerSession, checkpoint_id: str, files: Iterable[int], num_files: int) -> bool:
        """On the first node, count files that are kept. Marks the generation, here and on all nodes, when all are.
        Returns whether it is marked, now or before: a node that missed the mark says again that its copies are kept."""
        if session.table.own != 0:
            return False
        is_marked = checkpoint_id == session.marked or is_protected(self._folder, checkpoint_id)
        if not is_marked and not session.count(checkpoint_id, files, num_files):
            return False
        if not self._has_noted(lambda: mark_protected(self._folder, checkpoint_id)):
            return False
        if is_marked:
            return True
        for peer in range(1, len(session.table.nodes)):
            self._tell(session, peer, MarkProtected(checkpoint_id))
        return True

    def _tell(
        self, session: PeerSession, peer: int, request: MarkProtected | NoteProtected | NoteTrouble
    ) -> Future[None] | None:
        way = self._way_to(session, peer)
        return None if way is None else self._tellers.submit(self._ask, session, way, request)

    def _ask(self, session: PeerSession, way: Way, request: MarkProtected | NoteProtected | NoteTrouble) -> None:
        reply = ask(way, request)
        if not isinstance(request, NoteProtected) or session is not self._session:
            return
        if isinstance(reply, CopyKept):
            mark_protected(self._folder, request.checkpoint_id)
        session.note_elsewhere(reply.reason if isinstance(reply, Unprotected) else "")


def _is_under_way(message: Future[None] | None) -> bool:
    return message is not None and not message.done()
